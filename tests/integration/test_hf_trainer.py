"""transformers.Trainer killed at arbitrary steps and started again: the same losses to the last bit.

Real: processes of their own running tests/fakes/hf_script.py, SIGKILL and SIGTERM, a store of files, and for the larger
test torchrun with two processes over gloo.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from storage.commit_log import CommitLog
from storage.local_store import LocalStore
from storage.verify import verify_commit
from tests.fakes.hf_script import DROPOUT

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "fakes" / "hf_script.py"
STEPS = 18
STOPPED = 14


def run(folder: Path, name: str, end: str = "", launcher: Sequence[str] = ()) -> int:
    """One life of the script; its exit code."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *launcher, str(SCRIPT), str(folder / f"{name}-run"), str(folder / f"{name}.log"), end]
    output = folder / f"{name}.out"
    with output.open("a") as file:
        ended = subprocess.run(command, env=environment, stdout=file, stderr=file, timeout=240, check=False)
    return ended.returncode


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.log").read_text().splitlines()]


def by_step(found: list[dict[str, Any]]) -> dict[tuple[int, bool], dict[str, Any]]:
    """The last that was written of each step, training and evaluation apart."""
    return {(line["step"], "eval_loss" in line): line for line in found if "step" in line}


def steps_of(found: list[dict[str, Any]]) -> list[int]:
    return [line["step"] for line in found if "loss" in line]


def assert_same_run(folder: Path, unbroken: str, broken: str) -> None:
    expected, found = lines(folder, unbroken), lines(folder, broken)
    assert steps_of(expected) == list(range(1, STEPS + 1)), (folder / f"{unbroken}.out").read_text()
    reference = by_step(expected)
    assert by_step(found) == reference
    # A step that was repeated was repeated as it was, in each life.
    assert [line for line in found if "step" in line and line != reference[line["step"], "eval_loss" in line]] == []
    assert found[-1] == expected[-1], "other weights, or another number of log entries, at the end"
    store = LocalStore(folder / f"{broken}-run")
    commits = CommitLog(store, None).commits()
    assert commits[-1].step == STEPS
    assert len(commits) <= 4  # three, and the best
    for commit in commits:
        assert not verify_commit(store, CommitLog(store, None), commit).problems


def two_processes() -> list[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]


@pytest.mark.timeout(300)
def test_a_trainer_that_is_killed_and_told_to_stop_trains_as_one_that_never_was(tmp_path: Path) -> None:
    assert run(tmp_path, "unbroken") == 0, (tmp_path / "unbroken.out").read_text()
    assert run(tmp_path, "broken", "kill:5") == -signal.SIGKILL, (tmp_path / "broken.out").read_text()
    before = steps_of(lines(tmp_path, "broken"))[-1]
    assert run(tmp_path, "broken", "term:9") == STOPPED, (tmp_path / "broken.out").read_text()
    told = steps_of(lines(tmp_path, "broken"))[-1]
    assert told > before
    assert CommitLog(LocalStore(tmp_path / "broken-run"), None).commits()[-1].step == told, "a finished step was lost"
    assert run(tmp_path, "broken") == 0, (tmp_path / "broken.out").read_text()
    assert_same_run(tmp_path, "unbroken", "broken")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_processes_under_torchrun_are_ended_in_every_epoch_and_train_as_if_they_were_not(tmp_path: Path) -> None:
    torchrun = two_processes()
    assert run(tmp_path, "unbroken", launcher=torchrun) == 0, (tmp_path / "unbroken.out").read_text()
    for end in ("kill:4", "term:9", "kill:15"):
        assert run(tmp_path, "broken", end, torchrun) != 0
        if end.startswith("term"):
            told = steps_of(lines(tmp_path, "broken"))[-1]
            newest = CommitLog(LocalStore(tmp_path / "broken-run"), None).commits()[-1].step
            assert newest == told, "told to stop on one rank, but not all of them saved their last step"
    assert run(tmp_path, "broken", launcher=torchrun) == 0, (tmp_path / "broken.out").read_text()
    assert_same_run(tmp_path, "unbroken", "broken")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_another_number_of_processes_sees_the_same_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DROPOUT, "0")
    assert run(tmp_path, "unbroken") == 0, (tmp_path / "unbroken.out").read_text()
    assert run(tmp_path, "broken", "kill:4", two_processes()) != 0
    assert run(tmp_path, "broken", "kill:10") == -signal.SIGKILL, (tmp_path / "broken.out").read_text()
    assert run(tmp_path, "broken", launcher=two_processes()) == 0, (tmp_path / "broken.out").read_text()
    expected, found = by_step(lines(tmp_path, "unbroken")), by_step(lines(tmp_path, "broken"))
    assert found.keys() == expected.keys()
    for key, line in expected.items():
        for name in line.keys() & {"loss", "eval_loss", "grad_norm", "learning_rate"}:
            assert float.fromhex(found[key][name]) == pytest.approx(float.fromhex(line[name]), rel=1e-4), (key, name)

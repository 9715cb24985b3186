"""`raysume drill` for real: the shipped drill, a loop of one's own, and Ctrl-C.

Real: both runs, their Ray clusters on this machine, every fault, the user's files in a directory that is no package.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from orchestrator.event_tail import EventTail
from orchestrator.exit_codes import DrillCode, ExitCode
from orchestrator.local_cluster import descendants, is_running
from storage.arena import process_incarnation
from tests.runs import ROOT, make_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

COURSE = "kill-worker@8,kill-node@18,add-node@18,drain-node@30:8s,scale:2@42,scale:3@48,kill-worker@66"
GONE_S = 20.0


def drill(config: Path, *arguments: str, cwd: Path, timeout_s: float = 800.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "orchestrator", "drill", str(config), "--json", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def result_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.stdout.strip(), done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_three_kills_a_drain_a_shrink_and_a_growth_leave_no_bit_different(tmp_path: Path) -> None:
    config = ROOT / "clusters" / "local" / "drill.yaml"
    done = drill(
        config, "--chaos", COURSE, "--out", str(tmp_path / "out"), f"data.url={tmp_path / 'data'}", cwd=tmp_path
    )
    found = result_of(done)
    assert (done.returncode, found["problems"], found["first_difference"]) == (0, [], []), done.stderr[-4000:]
    assert found["weights_digest"]["uninterrupted"] == found["weights_digest"]["interrupted"] is not None
    assert found["quantities"]["loss"] == {
        "demanded": "equal to the bit",
        "compared": 80,
        "differing": 0,
        "largest": None,
    }
    causes = {recovery["cause"] for recovery in found["recoveries"]}
    assert causes >= {"worker-lost", "node-lost", "preemption", "scale"}
    sizes = [recovery["world_size"] for recovery in found["recoveries"]]
    assert any(later > earlier for earlier, later in itertools.pairwise(sizes)), "it never grew"


LOOP = """
import torch
from settings_of_mine import WIDTH


def train(session):
    assert session.loop_config == {"note": "a b"}
    state = session.build(make_model=lambda: Net(WIDTH), make_optimizer=make_optimizer)
    for step in session.steps():
        for batch in step.leaves():
            step.backward(batch, loss_of(state.model, batch))
        step.apply()
        session.step_end(step)


class Net(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.tokens = torch.nn.Embedding(257, width)
        self.dropout = torch.nn.Dropout(0.1)
        self.output = torch.nn.Linear(width, 257)

    def forward(self, ids):
        return self.output(self.dropout(torch.relu(self.tokens(ids))))


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, foreach=True)


def loss_of(model, batch):
    return torch.nn.functional.cross_entropy(model(batch.input_ids).flatten(0, 1), batch.labels.flatten())
"""


def test_a_loop_of_ones_own_is_drilled_from_its_own_directory(tmp_path: Path, data_url: str) -> None:
    (tmp_path / "my_train.py").write_text(LOOP)
    (tmp_path / "settings_of_mine.py").write_text("WIDTH = 32\n")
    for name in ("storage", "workers"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the user has one of this name')\n")
    run = make_run(tmp_path, data_url, steps=80, every_steps=10, settings={"model": {"config": {}}})
    loop = ("--loop", "my_train:train", "--loop-config", '{"note": "a b"}')
    faults = ("--local-nodes", "2", "--chaos", "kill-worker@12,kill-driver@20")
    done = drill(run.config_path, *loop, *faults, "reproducible=true", cwd=tmp_path)
    found = result_of(done)
    assert (done.returncode, found["problems"], found["first_difference"]) == (0, [], []), done.stderr[-4000:]
    assert Path(found["folder"]) == tmp_path / "outputs" / "drill-chaos"
    causes = [recovery["cause"] for recovery in found["recoveries"]]
    assert (causes[0], causes[-1]) == ("worker-lost", "driver-restart")


FORGETFUL = (
    LOOP
    + """

def forgetful(session):
    state = session.build(make_model=lambda: Net(WIDTH), make_optimizer=make_optimizer)
    seen = 0.0  # what the loop keeps outside of its state
    for step in session.steps():
        for batch in step.leaves():
            step.backward(batch, loss_of(state.model, batch) * (1.0 + 0.01 * seen))
        step.apply()
        seen += 1.0
        session.step_end(step)
"""
)


def test_a_loop_that_forgets_something_is_told_from_which_step_on(tmp_path: Path, data_url: str) -> None:
    (tmp_path / "my_train.py").write_text(FORGETFUL)
    (tmp_path / "settings_of_mine.py").write_text("WIDTH = 32\n")
    run = make_run(tmp_path, data_url, steps=40, every_steps=10, settings={"model": {"config": {}}})
    faults = ("--local-nodes", "2", "--chaos", "kill-worker@20")
    done = drill(run.config_path, "--loop", "my_train:forgetful", *faults, "reproducible=true", cwd=tmp_path)
    found = result_of(done)
    assert done.returncode == DrillCode.NOT_THE_SAME
    restored = found["recoveries"][0]["restored_step"]
    assert found["first_difference"][0]["step"] == restored + 1
    assert "loss" in {one["quantity"] for one in found["first_difference"]}
    assert found["last_fault_before"].startswith("kill-worker")


@pytest.mark.parametrize("run_name", ["uninterrupted", "interrupted"])
def test_ctrl_c_ends_both_with_14_and_leaves_nothing(tmp_path: Path, data_url: str, run_name: str) -> None:
    steps = "600" if run_name == "interrupted" else "100000"
    run = make_run(tmp_path, data_url, steps=30, every_steps=10)
    overrides = ("world.max_workers=1", "--chaos", "kill-worker@15")
    out = tmp_path / "out"
    command = ["drill", str(run.config_path), "--steps", steps, "--local-nodes", "1", "--out", str(out), *overrides]
    process = subprocess.Popen(
        [sys.executable, "-m", "orchestrator", *command],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    seen: set[tuple[int, int | None]] = set()
    try:
        tail = EventTail(out / run_name / "events.jsonl")
        wait(lambda: any(event["event"] == "step" for event in tail.read()), 200.0, process)
        seen = {(pid, process_incarnation(pid)) for pid in descendants(process.pid)}
        os.killpg(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == ExitCode.STOPPED, said
    assert f"stopping the {run_name} run" in said
    assert not out.exists()
    assert len(seen) > 3
    wait(lambda: not alive(seen), GONE_S)
    assert re.findall(r"Traceback", said) == []
    assert sorted(Path("/dev/shm").glob("raysume-chaos-*")) == []


def alive(processes: set[tuple[int, int | None]]) -> Sequence[int]:
    return [pid for pid, born in processes if process_incarnation(pid) == born and is_running(pid)]


def wait(is_so: Callable[[], bool], limit_s: float, process: subprocess.Popen[str] | None = None) -> None:
    deadline_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline_s, f"not within {limit_s:g} s"
        assert process is None or process.poll() is None, f"it ended: {process.communicate()[0][-3000:]}"
        time.sleep(0.05)

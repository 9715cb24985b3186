"""A run is made larger, smaller, saved and stopped by commands beside it: no step is lost or done twice.

Real: the command with its supervisor, three Ray nodes, FSDP over gloo, a file system store, and each request as a
process of its own that knows nothing but the run's URL.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.exit_codes import ExitCode
from storage.keys import CONTROL
from tests.runs import (
    ROOT,
    RunProcess,
    RunResult,
    assert_all_commits_verify,
    assert_each_attempt_goes_on_where_it_restored,
    assert_nothing_left,
    assert_samples_in_order,
    attempts_of,
    make_run,
    write_rows,
)

pytestmark = pytest.mark.timeout(420)


def ask(*arguments: str) -> dict[str, Any]:
    """``raysume ... --json`` in a process of its own; its answer."""
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator", *arguments, "--json"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.stdout, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    assert answer["exit_code"] == done.returncode
    return answer


class Scaled:
    """What was asked and answered, and the run that was asked."""

    def __init__(self, folder: Path) -> None:
        data = str(folder / "data")
        write_rows(data)
        world = {"min_workers": 2, "max_workers": 2, "start_grace_s": 60.0, "accept_joins": False}
        self.run = make_run(folder, data, steps=100_000, every_steps=50_000, settings={"world": world})
        url = str(self.run.directory)
        with RunProcess.of_cli(self.run, "--local-nodes", "3") as process:
            process.wait_for("step", 120.0)
            self.too_few = ask("scale", url, "--workers", "1")
            self.larger = ask("scale", url, "--workers", "3", "--wait", "--timeout", "120")
            process.wait_for("step", 60.0, lambda event: event["world_size"] == 3)
            self.smaller = ask("scale", str(self.run.config_path), "--workers", "2", "--wait", "--timeout", "120")
            process.wait_for("step", 60.0, lambda event: event["attempt"] == 3)
            self.saved = ask("save", url, "--wait", "--timeout", "60")
            self.stopped = ask("stop", url, "--wait", "--timeout", "120")
            self.result = process.finish(60.0)
        self.late = ask("save", url)


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Scaled:
    return Scaled(tmp_path_factory.mktemp("scaled"))


@pytest.fixture(scope="module")
def result(scaled: Scaled) -> RunResult:
    return scaled.result


def test_the_world_has_the_sizes_that_were_asked_for(scaled: Scaled, result: RunResult) -> None:
    assert attempts_of(result) == [("start", 2), ("scale", 3), ("scale", 2)], result.stderr
    assert (scaled.larger["state"], scaled.larger["reason"]) == ("done", "3 workers train")
    assert (scaled.smaller["state"], scaled.smaller["reason"]) == ("done", "2 workers train")
    first_of = {e["attempt"]: e["step"] for e in reversed(result.named("step"))}
    assert scaled.larger["step"] == first_of[2]
    assert scaled.smaller["step"] == first_of[3]
    assert [event["wish"] for event in result.named("request")] == ["scale", "scale", "scale", "save", "stop"]


def test_neither_growing_nor_shrinking_loses_a_step_or_a_sample(result: RunResult) -> None:
    assert [attempt["lost_steps"] for attempt in result.summary["attempts"]] == [0, 0, 0]
    steps = [event["step"] for event in result.named("step")]
    assert len(steps) == len(set(steps)), "a step was done twice"
    assert_each_attempt_goes_on_where_it_restored(result)
    assert_samples_in_order(result)


def test_a_size_below_the_minimum_is_refused_and_changes_nothing(scaled: Scaled) -> None:
    assert (scaled.too_few["state"], scaled.too_few["exit_code"]) == ("refused", 23)
    assert "fewer than world.min_workers (2)" in scaled.too_few["reason"]


def test_a_save_is_committed_when_the_command_says_so(scaled: Scaled, result: RunResult) -> None:
    assert (scaled.saved["state"], scaled.saved["exit_code"]) == ("done", 0)
    assert scaled.saved["step"] in [event["step"] for event in result.named("committed")]
    assert scaled.saved["step"] in assert_all_commits_verify(scaled.run)


def test_a_stop_ends_the_run_with_its_newest_step_saved(scaled: Scaled, result: RunResult) -> None:
    assert scaled.stopped["state"] == "done", scaled.stopped
    assert result.exit_code == ExitCode.STOPPED
    assert assert_all_commits_verify(scaled.run)[-1] == result.summary["steps"]


def test_afterwards_nobody_is_there_to_ask_and_nothing_is_left(scaled: Scaled, result: RunResult) -> None:
    assert scaled.late["exit_code"] == 22
    assert_nothing_left(result)
    control = scaled.run.directory / CONTROL
    assert not control.exists() or not list(control.iterdir())

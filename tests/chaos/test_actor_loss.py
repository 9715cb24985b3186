"""The actors that hold a run together die one by one: it goes on, or ends with a word on what to do.

Real: the command with its supervisor, two Ray nodes, SIGKILL of a Keeper, the rendezvous, a worker, the coordinator.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from orchestrator.exit_codes import ExitCode
from orchestrator.local_cluster import descendants
from tests.runs import (
    NUM_ROWS,
    RunProcess,
    assert_all_commits_verify,
    assert_each_attempt_goes_on_where_it_restored,
    assert_nothing_left,
    assert_samples_in_order,
    make_run,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
SETTINGS = {"world": {"min_workers": 1, "max_workers": 2, "start_grace_s": 60.0}}


def pids_of(process: RunProcess, name: str) -> set[int]:
    """Processes of the run whose title begins with ``name``."""
    found = set()
    for pid in descendants(process.pid):
        try:
            title = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue  # it ended meanwhile
        if title.startswith(name):
            found.add(pid)
    return found


def kill(process: RunProcess, name: str) -> int:
    """SIGKILL of one process of that name; returns its pid."""
    pid = min(pids_of(process, name))
    os.kill(pid, signal.SIGKILL)
    return pid


def test_a_run_outlives_a_keeper_and_the_rendezvous(tmp_path: Path, data_url: str) -> None:
    run = make_run(tmp_path, data_url, steps=400, every_steps=20, settings=SETTINGS)
    with RunProcess.of_cli(run, "--local-nodes", "2") as process:
        process.wait_for("committed", 120.0)
        killed = kill(process, "ray::KeeperActor")
        killed_at = process.events()[-1]["step"] or 0
        process.wait_for("committed", 90.0, lambda event: event["step"] > killed_at + 100)
        keepers = pids_of(process, "ray::KeeperActor")
        assert len(keepers - {killed}) == 2, "no other Keeper took the dead one's place"
        kill(process, "ray::Rendezvous")
        kill(process, "ray::WorkerActor")
        result = process.finish(200.0)
    assert result.exit_code == 0, result.stderr
    causes = [event["cause"] for event in result.named("attempt_started")]
    assert causes[:2] == ["start", "worker-lost"], "the death of a Keeper must not end an Attempt"
    assert result.summary["status"] == "finished"
    assert_each_attempt_goes_on_where_it_restored(result)
    assert_samples_in_order(result, NUM_ROWS)
    assert_all_commits_verify(run)
    assert_nothing_left(result)


def test_a_lost_coordinator_ends_the_driver_with_a_report_and_the_same_command_goes_on(
    tmp_path: Path, data_url: str
) -> None:
    run = make_run(tmp_path, data_url, steps=200, every_steps=20, settings=SETTINGS)
    with RunProcess.of_cli(run, "--local-nodes", "2") as process:
        process.wait_for("committed", 120.0)
        kill(process, "ray::CoordinatorShell")
        broken = process.finish(120.0)
    assert broken.exit_code == ExitCode.INTERNAL_ERROR
    assert "run the same command again" in broken.summary["exit_reason"]
    assert_nothing_left(broken)
    with RunProcess.of_cli(run, "--local-nodes", "2") as process:
        result = process.finish(200.0)
    assert (result.exit_code, result.summary["status"]) == (0, "finished")
    assert_each_attempt_goes_on_where_it_restored(result)
    assert_samples_in_order(result, NUM_ROWS)
    with RunProcess.of_cli(run, "--local-nodes", "2") as process:
        again = process.finish(60.0)
    assert (again.exit_code, again.summary["weights_digest"]) == (0, result.summary["weights_digest"])
    assert len(again.events) == len(result.events), "a finished run was driven once more"

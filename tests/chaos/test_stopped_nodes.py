"""Processes that are stopped, not dead: one whose node goes next, and a whole node that wakes up when it is lost.

Real: a user's script as driver, a Ray cluster of three nodes, SIGSTOP and SIGCONT, SIGKILL of a whole node, gloo.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.local_cluster import is_running
from storage.arena import arena_directory
from tests.clusters import RayNodes, ray_nodes
from tests.runs import (
    Run,
    RunProcess,
    RunResult,
    assert_all_commits_verify,
    assert_each_attempt_goes_on_where_it_restored,
    assert_samples_in_order,
    journal_counters,
    make_run,
)

USER_SCRIPT = Path(__file__).parents[1] / "fakes" / "user_script.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
Deed = Callable[[RunProcess, RayNodes], None]


def member(process: RunProcess, rank: int) -> tuple[str, int]:
    """Node and pid of a member of the first World."""
    worker = process.wait_for("attempt_started", 1.0)["members"][rank]
    ready = process.wait_for("worker_ready", 1.0, lambda event: event["worker"] == worker)
    return ready["node_id"], ready["pid"]


def drive(folder: Path, data_url: str, deed: Deed, *, silent_s: float) -> RunResult:
    """Three workers, ``deed`` done to one after the first Commit, then steps and a Commit of those that are left."""
    settings = {
        "world": {"min_workers": 1, "max_workers": 3, "start_grace_s": 60.0, "accept_joins": False},
        "failure": {"max_user_errors": 0, "silent_s": silent_s},
    }
    run = make_run(folder, data_url, steps=100_000, every_steps=10, settings=settings)
    with ray_nodes(3) as nodes:
        command = [sys.executable, str(USER_SCRIPT), str(run.config_path), nodes.address, str(folder)]
        with RunProcess(run, command) as process:
            process.wait_for("committed", 120.0)
            deed(process, nodes)
            newest = process.events()[-1]["step"] or 0
            process.wait_for("committed", 90.0, lambda event: event["attempt"] == 2 and event["step"] > newest)
            os.kill(process.pid, signal.SIGTERM)
            return process.finish(90.0)


def objects_of(run: Run, attempt: int, rank: int) -> frozenset[str]:
    """All that the store holds of a rank's Attempt: its Shards, and every Manifest and Commit."""
    keys = {str(path.relative_to(run.directory)) for path in run.directory.rglob("*") if path.is_file()}
    ours = {key for key in keys if re.search(rf"\ba{attempt:06}-", key)}
    return frozenset(key for key in ours if not key.startswith("shards/") or f"rank-{rank:05}" in key)


def assert_two_survivors_went_on(result: RunResult) -> None:
    starts = result.named("attempt_started")
    assert [(event["cause"], event["world_size"]) for event in starts] == [("start", 3), ("node-lost", 2)], (
        result.stderr
    )
    assert set(starts[1]["members"]) <= set(starts[0]["members"]), "a survivor lost its process"
    last = journal_counters(result.run)[-1]
    assert (last["infrastructure"], last["user_errors"], last["preemptions"]) == (1, 0, 0)
    assert_samples_in_order(result)
    assert_each_attempt_goes_on_where_it_restored(result)
    assert_all_commits_verify(result.run)


def test_a_stopped_worker_whose_node_goes_is_a_lost_node(tmp_path: Path, data_url: str) -> None:
    def deed(process: RunProcess, nodes: RayNodes) -> None:
        node_id, pid = member(process, 1)
        os.kill(pid, signal.SIGSTOP)
        nodes.kill(node_id)
        shutil.rmtree(arena_directory(process.run.run_id, node_id), ignore_errors=True)
        assert not is_running(pid)

    # Silence alone would take longer than the test waits: it is the node's end that is seen.
    assert_two_survivors_went_on(drive(tmp_path, data_url, deed, silent_s=300.0))


def test_a_whole_node_that_stood_still_is_fenced_and_writes_nothing_when_it_wakes(
    tmp_path: Path, data_url: str
) -> None:
    lost: list[str] = []
    held: list[frozenset[str]] = []

    def deed(process: RunProcess, nodes: RayNodes) -> None:
        node_id, _ = member(process, 1)
        lost.append(node_id)
        stopped = nodes.pids(node_id)
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            process.wait_for("step", 120.0, lambda event: event["attempt"] == 2)
            held.append(objects_of(process.run, 1, 1))
        finally:
            for pid in filter(is_running, stopped):
                os.kill(pid, signal.SIGCONT)

    result = drive(tmp_path, data_url, deed, silent_s=5.0)
    assert_two_survivors_went_on(result)
    (fault,) = result.named("fault")
    assert fault["nodes"] == lost
    after = result.events[result.events.index(result.named("attempt_started")[1]) :]
    assert {event["attempt"] for event in after if event["event"] in ("step", "committed")} == {2}
    assert held[0], "nothing was looked for"
    assert objects_of(result.run, 1, 1) <= held[0], "what had stood still wrote when it woke"

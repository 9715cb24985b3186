"""Workers die, hang and are reclaimed, nodes go one after another: what is counted as what, and how a run goes on.

Real: Ray clusters of several nodes, the command and a user's script as drivers, SIGKILL and SIGSTOP, FSDP over gloo.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import ray

from orchestrator.local_cluster import is_running
from storage.arena import arena_directory
from tests.clusters import RayNodes, ray_nodes
from tests.runs import (
    Run,
    RunProcess,
    RunResult,
    assert_all_commits_verify,
    assert_each_attempt_goes_on_where_it_restored,
    assert_nothing_left,
    assert_samples_in_order,
    effective_steps,
    journal_counters,
    make_run,
)

USER_SCRIPT = Path(__file__).parents[1] / "fakes" / "user_script.py"
NUM_WORKER_KILLS = 5
pytestmark = pytest.mark.timeout(400)


def causes(result: RunResult) -> list[str]:
    return [event["cause"] for event in result.named("attempt_started")]


# -- faults of every kind from the command line -------------------------------------------------------------------


@pytest.fixture(scope="module")
def hits(tmp_path_factory: pytest.TempPathFactory, data_url: str, uninterrupted: RunResult) -> RunResult:
    """A node is reclaimed, a worker killed, another one stopped, and both nodes that are left lost."""
    folder: Path = tmp_path_factory.mktemp("hits")
    settings = {
        # Joins would add Attempts at steps that depend on how fast a worker's successor starts.
        "world": {"min_workers": 1, "max_workers": 3, "start_grace_s": 60.0, "accept_joins": False},
        "failure": {"max_user_errors": 0, "max_infrastructure": 2, "silent_s": 5.0},
    }
    run = make_run(folder, data_url, steps=uninterrupted.summary["steps"], every_steps=10, settings=settings)
    chaos = "drain-node:3@6:3s,kill-worker:1@18,stop-worker:2@30,kill-node:1@45,kill-node:2@45"
    with RunProcess.of_cli(run, "--local-nodes", "3", "--chaos", chaos) as process:
        return process.finish(240.0)


def test_each_fault_is_named_for_what_it_was(hits: RunResult) -> None:
    assert causes(hits) == ["start", "preemption", "worker-lost", "hang"], hits.stderr
    assert [event["cause"] for event in hits.named("fault")] == ["worker-lost", "hang", "node-lost"]
    verbs = [event["verb"] for event in hits.named("chaos")]
    assert set(verbs[:4]) == {"drain-node", "drain-deadline", "kill-worker", "stop-worker"}


def test_a_preemption_notice_costs_no_step(hits: RunResult) -> None:
    preempted = hits.summary["attempts"][1]
    (left,) = hits.named("left")
    assert (preempted["cause"], preempted["lost_steps"], preempted["world_size"]) == ("preemption", 0, 2)
    assert preempted["restored_step"] == left["step"]


def test_infrastructure_has_a_budget_of_its_own_that_ends_the_run(hits: RunResult) -> None:
    assert hits.exit_code == 12
    assert hits.summary["status"] == "failure-budget"
    assert "3 infrastructure failures, failure.max_infrastructure is 2" in hits.summary["exit_reason"]
    last = journal_counters(hits.run)[-1]
    assert (last["infrastructure"], last["preemptions"], last["user_errors"]) == (3, 1, 0)
    assert (hits.summary["failures"], hits.summary["preemptions"]) == (3, 1)


def test_what_was_trained_is_what_the_uninterrupted_run_trained(hits: RunResult, uninterrupted: RunResult) -> None:
    assert_samples_in_order(hits)
    assert_each_attempt_goes_on_where_it_restored(hits)
    expected = effective_steps(uninterrupted.events)
    found = effective_steps(hits.events)
    assert len(found) >= 45
    for step, event in found.items():
        assert event["loss"] == pytest.approx(expected[step]["loss"], rel=1e-4), f"loss of step {step}"
        assert event["lr"] == pytest.approx(expected[step]["lr"], rel=1e-12, abs=0), f"learning rate of step {step}"


def test_every_commit_verifies_and_nothing_is_left_behind(hits: RunResult) -> None:
    assert_all_commits_verify(hits.run)
    assert_nothing_left(hits)


# -- a user's own script on a cluster that loses workers and nodes -------------------------------------------------


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with ray_nodes(4) as cluster:
        yield cluster


@dataclass(slots=True, kw_only=True)
class Restart:
    """What was seen once an Attempt after a fault had made a step. ``workers``: pids alive, by node."""

    nodes: list[str]
    placements: dict[str, str]
    workers: dict[str, list[int]]


@dataclass(slots=True, kw_only=True)
class Storm:
    """One run in which five workers and three nodes are lost before its own code fails twice."""

    run: Run
    nodes: RayNodes
    folder: Path
    process: RunProcess
    restarts: list[Restart] = field(default_factory=list)
    killed_pids: list[int] = field(default_factory=list)
    num_attempts: int = 1
    waited_nodes: list[str] = field(default_factory=list)
    result: RunResult | None = None

    def rage(self) -> None:
        self.await_step()
        for _ in range(NUM_WORKER_KILLS):
            self.kill_worker()
            self.await_restart()
        (self.folder / "closed").touch()
        self.kill_node()
        self.num_attempts += 1
        self.process.wait_for("regrouped", 60.0, lambda event: event["attempt"] == self.num_attempts)
        self.kill_node()  # before the first step of the Attempt
        (self.folder / "closed").unlink()
        self.await_restart()
        self.waited_nodes = self.nodes.ids
        self.kill_node()
        self.process.wait_for("waiting", 60.0, lambda event: event["have"] == 1)
        self.nodes.add()
        self.await_restart()
        (self.folder / "bad-batch").touch()
        self.result = self.process.finish(60.0)

    def await_step(self) -> None:
        self.process.wait_for("step", 90.0, lambda event: event["attempt"] == self.num_attempts)

    def await_restart(self) -> None:
        self.num_attempts += 1
        self.await_step()
        prefix = f"raysume-{self.run.run_id}-"
        groups = [row for row in ray.util.placement_group_table().values() if row["name"].startswith(prefix)]
        workers: dict[str, list[int]] = {}
        for event in self.process.events():
            if event["event"] == "worker_ready" and is_running(event["pid"]):
                workers.setdefault(event["node_id"], []).append(event["pid"])
        self.restarts.append(
            Restart(
                nodes=self.nodes.ids,
                placements={row["name"].removeprefix(prefix): row["state"] for row in groups},
                workers=workers,
            )
        )

    def members(self) -> dict[str, dict[str, Any]]:
        """The ``worker_ready`` events of the present Attempt's members, by worker."""
        events = self.process.events()
        names = [event for event in events if event["event"] == "attempt_started"][-1]["members"]
        return {e["worker"]: e for e in events if e["event"] == "worker_ready" and e["worker"] in names}

    def kill_worker(self) -> None:
        # Each Attempt gets further than the last, so that the next one has something new to restore.
        self.process.wait_for("committed", 60.0, lambda event: event["attempt"] == self.num_attempts)
        pid = next(iter(self.members().values()))["pid"]
        os.kill(pid, signal.SIGKILL)
        self.killed_pids.append(pid)

    def kill_node(self) -> None:
        node_id = next(iter(self.members().values()))["node_id"]
        self.nodes.kill(node_id)
        shutil.rmtree(arena_directory(self.run.run_id, node_id), ignore_errors=True)


@pytest.fixture(scope="module")
def storm(tmp_path_factory: pytest.TempPathFactory, data_url: str, nodes: RayNodes) -> Storm:
    folder: Path = tmp_path_factory.mktemp("storm")
    settings: dict[str, dict[str, Any]] = {
        "world": {"min_workers": 2, "max_workers": 4, "start_grace_s": 60.0, "accept_joins": False},
        "failure": {"max_user_errors": 1},
    }
    run = make_run(folder, data_url, steps=100_000, every_steps=5, settings=settings)
    command = [sys.executable, str(USER_SCRIPT), str(run.config_path), nodes.address, str(folder)]
    with RunProcess(run, command) as process:
        storm = Storm(run=run, nodes=nodes, folder=folder, process=process)
        storm.rage()
    return storm


@pytest.fixture(scope="module")
def outcome(storm: Storm) -> RunResult:
    assert storm.result is not None
    return storm.result


def test_lost_nodes_never_use_up_the_budget_of_the_training_code(outcome: RunResult) -> None:
    assert causes(outcome) == ["start", *["worker-lost"] * NUM_WORKER_KILLS, *["node-lost"] * 3, "user-error"]
    counters = journal_counters(outcome.run)
    before = [c for c in counters if not c["user_errors"]][-1]
    assert before["infrastructure"] == NUM_WORKER_KILLS + 3
    assert (counters[-1]["user_errors"], counters[-1]["infrastructure"]) == (2, NUM_WORKER_KILLS + 3)


def test_the_second_error_of_the_training_code_ends_the_run_with_it_as_the_reason(outcome: RunResult) -> None:
    assert outcome.exit_code == 11, outcome.stderr
    assert outcome.summary["status"] == "user-error"
    assert "ValueError: a bad batch" in outcome.summary["exit_reason"]
    assert [event["cause"] for event in outcome.named("fault")][-2:] == ["user-error"] * 2


def test_a_node_lost_before_the_first_step_of_an_attempt_is_infrastructure(outcome: RunResult) -> None:
    stepless = NUM_WORKER_KILLS + 2  # the Attempt that was held up until its node was gone
    assert not [event for event in outcome.named("step") if event["attempt"] == stepless]
    assert [event["cause"] for event in outcome.named("fault") if event["attempt"] == stepless] == ["node-lost"]


def test_below_the_minimum_the_run_waits_says_for_what_and_goes_on(storm: Storm, outcome: RunResult) -> None:
    assert len(storm.waited_nodes) == 2
    waiting = [event for event in outcome.named("waiting") if event["have"] == 1][-1]
    assert (waiting["have"], waiting["need"]) == (1, 2)
    assert waiting["missing"].startswith("1 more worker(s), each 1 CPU")
    after = outcome.events[outcome.events.index(waiting) :]
    began = next(event for event in after if event["event"] == "attempt_started")
    assert (began["cause"], began["world_size"]) == ("node-lost", 2)


def test_each_live_node_has_one_placement_group_and_a_lost_one_none(storm: Storm) -> None:
    assert len(storm.restarts) == NUM_WORKER_KILLS + 2
    for restart in storm.restarts:
        present = {node for node, state in restart.placements.items() if state != "REMOVED"}
        assert present == {node_id[:12] for node_id in restart.nodes}
        assert {restart.placements[node] for node in present} == {"CREATED"}


def test_no_old_worker_lives_beside_its_successor(storm: Storm, outcome: RunResult) -> None:
    assert len(set(storm.killed_pids)) == NUM_WORKER_KILLS
    for restart in storm.restarts:
        assert set(restart.workers) <= set(restart.nodes)
        assert max(len(pids) for pids in restart.workers.values()) == 1
    assert not [event["pid"] for event in outcome.named("worker_ready") if is_running(event["pid"])]


def test_at_the_end_the_cluster_owes_nothing(storm: Storm, outcome: RunResult) -> None:
    from ray.autoscaler.v2.sdk import get_cluster_status

    prefix = f"raysume-{outcome.run.run_id}-"
    groups = [row for row in ray.util.placement_group_table().values() if row["name"].startswith(prefix)]
    assert {row["state"] for row in groups} == {"REMOVED"}
    demands = get_cluster_status(storm.nodes.address).resource_demands
    assert not demands.ray_task_actor_demand
    assert not demands.placement_group_demand
    assert not demands.cluster_constraint_demand
    assert_nothing_left(outcome)


def test_the_stormy_history_is_one_unbroken_one(outcome: RunResult) -> None:
    assert_samples_in_order(outcome)
    assert_each_attempt_goes_on_where_it_restored(outcome)
    restored = [event["restored_step"] for event in outcome.named("attempt_started")][: NUM_WORKER_KILLS + 1]
    assert restored == sorted(set(restored)), "an Attempt did not restore what the one before it committed"
    assert_all_commits_verify(outcome.run)


def test_a_run_that_stays_below_its_minimum_too_long_ends_and_says_so(
    nodes: RayNodes, storm: Storm, data_url: str, tmp_path: Path
) -> None:
    assert len(storm.nodes.ids) == 2
    settings = {"world": {"min_workers": 3, "max_workers": 3, "start_grace_s": 0.2, "max_wait_s": 1.0}}
    run = make_run(tmp_path / "short", data_url, steps=5, every_steps=5, settings=settings)
    with RunProcess.of_cli(run, "--ray-address", nodes.address) as process:
        result = process.finish(90.0)
    assert result.exit_code == 15, result.stderr
    assert result.summary["status"] == "below-minimum"
    assert "more worker(s), each 1 CPU" in result.summary["exit_reason"]
    assert result.named("waiting")[0]["need"] == 3
    assert not result.named("attempt_started")
    assert_nothing_left(result)

"""The test cluster adds, kills and cleans up real nodes.

Real: a Ray head and raylets as separate processes. Nothing is faked.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.lifelines import Lifelines
from orchestrator.local_cluster import is_running
from orchestrator.worker_group import WorkerGroup
from tests.clusters import RayNodes, ray_nodes


def test_nothing_outlives_the_cluster() -> None:
    """First in the file: a process is the driver of one cluster at a time."""
    with ray_nodes(1) as cluster:
        node = cluster.node(cluster.ids[0])
        pids = cluster.pids(node.node_id)
        assert node.directory.is_dir()
    assert not [pid for pid in pids if is_running(pid)]
    assert not node.directory.exists()


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with ray_nodes(2) as cluster:
        yield cluster


def pid_on(node_id: str) -> int:
    task = ray.remote(num_cpus=1)(lambda: os.getpid()).options(
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)
    )
    return int(ray.get(task.remote(), timeout=60.0))


def test_each_node_runs_work_in_processes_of_its_own(nodes: RayNodes) -> None:
    first, second = nodes.ids
    assert pid_on(first) in nodes.pids(first)
    assert pid_on(second) in nodes.pids(second)
    assert not set(nodes.pids(first)) & set(nodes.pids(second))


def agent_pid(group: WorkerGroup, node_id: str) -> int | None:
    ref: Any = group.ping_agent(node_id)
    try:
        return int(ray.get(ref, timeout=60.0))
    except ray.exceptions.RayError:
        return None


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_agent_that_died_alone_is_there_again_before_its_node_could_be_taken_for_lost(nodes: RayNodes) -> None:
    node_id = nodes.ids[0]
    group = WorkerGroup(
        run_id="agents",
        spawn=lambda **_: pytest.fail("no worker was asked for"),
        start_keeper=lambda _: None,
        resources_per_worker={"CPU": 1.0},
        lifelines=Lifelines("127.0.0.1"),
    )
    try:
        group.admit(node_id, 1)
        until(lambda: not group.reconcile(0, frozenset()) and not group.is_someone_starting)
        first = agent_pid(group, node_id)
        assert first is not None
        until(lambda: not group.lifelines.is_agent_cut(node_id))
        os.kill(first, signal.SIGKILL)
        until(lambda: agent_pid(group, node_id) not in (first, None))
        until(lambda: not group.lifelines.is_agent_cut(node_id))
    finally:
        group.close()


def test_a_killed_node_takes_its_workers_along_and_a_new_one_joins(nodes: RayNodes) -> None:
    doomed = nodes.ids[-1]
    worker = pid_on(doomed)
    victims = nodes.pids(doomed)
    assert worker in victims
    nodes.kill(doomed)
    assert not [pid for pid in victims if is_running(pid)]
    assert doomed not in nodes.ids
    joined = nodes.add()
    assert pid_on(joined) in nodes.pids(joined)

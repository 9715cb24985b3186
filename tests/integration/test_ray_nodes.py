"""The test cluster adds, kills and cleans up real nodes.

Real: a Ray head and raylets as separate processes. Nothing is faked.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.local_cluster import is_running
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

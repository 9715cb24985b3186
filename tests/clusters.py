"""A real local Ray cluster of several nodes with the test process as its driver.

The nodes are those of `raysume run --local-nodes`: a raylet each, on loopback, killed as a power cut would. This file
only connects a driver and checks that nothing is left behind.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import ray

from orchestrator.local_cluster import LocalCluster, LocalNode, descendants, is_running

__all__ = ["RayNodes", "one_node", "ray_nodes"]

_GONE_S = 10.0


class RayNodes:
    """The nodes of one cluster by Ray's node id; the head has no CPUs, is never killed and is not among them."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster

    @property
    def address(self) -> str:
        return self._cluster.address

    @property
    def dashboard_url(self) -> str:
        return self._cluster.dashboard_url

    @property
    def ids(self) -> list[str]:
        """The live nodes, oldest first."""
        return [node.node_id for _, node in sorted(self._cluster.nodes.items())]

    def add(self) -> str:
        """Add one node, wait until Ray lists it, and return its id."""
        return self._cluster.add_node().node_id

    def kill(self, node_id: str) -> None:
        """SIGKILL every process of the node at once, then remove what it had on disk."""
        pids = self.pids(node_id)
        self._cluster.bury(self._cluster.kill_node(self.node(node_id).number))
        _wait_gone(pids)

    def drain(self, node_id: str, *, notice_s: float) -> None:
        """Give notice that the node goes away; killing it is up to the test."""
        self._cluster.drain_node(self.node(node_id).number, notice_s=notice_s)

    def node(self, node_id: str) -> LocalNode:
        return next(node for node in self._cluster.nodes.values() if node.node_id == node_id)

    def pids(self, node_id: str) -> list[int]:
        """The raylet of a node, then everything below it."""
        raylet = self.node(node_id).raylet_pid
        return [raylet, *descendants(raylet)]


def _wait_gone(pids: list[int]) -> None:
    """A killed process with much memory takes a moment to be gone."""
    deadline = time.monotonic() + _GONE_S
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, f"processes {left} are still there {_GONE_S} s after their SIGKILL"
        time.sleep(0.01)


@contextmanager
def ray_nodes(num_nodes: int, *, cpus_per_node: int = 1, with_dashboard: bool = False) -> Iterator[RayNodes]:
    """A cluster of `num_nodes` nodes and a head, this process connected to it; both are gone afterwards.

    `with_dashboard`: it also takes jobs, at `RayNodes.dashboard_url`.

    For the tests of a module: `@pytest.fixture(scope="module")` round `with ray_nodes(3) as nodes: yield nodes`.
    """
    with pytest.MonkeyPatch.context() as patch:
        # One value for the driver and, by inheritance, for every node: one with another value could not join.
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # What the cluster would set by itself, so that it is undone afterwards.
        for name in ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "RAY_DEDUP_LOGS", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"):
            patch.setenv(name, "0")
        patch.setenv("OMP_NUM_THREADS", "1")
        import ray

        # A driver that is told 127.0.0.1 would look for the head on this machine's outer address instead.
        patch.setattr("ray._private.ray_constants.ENABLE_RAY_CLUSTER", False)
        cluster = LocalCluster(node_resources={"CPU": float(cpus_per_node)}, with_dashboard=with_dashboard)
        pids: list[int] = []
        try:
            nodes = RayNodes(cluster)
            for _ in range(num_nodes):
                nodes.add()
            ray.init(address=nodes.address, log_to_driver=False)
            yield nodes
            pids = [pid for node_id in nodes.ids for pid in nodes.pids(node_id)]
        finally:
            ray.shutdown()
            cluster.close()
        _wait_gone(pids)


@contextmanager
def one_node(patch: pytest.MonkeyPatch) -> Iterator[str]:
    """A Ray of one node that ends with the block, where only actors and their ends matter; yields the node's id."""
    patch.setenv("RAY_AUTH_MODE", "disabled")
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    patch.setenv("OMP_NUM_THREADS", "1")
    patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")])))
    ray.init(
        address="local",
        num_cpus=1,
        object_store_memory=100_000_000,
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )
    try:
        yield ray.get_runtime_context().get_node_id()
    finally:
        ray.shutdown()

"""A real worker group on nodes and actors that exist only on paper, and a cluster view to go with it."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from orchestrator.group_parts import NodeParts, WorkerLost
from orchestrator.lifelines import Lifelines
from orchestrator.node_bundles import NodeBundles
from orchestrator.node_watcher import ClusterView, NodeView
from orchestrator.worker_group import WorkerGroup
from workers.contract import WorkerFacts

__all__ = ["PaperCluster"]


class _Actor:
    class prepare:  # noqa: N801 - as Ray's actor methods are called
        @staticmethod
        def remote() -> object:
            return object()


class _Placement:
    def __init__(self, cluster: PaperCluster, node_id: str, count: int) -> None:
        self._cluster, self.node_id, self.count = cluster, node_id, count
        cluster.held[node_id] = cluster.held.get(node_id, 0) + count

    def actor_options(self, index: int) -> dict[str, Any]:
        return {"index": index}

    def remove(self) -> None:
        self._cluster.held[self.node_id] -= self.count


class PaperCluster:
    """``nodes``: id -> CPUs. ``held``: bundles that the group has placed on each node and not given back."""

    def __init__(self, patch: pytest.MonkeyPatch, nodes: dict[str, float]) -> None:
        self.nodes = dict(nodes)
        self.drained: set[str] = set()
        self.dead: set[str] = set()
        self.deadlines: dict[str, float] = {}  # of the drained; without one it is unknown
        self.held: dict[str, int] = {}
        self.failing: dict[str, int] = {}  # node -> starts that are still to fail
        self.unreachable: set[str] = set()  # their Keeper does not start
        self.group = WorkerGroup(
            run_id="r",
            spawn=lambda **_: _Actor(),
            start_keeper=lambda _: None,
            resources_per_worker={"CPU": 1.0},
            lifelines=Lifelines("127.0.0.1"),
        )
        patch.setattr(self.group, "_threads", _AtOnce())
        patch.setattr(self.group, "_build_node", self._build)
        patch.setattr(self.group, "_poll_starting", self._poll)
        patch.setattr(self.group, "_letting_go", _LettingGo())

    def view(self) -> ClusterView:
        return ClusterView(
            nodes={
                node_id: NodeView(
                    node_id=node_id,
                    is_alive=node_id not in self.dead,
                    resources={"CPU": cpus},
                    drain_deadline_at_s=self.deadlines.get(node_id, 0.0) if node_id in self.drained else None,
                )
                for node_id, cpus in self.nodes.items()
            }
        )

    def workers(self) -> list[str]:
        """Node of each worker, sorted."""
        return sorted(view.node_id for view in self.group.views(frozenset()))

    def train_on(self, *worker_ids: str) -> None:
        self.group.set_members(worker_ids)

    def _build(self, node_id: str, count: int) -> NodeParts:
        if node_id in self.unreachable:
            raise TimeoutError("its Keeper did not start")
        bundles = NodeBundles(lambda number: _Placement(self, node_id, number), count)  # type: ignore[arg-type,return-value]
        return NodeParts(node_id=node_id, agent=None, keeper=None, bundles=bundles)

    def _poll(self) -> list[WorkerLost]:
        lost = []
        for view in self.group.views(frozenset()):
            worker = self.group.worker(view.worker_id)
            if worker.facts is None and self.failing.get(view.node_id, 0) > 0:
                self.failing[view.node_id] -= 1
                lost.append(WorkerLost(worker_id=view.worker_id, node_id=view.node_id, reason="it died"))
                self.group.remove_worker(view.worker_id)
            elif worker.facts is None:
                worker.facts = WorkerFacts(
                    worker_id=view.worker_id, node_id=view.node_id, pid=1, host="h", device="cpu"
                )
        return lost


class _AtOnce:
    def submit(self, call: Any, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(call(*arguments))
        except Exception as error:  # noqa: BLE001 - as an executor does
            future.set_exception(error)
        return future


class _LettingGo:
    def kill(self, actor: Any) -> None:
        del actor

    def remove(self, placement: Any) -> None:
        placement.remove()

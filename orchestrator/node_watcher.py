"""The node watcher: keeps a fresh picture of the cluster's nodes, drain notices included, on a thread of its own.

It only looks; what to do about a lost or draining node is a policy's choice. The one private Ray call (drain state) is
wrapped here and nowhere else.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field, replace

import ray

__all__ = ["ClusterView", "NodeView", "NodeWatcher", "look", "remember_notices"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """One node. ``drain_deadline_at_s``: Unix time in seconds of its preemption, None without a notice, 0 unknown.

    A node that is gone keeps the notice that it had.
    """

    node_id: str
    is_alive: bool
    resources: dict[str, float]
    drain_deadline_at_s: float | None = None
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """All nodes GCS knows, by id."""

    nodes: dict[str, NodeView] = field(default_factory=dict)

    def living(self) -> dict[str, NodeView]:
        return {node_id: node for node_id, node in self.nodes.items() if node.is_alive}

    def draining(self) -> frozenset[str]:
        return frozenset(self.notices())

    def notices(self) -> dict[str, float]:
        """The deadline of every node that has a preemption notice, or had one when it was lost."""
        deadlines = {node_id: node.drain_deadline_at_s for node_id, node in self.nodes.items()}
        return {node_id: at_s for node_id, at_s in deadlines.items() if at_s is not None}


def _draining_nodes() -> dict[str, int]:
    """Node id -> deadline in Unix milliseconds. Private in Ray 2.60 (read there); a public call does not exist."""
    from ray._private.state import state

    return dict(state.get_draining_nodes())


def remember_notices(view: ClusterView, before: ClusterView) -> ClusterView:
    """``view`` with the notices of ``before``: Ray forgets them with the node, and whose death it was would be unknown.
    Nodes that Ray does not list any more stay, dead, where they had one."""
    nodes = dict(view.nodes)
    for node_id, deadline_at_s in before.notices().items():
        gone = replace(before.nodes[node_id], is_alive=False)
        node = nodes.get(node_id, gone)
        if node.drain_deadline_at_s is None or node_id not in nodes:
            nodes[node_id] = replace(node, drain_deadline_at_s=deadline_at_s)
    return ClusterView(nodes=nodes)


def look() -> ClusterView:
    """Ask GCS once. Raises what ray raises when the head is away."""
    draining = _draining_nodes()
    nodes: dict[str, NodeView] = {}
    for row in ray.nodes():
        node_id = row["NodeID"]
        deadline = draining.get(node_id)
        nodes[node_id] = NodeView(
            node_id=node_id,
            is_alive=bool(row["Alive"]),
            resources=dict(row.get("Resources", {})),
            drain_deadline_at_s=None if deadline is None else deadline / 1000.0,
            labels=dict(row.get("Labels") or {}),
        )
    return ClusterView(nodes=nodes)


class NodeWatcher:
    """Polls every ``interval_s`` until closed; `view` is the newest picture. A head that is away keeps the last one."""

    def __init__(self, interval_s: float = 0.5) -> None:
        self._interval_s = interval_s
        self._view = look()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="node-watcher", daemon=True)
        self._thread.start()

    def view(self) -> ClusterView:
        return self._view

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=5.0)

    def _watch(self) -> None:
        is_away = False
        while not self._closed.wait(self._interval_s):
            try:
                self._view = remember_notices(look(), self._view)
                is_away = False
            except Exception as error:  # noqa: BLE001 - outer edge of the thread; the head may come back
                if not is_away and not self._closed.is_set():
                    _log.warning(
                        "node watcher: the head does not answer (%s: %s); the last view stands",
                        type(error).__name__,
                        error,
                    )
                is_away = True

"""Cluster news: tells the coordinator what the save policies must know of the cluster, at each Attempt and on changes.

What was seen is the failure history's and the node watcher's; what follows from it is the policies'.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from orchestrator.failure_history import FailureHistory
from orchestrator.node_watcher import ClusterView
from orchestrator.save_facts import ClusterFacts, Notice

__all__ = ["ClusterNews"]

_EVERY_S = 60.0  # ages and exposure grow all the time, and no policy minds a minute of them


class ClusterNews:
    """One per driver. ``tell``: the coordinator's `tell_cluster`; ``view``: the newest picture of the nodes.

    ``hands_over``: whether the World would part into memory for a preemption notice. Then it does so at once, and no
    save policy has anything to say of it.
    """

    def __init__(
        self,
        *,
        history: FailureHistory,
        view: Callable[[], ClusterView],
        tell: Callable[[ClusterFacts], None],
        hands_over: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._history = history
        self._view = view
        self._tell = tell
        self._hands_over = hands_over
        self._clock = clock
        self._wall_clock = wall_clock
        self._nodes: frozenset[str] = frozenset()
        self._num_ranks = 0
        self._state_bytes: int | None = None
        self._told_at_s = 0.0
        self._told_deadlines: dict[str, float] = {}

    def begin(self, nodes: Iterable[str], state_bytes: int | None) -> None:
        """A World is about to train. ``nodes``: of each rank."""
        homes = list(nodes)
        self._nodes, self._num_ranks, self._state_bytes = frozenset(homes), len(homes), state_bytes
        self._say(self._deadlines())

    def follow(self) -> None:
        """Between two looks of the controller: say what has changed, if anything has."""
        if not self._nodes:
            return
        deadlines = self._deadlines()
        if deadlines != self._told_deadlines or self._clock() - self._told_at_s >= _EVERY_S:
            self._say(deadlines)

    def _deadlines(self) -> dict[str, float]:
        """Of the World's nodes with a preemption notice that memory does not cover; 0: the notice does not say."""
        nodes = self._view().nodes
        known = {node_id: nodes[node_id].drain_deadline_at_s for node_id in self._nodes if node_id in nodes}
        deadlines = {node_id: at_s for node_id, at_s in sorted(known.items()) if at_s is not None}
        return {} if deadlines and self._hands_over() else deadlines

    def _say(self, deadlines: dict[str, float]) -> None:
        self._history.note_nodes(self._view().living())
        now_s = self._wall_clock()
        notices = tuple(
            Notice(node_id=node_id, deadline_in_s=at_s - now_s if at_s > 0.0 else None)
            for node_id, at_s in deadlines.items()
        )
        facts = self._history.facts(self._nodes, notices=notices, state_bytes=self._state_bytes)
        self._tell(replace(facts, num_ranks=self._num_ranks))
        self._told_at_s, self._told_deadlines = self._clock(), deadlines

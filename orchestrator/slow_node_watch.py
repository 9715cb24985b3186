"""Says which nodes are slow, and where `failure.slow_node` is ``exclude`` keeps the World clear of them for a while.

What is slow and what pays is judged in slow_nodes; the World is parted by whoever runs the Attempt.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from orchestrator.config import RunConfig, WorldConfig
from orchestrator.decisions import Keep, Leave
from orchestrator.pace import Pace
from orchestrator.scaling_policy import WorkerView
from orchestrator.signals import Signal, StepFinished
from orchestrator.slow_nodes import NodeRecovered, NodeSlow, SlowNodes, decide_exclusion
from workers.contract import World

__all__ = ["SlowNodeWatch"]

_log = logging.getLogger(__name__)


class EventSink(Protocol):
    """Where it is said (Recorder)."""

    def emit(self, event: str, **fields: Any) -> None: ...


class SlowNodeWatch:
    """One per driver. A listener of the recorder."""

    def __init__(
        self, config: RunConfig, sink: EventSink, pace: Pace, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._sink = sink
        self._pace = pace
        self._monotonic = monotonic
        self._slow_nodes = SlowNodes(config.failure.slow_ratio)
        self._world: World | None = None
        self._rest_until_s: dict[str, float] = {}
        self._said = ""

    def begin(self, world: World) -> None:
        """A new World trains from here on."""
        self._world = world
        self._slow_nodes.begin([member.node_id for member in world.members])

    def on_signal(self, signal: Signal) -> None:
        if not isinstance(signal, StepFinished) or self._world is None or signal.attempt != self._world.attempt:
            return
        report = signal.report
        for change in self._slow_nodes.add(report.compute_s, report.step_s):
            self._say(change, signal)

    @property
    def resting(self) -> frozenset[str]:
        """Nodes that are not used for now because they were slow."""
        now = self._monotonic()
        self._rest_until_s = {node_id: until for node_id, until in self._rest_until_s.items() if now < until}
        return frozenset(self._rest_until_s)

    def wake(self) -> None:
        """Slow nodes are better than none: the World would be too small without them."""
        if self._rest_until_s:
            _log.warning("nodes that were left out as slow are used again: too few others are there")
            self._rest_until_s.clear()

    def consider(self, workers: Sequence[WorkerView], world: WorldConfig, steps_left: int) -> Keep | Leave:
        """Whether the World should part from a slow node, which then rests. Why it stays is said once."""
        if self._config.failure.slow_node != "exclude" or self._pace.step_s is None:
            return Keep()
        decision, node_id = decide_exclusion(
            self._slow_nodes.slow,
            workers,
            world,
            num_leaves=self._config.data.num_leaves,
            steps_left=steps_left,
            step_s=self._pace.step_s,
            regroup_s=self._pace.regroup_s,
        )
        if isinstance(decision, Leave):
            self._rest_until_s[node_id] = self._monotonic() + self._config.failure.slow_node_rest_s
        elif decision.reason and node_id != self._said:
            self._said = node_id
            self._sink.emit("decision", decision="keep", reason=decision.reason)
        return decision

    def _say(self, change: NodeSlow | NodeRecovered, signal: StepFinished) -> None:
        fields = {name: round(value, 4) for name, value in asdict(change).items() if name != "node_id"}
        name = "node_slow" if isinstance(change, NodeSlow) else "node_recovered"
        self._sink.emit(name, attempt=signal.attempt, step=signal.report.step, node=change.node_id, **fields)
        if isinstance(change, NodeSlow):
            text = "node %s is slow: it computes %.2f times as long as the others (%.3f s a step instead of %.3f s)"
            _log.warning(text, change.node_id[:12], change.ratio, change.compute_s, change.others_s)
        else:
            _log.info("node %s is as fast as the others again", change.node_id[:12])

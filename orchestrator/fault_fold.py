"""The part of a Run's summary that tells when the trouble before an Attempt began and when it was noticed. Pure.

An injected fault explains the end of a World of its own driver, and only such an end as its verb can cause.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from orchestrator.event_fields import Event, float_of, text_of, texts_of

__all__ = ["PLANNED_CAUSES", "FaultFold"]

PLANNED_CAUSES: Final = frozenset({"start", "join", "leave", "resize", "scale", "slow-node"})
_DRIVER_VERBS: Final = frozenset({"kill-driver", "kill-coordinator"})  # a driver ends with its coordinator
_NODE_VERBS: Final = frozenset({"kill-node", "cut-node"})
_WORKER_VERBS: Final = frozenset({"kill-worker", "stop-worker", "oom-worker"})
_LOSSES: Final = _NODE_VERBS | _WORKER_VERBS | {"drain-node"}  # a drain that was not heeded ends as a loss
_VERBS_OF_CAUSE: Final = {
    "node-lost": _LOSSES,
    "worker-lost": _LOSSES,
    "hang": _NODE_VERBS | _WORKER_VERBS,
    "collective-error": _LOSSES | {"raise-in-worker"},
    "out-of-memory": frozenset({"oom-worker"}),
    "preemption": _NODE_VERBS | {"drain-node"},
    "user-error": frozenset({"raise-in-worker", "oom-worker"}),
    "storage-error": _LOSSES,
    "memory-unreadable": _LOSSES,
}
_FAULT_VERBS: Final = frozenset().union(*_VERBS_OF_CAUSE.values())


@dataclass(slots=True)
class FaultFold:
    """Takes events one by one; `begin` is asked once for each Attempt and closes what led to it."""

    _node_of_worker: dict[str, str] = field(default_factory=dict)
    _unmatched_chaos: list[Event] = field(default_factory=list)
    _faults: list[Event] = field(default_factory=list)
    _driver_lost_s: float | None = None
    _driver_back_s: float | None = None

    @property
    def newest_cause(self) -> str | None:
        """Of a fault that no Attempt has followed yet."""
        return text_of(self._faults[-1], "cause") if self._faults else None

    def add(self, event: Event) -> None:
        match event.get("event"):
            case "driver_started":
                # What the driver before did not live to regroup after explains nothing that this one sees.
                self._faults.clear()
                self._unmatched_chaos.clear()
                self._driver_back_s = float_of(event, "t_s")
            case "worker_ready":
                self._node_of_worker[text_of(event, "worker")] = text_of(event, "node_id")
            case "chaos" if event.get("verb") in _DRIVER_VERBS:
                self._driver_lost_s = float_of(event, "t_s")
            case "chaos" if event.get("verb") in _FAULT_VERBS:
                self._unmatched_chaos.append(event)
            case "fault":
                self._faults.append(event)

    def begin(self, event: Event, *, is_first: bool) -> tuple[float | None, float | None]:
        """When the trouble before this Attempt began and when it was noticed; None of a Run's first."""
        detected_s = self._detected_s(event, is_first=is_first)
        fault_s = None if is_first or detected_s is None else self._fault_s(event, detected_s)
        self._faults.clear()
        self._driver_lost_s = self._driver_back_s = None
        return fault_s, detected_s

    def _detected_s(self, event: Event, *, is_first: bool) -> float | None:
        detected = event.get("detected_s")
        if isinstance(detected, int | float):
            return float(detected)
        if is_first:
            return None
        if self._faults:
            return float_of(self._faults[0], "detected_s") or float_of(self._faults[0], "t_s")
        # Only a new driver goes on without a fault of its own: it found out when it started.
        return self._driver_back_s if self._driver_back_s is not None else float_of(event, "t_s")

    def _fault_s(self, event: Event, detected_s: float) -> float:
        """The injected fault that explains it, else when it was noticed."""
        if self._driver_lost_s is not None and self._driver_back_s is not None:
            return self._driver_lost_s
        cause = text_of(event, "cause")
        if cause in PLANNED_CAUSES:
            return detected_s
        nodes = self._nodes_at_fault()
        verbs = _VERBS_OF_CAUSE.get(cause, frozenset())
        if cause == "preemption" and not self._faults:  # the World left in time: only a notice makes it
            verbs = frozenset({"drain-node"})
        earlier = [
            chaos
            for chaos in self._unmatched_chaos
            if float_of(chaos, "t_s") <= detected_s
            and chaos.get("verb") in verbs
            and (not nodes or text_of(chaos, "node_id") in nodes)
        ]
        self._unmatched_chaos = [chaos for chaos in self._unmatched_chaos if chaos not in earlier]
        if earlier:
            return min(float_of(chaos, "t_s") for chaos in earlier)
        told = event.get("fault_s")
        return float(told) if isinstance(told, int | float) else detected_s

    def _nodes_at_fault(self) -> set[str]:
        nodes: set[str] = set()
        for fault in self._faults:
            nodes.update(texts_of(fault, "nodes"))
            nodes.update(self._node_of_worker.get(worker, "") for worker in texts_of(fault, "workers"))
        return nodes - {""}

"""Whom the faults of a run reached, and which Attempts trained in processes that had never trained before. Pure.

It reads who was in each World from events; what that means for a drill's verdict is `orchestrator.drill_compare`'s.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from orchestrator.event_fields import Event, float_of, int_of, text_of, texts_of

__all__ = ["Reach", "Target", "TrainedWorld", "read_reach"]

_DRIVER_RESTART: Final = "driver-restart"
_OF_NODES: Final = frozenset({"kill-node", "cut-node", "drain-node"})
_OF_WORKERS: Final = frozenset({"kill-worker", "stop-worker", "oom-worker", "raise-in-worker"})
_OF_DRIVERS: Final = frozenset({"kill-driver", "kill-coordinator"})
_AT_ONCE: Final = frozenset({"kill-node", "cut-node", "kill-worker"})
_FAULT_OF: Final = {"raise-in-worker": "user-error", "oom-worker": "out-of-memory"}
"""The process may live on, and its fault names nobody."""

_Process = tuple[str, int]  # a worker id may come back under the next driver, with another pid


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a fault was done to, and when (seconds of the run); node and pid as its event names them."""

    verb: str
    node_id: str
    pid: int
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedWorld:
    """The processes of one Attempt, and their nodes."""

    attempt: int
    cause: str
    restored_step: int
    began_s: float
    processes: frozenset[_Process]
    nodes: frozenset[str]

    def holds(self, target: Target) -> bool:
        if target.verb in _OF_NODES:
            return target.node_id in self.nodes
        return any(pid == target.pid for _, pid in self.processes)


@dataclass(slots=True, kw_only=True)
class Reach:
    """``worlds`` in their order; ``stepped``: the Attempts that made a step, counting or not."""

    worlds: list[TrainedWorld] = field(default_factory=list)
    stepped: set[int] = field(default_factory=set)
    faults: list[Event] = field(default_factory=list)

    def size_at(self, at_s: float) -> int:
        """How many workers the newest World had then; 0 before the first."""
        return next((len(world.processes) for world in reversed(self.worlds) if world.began_s <= at_s), 0)

    def fresh_attempts(self) -> frozenset[int]:
        """Those that went on from a step with a process that had never trained."""
        seen: set[_Process] = set()
        fresh: set[int] = set()
        for world in self.worlds:
            if world.restored_step > 0 and world.processes - seen:
                fresh.add(world.attempt)
            if world.attempt in self.stepped:
                seen |= world.processes
        return frozenset(fresh)

    def has_interrupted(self, target: Target) -> bool | None:
        """Whether training was interrupted by it; None for what need not interrupt any."""
        later = [world for world in self.worlds if world.began_s > target.at_s]
        if target.verb in _OF_DRIVERS:
            return any(world.cause == _DRIVER_RESTART for world in later)
        if target.verb not in _OF_NODES | _OF_WORKERS:
            return None
        before = next((world for world in reversed(self.worlds) if world.began_s <= target.at_s), None)
        if before is None or not before.holds(target):
            # Between two Worlds: the next one may have been formed with what was just struck.
            if not later or not later[0].holds(target):
                return False
            before, *later = later
        if target.verb in _AT_ONCE:
            return bool(later)
        return self._is_blamed(target, before) or _is_parted_from(target, later)

    def _is_blamed(self, target: Target, world: TrainedWorld) -> bool:
        workers = {worker for worker, pid in world.processes if pid == target.pid}
        return any(
            text_of(fault, "cause") == _FAULT_OF.get(target.verb)
            or target.node_id in texts_of(fault, "nodes")
            or workers & set(texts_of(fault, "workers"))
            for fault in self.faults
            if float_of(fault, "t_s") >= target.at_s
        )


def _is_parted_from(target: Target, later: Iterable[TrainedWorld]) -> bool:
    """Whether the same driver went on without it."""
    for world in later:
        if world.cause == _DRIVER_RESTART:
            return False
        if not world.holds(target):
            return True
    return False


def read_reach(events: Iterable[Event]) -> Reach:
    """Of one Run, in the order of writing."""
    reach = Reach()
    places: dict[str, tuple[int, str]] = {}
    for event in events:
        match event.get("event"):
            case "worker_ready":
                places[text_of(event, "worker")] = int_of(event, "pid"), text_of(event, "node_id")
            case "attempt_started":
                members = texts_of(event, "members")
                reach.worlds.append(
                    TrainedWorld(
                        attempt=int_of(event, "attempt"),
                        cause=text_of(event, "cause"),
                        restored_step=int_of(event, "restored_step"),
                        began_s=float_of(event, "t_s"),
                        processes=frozenset((worker, places.get(worker, (0, ""))[0]) for worker in members),
                        nodes=frozenset(places[worker][1] for worker in members if worker in places),
                    )
                )
            case "step":
                reach.stepped.add(int_of(event, "attempt"))
            case "fault":
                reach.faults.append(event)
    return reach

"""What the events of a run under soak tell so far: its Attempts, their members, how far it is, and what a strike cost.

A fold over event lines. It looks at no process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.chaos import ChaosVerb

__all__ = ["Course", "Outcome"]

_TIERS = ("own-memory", "peer-memory", "local-disk", "object-storage")
_NEEDS_NEW_ATTEMPT = frozenset({"raise-in-worker", "kill-driver", "kill-coordinator"})
_MAY_BE_IDLE = frozenset({"raise-in-worker", "oom-worker"})
_TAKES_WORKER = frozenset({"kill-worker", "stop-worker", "oom-worker"})
_TAKES_NODE = frozenset({"kill-node", "drain-node"})
_PLANNED = ("join", "start")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a strike. ``recovery_s``: from its first fault to the end of the first new step.

    ``tier``: the farthest that was read from, None where no Attempt followed. ``is_idle``: no fault of it had an effect
    in time: a starved worker may go on without asking for memory.
    """

    step: int
    recovery_s: float
    tier: str | None
    causes: tuple[str, ...]
    lost_steps: int
    world_size: int
    is_idle: bool = False


class Course:
    """Told of every event, in order."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.attempt = 0
        self.members: tuple[str, ...] = ()
        self.step = 0
        self.furthest_step = 0
        self.has_stepped = False  # the present Attempt has
        self._workers: dict[str, tuple[str, int]] = {}
        self._members_of: dict[int, tuple[str, ...]] = {}

    def take_in(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        match event["event"]:
            case "worker_ready":
                self._workers[str(event["worker"])] = (str(event["node_id"]), int(event["pid"]))
            case "attempt_started":
                self.attempt, self.has_stepped = int(event["attempt"]), False
                self.members = self._members_of[self.attempt] = tuple(event["members"])
            case "step":
                self.step, self.has_stepped = int(event["step"]), True
                self.furthest_step = max(self.furthest_step, self.step)

    def outcome(self, since: int, attempt: int, *, is_given_up: bool) -> Outcome | None:
        """What became of the faults that the ``chaos`` events from index ``since`` on tell of; None: not yet over.

        ``attempt``: the one they fell into. ``is_given_up``: faults that only may have an effect are not waited for.
        """
        events = self.events[since:]
        deeds = [event for event in events if event["event"] == "chaos"]
        if not deeds or not self._has_ended(deeds):
            return None
        # What ends a fault is none of its own: a drain is recovered from before its notice is over.
        last_s = max(float(deed["t_s"]) for deed in deeds if deed["verb"] in set(ChaosVerb))
        victims = self._victims([deed for deed in deeds if not (is_given_up and deed["verb"] in _MAY_BE_IDLE)])
        must_change = {deed["verb"] for deed in deeds} & (_NEEDS_NEW_ATTEMPT - (_MAY_BE_IDLE if is_given_up else set()))
        # A victim that was ready and no member yet may still be taken in, dead or starving.
        hurt = [number for number, members in self._members_of.items() if number >= attempt and victims & set(members)]
        whole = max([attempt - 1, *hurt, *([attempt] if must_change else [])]) + 1
        for event in events:
            if event["event"] == "step" and float(event["finished_s"]) > last_s and int(event["attempt"]) >= whole:
                first_s = min(float(deed["t_s"]) for deed in deeds)
                return self._cost(events, deeds, attempt, event, recovery_s=float(event["finished_s"]) - first_s)
        return None

    def _has_ended(self, deeds: Sequence[Mapping[str, Any]]) -> bool:
        """Whether what lasts is over: the notices of drains, and slow nodes."""
        verbs = [deed["verb"] for deed in deeds]
        gone = {deed["node_id"] for deed in deeds if deed["verb"] in ("kill-node", "drain-deadline")}
        drained = {deed["node_id"] for deed in deeds if deed["verb"] == ChaosVerb.DRAIN_NODE}
        return drained <= gone and verbs.count("slow-node") == verbs.count("slow-node-over")

    def _victims(self, deeds: Sequence[Mapping[str, Any]]) -> set[str]:
        nodes = {deed["node_id"] for deed in deeds if deed["verb"] in _TAKES_NODE}
        pids = {deed["pid"] for deed in deeds if deed["verb"] in _TAKES_WORKER}
        return {name for name, (node, pid) in self._workers.items() if node in nodes or pid in pids}

    def _cost(
        self,
        events: Sequence[Mapping[str, Any]],
        deeds: Sequence[Mapping[str, Any]],
        attempt: int,
        event: Mapping[str, Any],
        *,
        recovery_s: float,
    ) -> Outcome:
        number = int(event["attempt"])
        started = [e for e in events if e["event"] == "attempt_started" and attempt < int(e["attempt"]) <= number]
        forced = [e for e in started if e["cause"] not in _PLANNED]
        read = [e for e in events if e["event"] == "restored" and int(e["attempt"]) in {e["attempt"] for e in forced}]
        tiers = {tier for e in read for tier, num_bytes in e["tiers"].items() if num_bytes}
        planned = {str(e["restored_from"]) for e in forced}
        known = [tier for tier in _TIERS if tier in (tiers or planned)]
        is_hurtful = {deed["verb"] for deed in deeds} & _MAY_BE_IDLE
        return Outcome(
            step=int(deeds[0]["at_step"]),
            recovery_s=recovery_s,
            tier=known[-1] if known else None,
            causes=tuple(str(e["cause"]) for e in started),
            lost_steps=sum(int(e["lost_steps"]) for e in forced),
            world_size=len(self._members_of[number]),
            is_idle=bool(is_hurtful) and not forced,
        )

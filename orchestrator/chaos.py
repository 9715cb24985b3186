"""The chaos schedule: which fault is injected when, and on which node. Pure: `orchestrator.chaos_deeds` carries it out.

A schedule and a seed give the same targets again for the same sequence of live nodes, so a run can be replayed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from orchestrator.errors import ChaosSpecError

__all__ = ["ChaosAction", "ChaosPhase", "ChaosSchedule", "ChaosVerb", "check_targets", "parse_chaos"]

_PART = re.compile(r"(?P<verb>[a-z-]+)(?::(?P<target>[^@:]*))?(?:@(?P<when>[^:]*)(?::(?P<time>.*))?)?\Z", re.IGNORECASE)
_WHEN = re.compile(r"(?:during-(?P<only>[a-z]+)|(?P<step>[0-9]+)(?:\+(?P<phase>[a-z]+))?)\Z")
_SECONDS = re.compile(r"(?P<value>\d+(?:\.\d+)?)s?\Z")


class ChaosVerb(StrEnum):
    """The closed set of faults (and of two changes that are none) that a schedule may name."""

    KILL_NODE = "kill-node"
    ADD_NODE = "add-node"
    KILL_WORKER = "kill-worker"
    STOP_WORKER = "stop-worker"
    DRAIN_NODE = "drain-node"
    KILL_DRIVER = "kill-driver"
    OOM_WORKER = "oom-worker"
    RAISE_IN_WORKER = "raise-in-worker"
    SLOW_NODE = "slow-node"
    CUT_NODE = "cut-node"
    DISK_FULL = "disk-full"
    STORE_OUTAGE = "store-outage"
    KILL_KEEPER = "kill-keeper"
    KILL_COORDINATOR = "kill-coordinator"
    RESTART_HEAD = "restart-head"
    SCALE = "scale"

    @property
    def takes_target(self) -> bool:
        return self not in _WITHOUT_TARGET

    @property
    def removes_node(self) -> bool:
        """Whether the node is gone at once. One that is drained may still be hit before its notice is over."""
        return self in (ChaosVerb.KILL_NODE, ChaosVerb.CUT_NODE)


_WITHOUT_TARGET = frozenset(
    {
        ChaosVerb.ADD_NODE,
        ChaosVerb.KILL_DRIVER,
        ChaosVerb.STORE_OUTAGE,
        ChaosVerb.KILL_COORDINATOR,
        ChaosVerb.RESTART_HEAD,
        ChaosVerb.SCALE,
    }
)
_NEEDS_TIME = {ChaosVerb.DRAIN_NODE: "its notice", ChaosVerb.STORE_OUTAGE: "its length"}
_MAY_HAVE_TIME = (ChaosVerb.SLOW_NODE, ChaosVerb.DISK_FULL)


class ChaosPhase(StrEnum):
    """What the run must be doing when a fault strikes; told by its events."""

    SAVE = "save"
    LOAD = "load"
    REGROUP = "regroup"

    def begins_with(self, event: Mapping[str, Any]) -> bool:
        """Whether ``event`` is the first word of this phase."""
        name = event["event"]
        match self:
            case ChaosPhase.SAVE:
                return bool(name == "save_bound")
            case ChaosPhase.LOAD:
                return bool(name == "attempt_started" and event.get("restored_step"))
            case ChaosPhase.REGROUP:
                return bool(name == "fault")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosAction:
    """One planned fault. ``target`` is a node's number (1 for the first), None: drawn by seed among the live ones.

    ``phase`` None: as soon as ``step`` is reached; else when that phase begins next, from ``step`` on. ``notice_s``:
    the notice of a drain, or how long the fault lasts (None: to the end). ``workers``: those that a scale asks for.
    """

    verb: ChaosVerb
    step: int
    target: int | None = None
    notice_s: float | None = None
    phase: ChaosPhase | None = None
    workers: int | None = None

    def __str__(self) -> str:
        number = self.target if self.workers is None else self.workers
        target = "" if number is None else f":{number}"
        notice = "" if self.notice_s is None else f":{self.notice_s:g}s"
        when = str(self.step)
        if self.phase is not None:
            when = f"{when}+{self.phase}" if self.step else f"during-{self.phase}"
        return f"{self.verb}{target}@{when}{notice}"


def parse_chaos(spec: str) -> tuple[ChaosAction, ...]:
    """The actions of a comma-separated ``verb[:node]@when[:seconds]``, by step. Raises ChaosSpecError. In the place of
    a node a ``scale`` has the number of workers.

    ``when`` is a step, ``during-PHASE``, or ``STEP+PHASE``: the first such phase that begins from that step on.
    """
    actions = [_parse_part(part.strip()) for part in spec.split(",")]
    return tuple(sorted(actions, key=lambda action: action.step))


def _parse_part(part: str) -> ChaosAction:
    match = _PART.match(part)
    if match is None or match["verb"] not in set(ChaosVerb):
        raise ChaosSpecError(part, f"no such verb; expected verb@step with one of: {', '.join(ChaosVerb)}")
    verb = ChaosVerb(match["verb"])
    if match["when"] is None:
        raise ChaosSpecError(part, f"the step is missing; expected e.g. {verb}@40")
    step, phase = _when(part, match["when"])
    return ChaosAction(
        verb=verb,
        step=step,
        phase=phase,
        target=None if verb is ChaosVerb.SCALE else _target(part, verb, match),
        notice_s=_notice(part, verb, match),
        workers=_workers(part, match) if verb is ChaosVerb.SCALE else None,
    )


def _when(part: str, text: str) -> tuple[int, ChaosPhase | None]:
    match = _WHEN.match(text)
    if match is None or (match["only"] is None and int(match["step"]) < 1):
        expected = "a whole number from 1 on, during-PHASE, or STEP+PHASE"
        raise ChaosSpecError(part, f"{text!r} is not a step; expected {expected}")
    phase = match["only"] or match["phase"]
    if phase is not None and phase not in set(ChaosPhase):
        raise ChaosSpecError(part, f"{phase!r} is not a phase; expected one of: {', '.join(ChaosPhase)}")
    return int(match["step"] or 0), None if phase is None else ChaosPhase(phase)


def _target(part: str, verb: ChaosVerb, match: re.Match[str]) -> int | None:
    text = match["target"]
    if text is None:
        return None
    if not verb.takes_target:
        raise ChaosSpecError(part, f"{verb} takes no node")
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ChaosSpecError(part, f"{text!r} is not a node; nodes count from 1 and the head is never a target")
    return int(text)


def _workers(part: str, match: re.Match[str]) -> int:
    text = match["target"] or ""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ChaosSpecError(part, "scale needs the number of workers wanted, e.g. scale:3@40")
    return int(text)


def _notice(part: str, verb: ChaosVerb, match: re.Match[str]) -> float | None:
    text = match["time"]
    if verb not in _NEEDS_TIME and verb not in _MAY_HAVE_TIME:
        if text is not None:
            others = ", ".join((*_NEEDS_TIME, *_MAY_HAVE_TIME))
            raise ChaosSpecError(part, f"{verb} takes no notice or time; only these do: {others}")
        return None
    if text is None and verb in _MAY_HAVE_TIME:
        return None
    seconds = _SECONDS.match(text or "")
    if seconds is None or (verb is not ChaosVerb.DRAIN_NODE and float(seconds["value"]) == 0):
        what = _NEEDS_TIME.get(verb, "how long it lasts")
        raise ChaosSpecError(part, f"{verb} needs {what} in seconds, e.g. {verb}@75:20s")
    return float(seconds["value"])


def check_targets(actions: Sequence[ChaosAction], num_nodes: int) -> None:
    """Raise ChaosSpecError for the first action whose node cannot be there when its turn comes.

    Only what is certain is refused: which node a fault without a target hits, and when a phase comes, is not known.
    """
    started = num_nodes
    removed: dict[int, str] = {}
    num_drawn = 0
    most = num_nodes + sum(action.verb is ChaosVerb.ADD_NODE for action in actions)
    for action in sorted(actions, key=lambda action: action.step):
        started += action.verb is ChaosVerb.ADD_NODE
        if not action.verb.takes_target:
            continue
        # What comes with a phase may come at any time: after every node that is ever added, before any is removed.
        there = started if action.phase is None else most
        if action.target is not None and action.target > there:
            raise ChaosSpecError(str(action), f"there is no node {action.target} then; nodes: 1 to {there}")
        if action.phase is not None:
            continue
        if action.target in removed:
            raise ChaosSpecError(str(action), f"node {action.target} is gone by then, after {removed[action.target]}")
        if started - len(removed) - num_drawn < 1:
            raise ChaosSpecError(str(action), "no node is left by then")
        if action.verb.removes_node:
            if action.target is None:
                num_drawn += 1
            else:
                removed[action.target] = str(action)


class ChaosSchedule:
    """Hands out each action once, when its moment has come, and draws targets from its own seeded generator."""

    def __init__(self, actions: Sequence[ChaosAction], *, seed: int) -> None:
        self._pending = sorted(actions, key=lambda action: action.step)
        # Chaos must not follow the model's own generators, nor disturb them.
        self._random = random.Random(seed)

    @property
    def pending(self) -> tuple[ChaosAction, ...]:
        return tuple(self._pending)

    def due(self, step: int) -> tuple[ChaosAction, ...]:
        """The actions planned for ``step`` or before that were not handed out yet, those with a phase left out."""
        return self._hand_out(lambda action: action.phase is None and action.step <= step)

    def due_at(self, event: Mapping[str, Any], step: int) -> tuple[ChaosAction, ...]:
        """The actions that wait for the phase that begins with ``event``, now that ``step`` has been reached."""
        return self._hand_out(
            lambda action: action.phase is not None and action.step <= step and action.phase.begins_with(event)
        )

    def _hand_out(self, is_due: Callable[[ChaosAction], bool]) -> tuple[ChaosAction, ...]:
        due = tuple(action for action in self._pending if is_due(action))
        self._pending = [action for action in self._pending if action not in due]
        return due

    def choose(self, action: ChaosAction, live: Sequence[int]) -> int:
        """The number of the node that ``action`` hits, out of ``live``. Raises ChaosSpecError when none fits."""
        if action.target is None:
            if not live:
                raise ChaosSpecError(str(action), "no node is left to be hit")
            return self._random.choice(sorted(live))
        if action.target not in live:
            raise ChaosSpecError(
                str(action), f"node {action.target} is not alive; live nodes: {', '.join(map(str, sorted(live)))}"
            )
        return action.target

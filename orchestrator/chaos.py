"""The chaos schedule: which fault is injected at which step, and on which node. Pure: the supervisor carries it out.

A schedule and a seed give the same targets again for the same sequence of live nodes, so a run can be replayed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from orchestrator.errors import ChaosSpecError

__all__ = ["ChaosAction", "ChaosSchedule", "ChaosVerb", "parse_chaos"]

_PART = re.compile(
    r"(?P<verb>[a-z-]+)(?::(?P<target>[^@:]*))?(?:@(?P<step>[^:]*)(?::(?P<notice>.*))?)?\Z", re.IGNORECASE
)
_SECONDS = re.compile(r"(?P<value>\d+(?:\.\d+)?)s?\Z")


class ChaosVerb(StrEnum):
    """The closed set of faults (and one repair) that a schedule may name."""

    KILL_NODE = "kill-node"
    ADD_NODE = "add-node"
    KILL_WORKER = "kill-worker"
    STOP_WORKER = "stop-worker"
    DRAIN_NODE = "drain-node"
    KILL_DRIVER = "kill-driver"

    @property
    def takes_target(self) -> bool:
        return self not in (ChaosVerb.ADD_NODE, ChaosVerb.KILL_DRIVER)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosAction:
    """One planned fault. ``target`` is a node's number (1 for the first), None: drawn by seed among the live ones."""

    verb: ChaosVerb
    step: int
    target: int | None = None
    notice_s: float | None = None

    def __str__(self) -> str:
        target = "" if self.target is None else f":{self.target}"
        notice = "" if self.notice_s is None else f":{self.notice_s:g}s"
        return f"{self.verb}{target}@{self.step}{notice}"


def parse_chaos(spec: str) -> tuple[ChaosAction, ...]:
    """The actions of a comma-separated ``verb[:node]@step[:notice]``, by step. Raises ChaosSpecError."""
    actions = [_parse_part(part.strip()) for part in spec.split(",")]
    return tuple(sorted(actions, key=lambda action: action.step))


def _parse_part(part: str) -> ChaosAction:
    match = _PART.match(part)
    if match is None or match["verb"] not in set(ChaosVerb):
        raise ChaosSpecError(part, f"no such verb; expected verb@step with one of: {', '.join(ChaosVerb)}")
    verb = ChaosVerb(match["verb"])
    if match["step"] is None:
        raise ChaosSpecError(part, f"the step is missing; expected e.g. {verb}@40")
    if not match["step"].isascii() or not match["step"].isdigit() or int(match["step"]) < 1:
        raise ChaosSpecError(part, f"{match['step']!r} is not a step; expected a whole number from 1 on")
    return ChaosAction(
        verb=verb, step=int(match["step"]), target=_target(part, verb, match), notice_s=_notice(part, verb, match)
    )


def _target(part: str, verb: ChaosVerb, match: re.Match[str]) -> int | None:
    text = match["target"]
    if text is None:
        return None
    if not verb.takes_target:
        raise ChaosSpecError(part, f"{verb} takes no node")
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ChaosSpecError(part, f"{text!r} is not a node; nodes count from 1 and the head is never a target")
    return int(text)


def _notice(part: str, verb: ChaosVerb, match: re.Match[str]) -> float | None:
    text = match["notice"]
    if verb is not ChaosVerb.DRAIN_NODE:
        if text is not None:
            raise ChaosSpecError(part, f"{verb} takes no notice; only drain-node does, e.g. drain-node@75:20s")
        return None
    seconds = _SECONDS.match(text or "")
    if seconds is None:
        raise ChaosSpecError(part, "drain-node needs its notice in seconds, e.g. drain-node@75:20s")
    return float(seconds["value"])


class ChaosSchedule:
    """Hands out each action once, when its step has been reached, and draws targets from its own seeded generator."""

    def __init__(self, actions: Sequence[ChaosAction], *, seed: int) -> None:
        self._pending = sorted(actions, key=lambda action: action.step)
        # Chaos must not follow the model's own generators, nor disturb them.
        self._random = random.Random(seed)

    @property
    def pending(self) -> tuple[ChaosAction, ...]:
        return tuple(self._pending)

    def due(self, step: int) -> tuple[ChaosAction, ...]:
        """The actions planned for ``step`` or before that were not handed out yet."""
        due = tuple(action for action in self._pending if action.step <= step)
        self._pending = self._pending[len(due) :]
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

"""The part of a Run's summary that tells when it saved and why: saves by policy, spacing, cost, what was left out.

Pure: folds events, as orchestrator.summary does for the rest. Spacing is between Snapshots that were ordered one after
the other in one Attempt: leaving and the last step save whenever they come, so they say nothing of a policy.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NotRequired, TypedDict

from orchestrator.event_fields import Event, float_of, int_of, number_of, text_of

__all__ = ["SaveFold", "SavesSummary", "Spacing", "is_routine", "next_try_words", "policy_of", "stored_bytes_of"]

_KEPT_STEPS: Final = 64  # a save is heard of some steps before or after its own step is
_PART: Final = "part"  # in memory alone: no save
_ROUTINE: Final = frozenset({"cadence", "time", "last-step"})
_NAME = re.compile(r"[a-z][a-z0-9-]*")


class Spacing(TypedDict):
    """From one save to the next, in steps and in seconds; null where fewer than two can be compared."""

    mean_steps: float | None
    densest_steps: int | None
    sparsest_steps: int | None
    mean_s: float | None
    densest_s: float | None
    sparsest_s: float | None


class SavesSummary(TypedDict):
    """``stall_share``: of the time of all steps, null before the first. ``held_back``: weighings at which a save was
    due and not ordered. ``threshold``: the newest, null where it never moved. ``committed``: not in a summary of an
    older version."""

    ordered: int
    committed: NotRequired[int]
    by_policy: dict[str, int]
    spacing: Spacing
    stall_s: float
    stall_share: float | None
    stored_bytes: int
    held_back: int
    skipped: int
    threshold_moves: int
    threshold: float | None


def next_try_words(failed: Event) -> str:
    """When another save is tried after this one, to follow its reason; "" where nobody said."""
    wait_s = number_of(failed, "next_try_in_s")
    return "" if wait_s is None else f"; the next save is tried in {wait_s:.0f} s at the earliest"


def policy_of(reason: str, kind: str = "snapshot") -> str:
    """Who asked: the word before the colon of ``reason``; of a sentence without one, what kind of Order it was."""
    name = reason.partition(":")[0]
    if _NAME.fullmatch(name):
        return name
    return "order" if kind in ("", "snapshot") else kind.replace("_", "-")


def is_routine(reason: str) -> bool:
    """Whether nothing but a fixed cadence or the last step asked."""
    return policy_of(reason) in _ROUTINE


def stored_bytes_of(committed: Event) -> int:
    """Of a ``committed`` event; its first name for them was ``bytes``."""
    return int_of(committed, "stored_bytes") or int_of(committed, "bytes")


@dataclass(slots=True)
class _Save:
    attempt: int
    step: int
    kind: str
    policy: str
    finished_s: float | None


@dataclass(slots=True)
class SaveFold:
    """Counts over all drivers and Attempts, rolled back ones included: they were saved, and cost as much."""

    _total_steps: int = 0
    _attempt: int = 0
    _saves: list[_Save] = field(default_factory=list)
    _left_out: set[tuple[int, int]] = field(default_factory=set)
    _finished_s: dict[int, float] = field(default_factory=dict)  # of the newest steps of this Attempt
    _trained_s: float = 0.0
    _counts: Counter[str] = field(default_factory=Counter)
    _stall_s: float = 0.0
    _threshold: float | None = None

    def add(self, event: Event) -> None:
        match event.get("event"):
            case "run_started":
                self._total_steps = int_of(event, "steps")
            case "attempt_started":
                self._attempt = int_of(event, "attempt")
                self._finished_s.clear()
            case "step" if int_of(event, "attempt") == self._attempt:
                self._add_step(event)
            case "save_bound" if text_of(event, "kind") != _PART:
                self._add_save(event)
            case "save_skipped":
                self._counts["skipped"] += 1
                self._left_out.add((int_of(event, "attempt"), int_of(event, "step")))
            case "committed":
                self._counts["committed"] += 1
                self._counts["stored_bytes"] += stored_bytes_of(event)
                self._stall_s += float_of(event, "stall_s")
            case "save_weighed" if text_of(event, "held_back"):
                self._counts["held_back"] += 1
            case "threshold_moved":
                self._counts["threshold_moves"] += 1
                self._threshold = number_of(event, "new")

    def result(self) -> SavesSummary:
        saves = [save for save in self._saves if (save.attempt, save.step) not in self._left_out]
        by_policy = Counter(save.policy for save in saves)
        return SavesSummary(
            ordered=len(saves),
            committed=self._counts["committed"],
            by_policy=dict(sorted(by_policy.items(), key=lambda item: (-item[1], item[0]))),
            spacing=self._spacing(saves),
            stall_s=self._stall_s,
            stall_share=self._stall_s / self._trained_s if self._trained_s > 0 else None,
            stored_bytes=self._counts["stored_bytes"],
            held_back=self._counts["held_back"],
            skipped=self._counts["skipped"],
            threshold_moves=self._counts["threshold_moves"],
            threshold=self._threshold,
        )

    def _add_step(self, event: Event) -> None:
        step, finished_s = int_of(event, "step"), number_of(event, "finished_s")
        self._trained_s += float_of(event, "step_s")
        if finished_s is None:
            return
        self._finished_s[step] = finished_s
        self._finished_s.pop(step - _KEPT_STEPS, None)
        for save in self._saves[-4:]:  # more are never under way
            if (save.attempt, save.step) == (int_of(event, "attempt"), step):
                save.finished_s = finished_s

    def _add_save(self, event: Event) -> None:
        step, kind = int_of(event, "step"), text_of(event, "kind")
        policy = policy_of(text_of(event, "reason"), kind)
        finished_s = self._finished_s.get(step)
        save = _Save(attempt=int_of(event, "attempt"), step=step, kind=kind, policy=policy, finished_s=finished_s)
        self._saves.append(save)

    def _spacing(self, saves: Sequence[_Save]) -> Spacing:
        chosen = [save for save in saves if save.kind in ("", "snapshot") and save.step != self._total_steps]
        pairs = [(one, other) for one, other in pairwise(chosen) if one.attempt == other.attempt]
        in_steps = [other.step - one.step for one, other in pairs]
        in_s = [
            other.finished_s - one.finished_s
            for one, other in pairs
            if one.finished_s is not None and other.finished_s is not None
        ]
        return Spacing(
            mean_steps=sum(in_steps) / len(in_steps) if in_steps else None,
            densest_steps=min(in_steps, default=None),
            sparsest_steps=max(in_steps, default=None),
            mean_s=sum(in_s) / len(in_s) if in_s else None,
            densest_s=min(in_s, default=None),
            sparsest_s=max(in_s, default=None),
        )

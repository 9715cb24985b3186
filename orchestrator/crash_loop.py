"""Breaks a crash loop: counts failures that come back at the same step in the same way. Pure values and functions.

What counts as the same: the kind of the fault, for an error of the training code also its type and its message with all
numbers left out, and the step as near as the driver can know it. What follows from a count is the failure policy's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["MAX_KNOWN", "Failure", "Repeat", "count_again", "forget_passed", "repeats_from_plain", "step_doubt"]

MAX_KNOWN = 16
UNHEARD_S = 2.0  # reports and heartbeats of a process that died may be this much behind it
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_MAX_TEXT = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One failure: ``way`` it failed, ``step`` it was in, and by how many steps that may be wrong (``doubt``)."""

    way: str
    step: int
    doubt: int = 0

    @staticmethod
    def of(kind: str, step: int, *, doubt: int = 0, error_type: str = "", message: str = "") -> Failure:
        said = _NUMBER.sub("#", message)[:_MAX_TEXT]
        return Failure(way=":".join(part for part in (kind, error_type, said) if part), step=step, doubt=doubt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """A way of failing at one step, and how often it was seen. ``is_lasting``: kept though the step was passed."""

    way: str
    step: int
    count: int
    is_lasting: bool = False


def step_doubt(step_s: float | None, *, has_witness: bool) -> int:
    """How many steps a failure may lie beyond the last one heard of. A rank that lived on knows to within one step."""
    if has_witness or not step_s:
        return 1
    return max(1, math.ceil(UNHEARD_S / step_s))


def count_again(
    repeats: Sequence[Repeat], failure: Failure, *, is_lasting: bool = False
) -> tuple[tuple[Repeat, ...], int]:
    """The failures known after this one, newest last, and how often it has been seen now."""
    same = next((r for r in repeats if r.way == failure.way and abs(r.step - failure.step) <= failure.doubt), None)
    rest = tuple(repeat for repeat in repeats if repeat is not same)
    count = 1 if same is None else same.count + 1
    step = failure.step if same is None else same.step
    now = Repeat(way=failure.way, step=step, count=count, is_lasting=is_lasting)
    return (*rest, now)[-MAX_KNOWN:], count


def forget_passed(repeats: Sequence[Repeat], finished_step: int, *, doubt: int = 0) -> tuple[Repeat, ...]:
    """Leave out what cannot be due to its step, since that step has been finished meanwhile."""
    return tuple(repeat for repeat in repeats if repeat.is_lasting or repeat.step + doubt > finished_step)


def repeats_from_plain(values: object) -> tuple[Repeat, ...]:
    """The inverse of ``asdict`` after JSON; what does not fit is left out."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        return ()
    return tuple(_repeat(value) for value in values if isinstance(value, Mapping) and _fits(value))


def _fits(value: Mapping[str, Any]) -> bool:
    return isinstance(value.get("way"), str) and all(isinstance(value.get(name), int) for name in ("step", "count"))


def _repeat(value: Mapping[str, Any]) -> Repeat:
    made = Repeat(way=value["way"], step=value["step"], count=value["count"])
    return replace(made, is_lasting=bool(value.get("is_lasting", False)))

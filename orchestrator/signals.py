"""Signals: observed facts, without opinion. The coordinator hands its own to the controller in order.

A closed set of frozen values; policies turn them into Decisions.
"""

from __future__ import annotations

from dataclasses import dataclass

from storage.keys import Attempt
from workers.contract import BoundOrder, EvalReport, StepReport

__all__ = [
    "Committed",
    "Evaluated",
    "Quarantined",
    "SaveBound",
    "SaveDelayed",
    "SaveFailed",
    "SaveSkipped",
    "SaveSlow",
    "Signal",
    "StepFinished",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFinished:
    attempt: Attempt
    report: StepReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    attempt: Attempt
    report: EvalReport


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveBound:
    """All ranks will carry ``bound`` out at its step; ``reason`` is the Order's (or the cadence)."""

    attempt: Attempt
    bound: BoundOrder
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSkipped:
    """A due save was left out because two earlier ones were not settled yet."""

    attempt: Attempt
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed:
    attempt: Attempt
    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveDelayed:
    """The store fails a save, which is kept and tried again. ``rank`` None: all Shards are there, no Commit."""

    attempt: Attempt
    step: int
    rank: int | None
    reason: str
    failing_for_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSlow:
    """A save takes, or took, far longer than those before it. ``cause``: what most of the time went into, in words."""

    attempt: Attempt
    step: int
    seconds: float
    usual_s: float
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """``stall_s``, ``upload_s``: the largest over the ranks. ``upload_retries``: of all of them."""

    attempt: Attempt
    step: int
    stored_bytes: int
    stall_s: float
    upload_s: float
    loss: float | None
    upload_retries: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantined:
    attempt: Attempt
    step: int
    key: str
    reason: str


Signal = (
    StepFinished | Evaluated | SaveBound | SaveSkipped | SaveFailed | SaveDelayed | SaveSlow | Committed | Quarantined
)

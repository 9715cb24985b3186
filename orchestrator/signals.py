"""Signals: observed facts, without opinion. The coordinator hands its own to the controller in order.

A closed set of frozen values; policies turn them into Decisions.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.save_desk import ThresholdMove
from orchestrator.save_facts import Weighed
from storage.keys import Attempt
from storage.replicas import Disagreement
from workers.contract import BoundOrder, EvalReport, ShareReport, StepReport

__all__ = [
    "Committed",
    "Evaluated",
    "Quarantined",
    "SaveBound",
    "SaveDelayed",
    "SaveFailed",
    "SaveShare",
    "SaveSkipped",
    "SaveSlow",
    "SaveWeighed",
    "Signal",
    "StepFinished",
    "ThresholdMoved",
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
    """``disagreement``: the save was whole, but ranks that should hold the same do not. ``next_try_in_s``: how long the
    save policies are held back for it; None: they are not."""

    attempt: Attempt
    step: int
    reason: str
    disagreement: Disagreement | None = None
    next_try_in_s: float | None = None


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
    """``stall_s``, ``encode_s``, ``upload_s``: the largest over the ranks. ``upload_retries``: of all of them.

    ``write_s``: from Snapshot to Commit; None: its Attempt was over before.
    """

    attempt: Attempt
    step: int
    stored_bytes: int
    stall_s: float
    upload_s: float
    loss: float | None
    upload_retries: int = 0
    encode_s: float = 0.0
    commit_s: float = 0.0
    write_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveWeighed:
    """What each save policy said, and what came of it: of every wish, else now and then."""

    attempt: Attempt
    weighed: Weighed


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdMoved:
    """Dearer or cheaper saves have moved the threshold of the instability policy."""

    attempt: Attempt
    move: ThresholdMove


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveShare:
    """What one save takes of the memory in use, at the first Snapshot of an Attempt."""

    attempt: Attempt
    report: ShareReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantined:
    attempt: Attempt
    step: int
    key: str
    reason: str


Signal = (
    StepFinished
    | Evaluated
    | SaveWeighed
    | ThresholdMoved
    | SaveShare
    | SaveBound
    | SaveSkipped
    | SaveFailed
    | SaveDelayed
    | SaveSlow
    | Committed
    | Quarantined
)

"""What saves took, measured: what a save cost the steps it ran beside, and when recent steps were finished.

Plain ledgers of bounded size; time is an argument. What follows from the figures is the policies' matter.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from storage.manifest import Receipt
from workers.contract import StepReport

__all__ = ["FinishTimes", "SaveCost", "SaveUnderWay", "StepPace"]

_KEPT_STEPS = 1000  # finish times: more than any Tier lies behind
_QUIET_STEPS = 128
_RECENT_STEPS = 32
_BESIDE_STEPS = 1024  # of one save; a longer one has shown what it costs by then
_FEWEST_STEPS = 3  # a median of fewer says nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCost:
    """What is known of a save by its Receipts and its Commit alone; the times are the largest over the ranks."""

    stall_s: float
    encode_s: float
    upload_s: float
    commit_s: float
    stored_bytes: int
    raw_bytes: int

    @classmethod
    def of(cls, receipts: Sequence[Receipt], *, commit_s: float, stored_bytes: int, raw_bytes: int) -> SaveCost:
        return cls(
            stall_s=max(receipt.stall_s for receipt in receipts),
            encode_s=max(receipt.encode_s for receipt in receipts),
            upload_s=max(receipt.upload_s for receipt in receipts),
            commit_s=commit_s,
            stored_bytes=stored_bytes,
            raw_bytes=raw_bytes,
        )


@dataclass(slots=True, kw_only=True)
class SaveUnderWay:
    """A save that was bound and is not over. ``beside``: times of the steps that were made while it ran."""

    step: int
    bound_at_s: float
    finished_at_s: float | None = None
    is_delayed: bool = False
    num_beside: int = 0
    beside: deque[float] = field(default_factory=lambda: deque(maxlen=_BESIDE_STEPS))

    def ran_beside(self, step_s: float) -> None:
        self.num_beside += 1
        self.beside.append(step_s)


class StepPace:
    """How long the World's steps take, and how long those beside which no save ran."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._quiet: deque[float] = deque(maxlen=_QUIET_STEPS)
        self._num_of_world = 0

    def begin_world(self) -> None:
        """Another World has another pace; the last one's is the best guess until two steps of this one are finished."""
        self._num_of_world = 0

    def add(self, step_s: float, *, is_quiet: bool) -> None:
        """The first step of a World compiles and warms up, for minutes at times: it says nothing of the next."""
        self._num_of_world += 1
        if self._num_of_world == 1:
            return
        if self._num_of_world == 2:
            self._recent.clear()
            self._quiet.clear()
        self._recent.append(step_s)
        if is_quiet:
            self._quiet.append(step_s)

    @property
    def step_s(self) -> float | None:
        return median(self._recent) if self._recent else None

    def slowdown_s(self, save: SaveUnderWay) -> float | None:
        """Training time that ``save`` cost the steps beside it; None where too few were seen to tell."""
        if min(len(save.beside), len(self._quiet)) < _FEWEST_STEPS:
            return None
        return max(0.0, median(save.beside) - median(self._quiet)) * save.num_beside


class FinishTimes:
    """When the steps of an Attempt were finished, on the clock of whoever asks."""

    def __init__(self) -> None:
        self._steps: deque[int] = deque(maxlen=_KEPT_STEPS)
        self._times: deque[float] = deque(maxlen=_KEPT_STEPS)

    def clear(self) -> None:
        self._steps.clear()
        self._times.clear()

    def add(self, report: StepReport, newest: StepReport, now_s: float) -> float:
        """Rank 0's own clock tells how far apart the steps of one message lie, never the time of day here."""
        ago_s = max(0.0, newest.finished_at_s - report.finished_at_s)
        at_s = now_s - ago_s
        if self._times:
            at_s = max(at_s, self._times[-1])
        self._steps.append(report.step)
        self._times.append(at_s)
        return at_s

    def of(self, step: int) -> float | None:
        """None: not of this Attempt, or not finished. What is older than all that is kept counts as the oldest kept."""
        if not self._steps or step > self._steps[-1]:
            return None
        return self._times[bisect_left(self._steps, step)]

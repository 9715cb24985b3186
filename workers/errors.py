"""Errors of the workers package: one root; each says what failed, for which rank or Attempt, and what to do.

They survive pickling: every field is a constructor argument kept in ``args``. Errors of the data files have their own
module; turning any exception into a plain value is `workers.failure_cause`.
"""

from __future__ import annotations

from workers.contract import SkippedWindow

__all__ = [
    "AttemptAbandoned",
    "AttemptRefused",
    "CoordinatorUnavailable",
    "FormingFailed",
    "LoopMisused",
    "LossSpike",
    "NotReproducible",
    "RanksDisagree",
    "StepNotFinite",
    "StepRejected",
    "WorkersError",
]


class WorkersError(Exception):
    """Root of every error this package raises on purpose."""


class AttemptRefused(WorkersError):
    """A worker was asked to start an Attempt that it must not start."""

    def __init__(self, worker_id: str, attempt: str, reason: str) -> None:
        super().__init__(worker_id, attempt, reason)
        self.worker_id, self.attempt, self.reason = worker_id, attempt, reason

    def __str__(self) -> str:
        return f"worker {self.worker_id} refuses attempt {self.attempt}: {self.reason}"


class AttemptAbandoned(WorkersError):
    """Raised inside a training thread to end it: the Attempt it works for is over."""

    def __init__(self, attempt: str, reason: str) -> None:
        super().__init__(attempt, reason)
        self.attempt, self.reason = attempt, reason

    def __str__(self) -> str:
        return f"attempt {self.attempt} is over: {self.reason}"


class FormingFailed(WorkersError):
    """The ranks of a World did not find each other in time."""

    def __init__(self, attempt: str, rank: int, world_size: int, num_arrived: int, waited_s: float) -> None:
        super().__init__(attempt, rank, world_size, num_arrived, waited_s)
        self.attempt, self.rank, self.world_size = attempt, rank, world_size
        self.num_arrived, self.waited_s = num_arrived, waited_s

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: {self.num_arrived} of {self.world_size} ranks of attempt {self.attempt} had come"
            f" together after {self.waited_s:g} s; raise failure.group_timeout_s if starting takes longer"
        )


class CoordinatorUnavailable(WorkersError):
    """One exchange with the coordinator failed or ran out of time. Rank 0 tries again."""


class LoopMisused(WorkersError):
    """A train loop called the Session in an order that would lose or repeat work."""


class NotReproducible(WorkersError):
    """`reproducible` is asked for with something that cannot have the same bits at any world size."""


class RanksDisagree(WorkersError):
    """The step vectors of the ranks do not belong to one step."""

    def __init__(self, rank: int, step: int, seen: float) -> None:
        super().__init__(rank, step, seen)
        self.rank, self.step, self.seen = rank, step, seen

    def __str__(self) -> str:
        return (
            f"rank {self.rank}, step {self.step}: the ranks' mean step is {self.seen:g}; every rank must call"
            " session.step_end once for each step"
        )


class StepRejected(WorkersError):
    """A step was finished and may not stand: the Run goes back behind it and leaves its samples out."""

    def __init__(self, rank: int, step: int, reason: str, windows: tuple[SkippedWindow, ...]) -> None:
        super().__init__(rank, step, reason, windows)
        self.rank, self.step, self.reason, self.windows = rank, step, reason, windows

    def __str__(self) -> str:
        samples = ", ".join(f"[{window.place}, {window.place + window.samples})" for window in self.windows)
        return f"step {self.step}: {self.reason}; its samples are {samples} of the stream"


class StepNotFinite(StepRejected):
    """Its loss or gradient norm is infinite or not a number."""


class LossSpike(StepRejected):
    """Its loss is far above what it was lately."""

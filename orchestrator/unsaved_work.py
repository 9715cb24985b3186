"""Whether memory holds what no Checkpoint does, between two Worlds and at a driver's end. Pure; it saves nothing."""

from __future__ import annotations

from typing import Protocol

from orchestrator.attempt_run import AttemptEnd, Broken, Left

__all__ = ["holds_more", "is_in_memory_alone"]


class Progress(Protocol):
    """What is asked of the recorder about the Attempt that has ended."""

    @property
    def steps_this_attempt(self) -> int: ...

    @property
    def safe_step_this_attempt(self) -> int: ...


def is_in_memory_alone(end: AttemptEnd | None, progress: Progress, durable_step: int | None, *, was: bool) -> bool:
    """Whether memory holds newer steps than any Checkpoint, which would go with this driver. ``was``: so before."""
    if isinstance(end, Left):
        return end.is_parted
    if not isinstance(end, Broken):
        return False
    if not progress.steps_this_attempt:
        return was
    return durable_step is not None and progress.safe_step_this_attempt > durable_step


def holds_more(end: AttemptEnd | None, progress: Progress, durable_step: int | None, *, is_unsaved: bool) -> bool:
    """Whether memory holds newer steps than any Checkpoint now that the Run ends for this driver."""
    if isinstance(end, Broken) or (isinstance(end, Left) and end.is_parted):
        return is_in_memory_alone(end, progress, durable_step, was=is_unsaved)
    # A World that left or finished has made a save, which may have failed.
    return end is not None and durable_step is not None and progress.safe_step_this_attempt > durable_step

"""How the ranks of an Attempt that came to nothing tell of it."""

from __future__ import annotations

from storage.keys import Attempt
from workers.contract import CauseKind, FailureCause, Outcome, OutcomeKind

__all__ = ["failed_outcomes"]


def failed_outcomes(attempt: Attempt, size: int = 2, *, is_forming: bool = False) -> tuple[Outcome, ...]:
    """A failed collective on each of ``size`` ranks, before the first step."""
    causes = [
        FailureCause(
            kind=CauseKind.COLLECTIVE,
            error_type="DistStoreError",
            message="wait timeout after 60000ms",
            traceback="-",
            rank=rank,
            step=1,
            is_forming=is_forming,
        )
        for rank in range(size)
    ]
    return tuple(
        Outcome(
            attempt=attempt,
            worker_id=f"w{cause.rank}",
            rank=cause.rank,
            kind=OutcomeKind.FAILED,
            last_step=0,
            cause=cause,
        )
        for cause in causes
    )

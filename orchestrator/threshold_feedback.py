"""How what saves store and how long they take move the instability threshold: a dear save needs a better reason.

Pure, and one way only: saves that are smaller or quicker than the references leave the threshold where it is set.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from orchestrator.save_config import FeedbackConfig
from orchestrator.save_facts import SaveTimes

__all__ = ["ThresholdFeedback"]

_RECENT = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    stored_bytes: float
    write_s: float
    of_size: float
    of_time: float


class ThresholdFeedback:
    """``ThresholdFeedback(config)``. Looks at the median of the last five saves."""

    def __init__(self, config: FeedbackConfig) -> None:
        self._config = config

    def offset(self, saves: Sequence[SaveTimes]) -> float:
        """To be added to the threshold; 0 before the first save."""
        parts = self._parts(saves)
        return 0.0 if parts is None else min(parts.of_size + parts.of_time, self._config.max_offset)

    def explain(self, saves: Sequence[SaveTimes]) -> str:
        """The figures behind `offset`, in words."""
        parts = self._parts(saves)
        if parts is None:
            return "no save yet: +0"
        total = parts.of_size + parts.of_time
        at_most = "" if total <= self._config.max_offset else f", at policy.feedback.max_offset {self.offset(saves):g}"
        return (
            f"saves store {parts.stored_bytes / 1e9:.3g} GB (+{parts.of_size:.3f}) "
            f"and take {parts.write_s:.3g} s (+{parts.of_time:.3f}){at_most}"
        )

    def _parts(self, saves: Sequence[SaveTimes]) -> _Parts | None:
        recent = saves[-_RECENT:]
        if not recent:
            return None
        stored_bytes = float(median(save.stored_bytes for save in recent))
        write_s = float(median(save.write_s for save in recent))
        config = self._config
        return _Parts(
            stored_bytes=stored_bytes,
            write_s=write_s,
            of_size=config.size_gain * _doublings(stored_bytes, config.size_reference_bytes),
            of_time=config.write_gain * _doublings(write_s, config.write_reference_s),
        )


def _doublings(value: float, reference: float) -> float:
    """Above the reference; 0 at it and below."""
    return math.log2(value / reference) if value > reference else 0.0

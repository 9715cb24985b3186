"""Judges whether a finished step may stand: its loss and gradient norm are finite, and the loss is no spike.

Every rank feeds it the same totals, so all come to the same verdict at the same step. What follows is not its business.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from workers.contract import SkippedWindow
from workers.errors import LossSpike, StepNotFinite, StepRejected
from workers.skipped_windows import spans
from workers.state import Progress

__all__ = ["StepCheck"]

_WINDOW = 64
_MIN_LOSSES = 16  # before a spike can be told from the noise


class StepCheck:
    """One per Attempt. ``loss_spike``: from how many times the running median on a loss is a spike; None: never."""

    def __init__(self, *, rank: int, global_batch: int, must_be_finite: bool, loss_spike: float | None) -> None:
        self._rank, self._global_batch = rank, global_batch
        self._must_be_finite, self._loss_spike = must_be_finite, loss_spike
        self._losses: deque[float] = deque(maxlen=_WINDOW)

    def require_sound(
        self, step: int, *, loss: float, grad_norm: float, before: Progress, is_overflow: bool = False
    ) -> None:
        """Raises StepRejected with the samples of the step, which began where ``before`` stands. ``is_overflow``: its
        gradient overflowed by loss scaling and was not applied, so only its loss is judged."""
        if not (math.isfinite(loss) and (is_overflow or math.isfinite(grad_norm))):
            if self._must_be_finite:
                raise self._rejection(StepNotFinite, step, f"loss {loss:g}, gradient norm {grad_norm:g}", before)
            return
        usual = median(self._losses) if len(self._losses) >= _MIN_LOSSES else None
        if usual is not None and self._loss_spike is not None and loss > self._loss_spike * usual > 0:
            reason = f"loss {loss:g}, usual is {usual:g}, failure.loss_spike is {self._loss_spike:g}"
            raise self._rejection(LossSpike, step, reason, before)
        self._losses.append(loss)

    def _rejection(self, kind: type[StepRejected], step: int, reason: str, before: Progress) -> StepRejected:
        places = spans(before.position, self._global_batch, before.skipped)
        word = "loss-spike" if kind is LossSpike else "not-finite"
        windows = tuple(SkippedWindow(place=place, samples=count, step=step, reason=word) for place, count in places)
        return kind(self._rank, step, reason, windows)

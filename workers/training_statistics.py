"""How steady the loss is: curvature of the filtered loss, and the spread of the gradient norm.

Fed with totals that have already left the device, one step late, so it costs no host sync. It judges nothing: when a
value calls for a save is the save policy's question.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

__all__ = ["TrainingStatistics"]

_WINDOW = 5
_DECAY = 0.9


class TrainingStatistics:
    """Second difference of the median-filtered loss (window 5) and a running variance of the gradient norm.

    Both are None until enough finite values have come in; a value that is not finite is left out.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._filtered: deque[float] = deque(maxlen=3)
        self._norm_mean: float | None = None
        self._norm_variance = 0.0

    def add(self, *, loss: float, grad_norm: float) -> None:
        """Take in one finished step."""
        if math.isfinite(loss):
            self._losses.append(loss)
            if len(self._losses) == _WINDOW:
                self._filtered.append(median(self._losses))
        if not math.isfinite(grad_norm):
            return
        if self._norm_mean is None:
            self._norm_mean = grad_norm
            return
        difference = grad_norm - self._norm_mean
        self._norm_mean += (1 - _DECAY) * difference
        self._norm_variance = _DECAY * (self._norm_variance + (1 - _DECAY) * difference * difference)

    @property
    def loss_curvature(self) -> float | None:
        if len(self._filtered) < 3:
            return None
        oldest, middle, newest = self._filtered
        return newest - 2 * middle + oldest

    @property
    def grad_norm_variance(self) -> float | None:
        return None if self._norm_mean is None else self._norm_variance

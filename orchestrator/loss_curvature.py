"""How the loss bends: the second difference of the loss under a median filter.

It judges nothing: when a value calls for a save is the save policy's question.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

__all__ = ["LossCurvature"]

_WINDOW = 5


class LossCurvature:
    """Fed with every finished step's loss; one that is not finite is left out. None until there are enough."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._filtered: deque[float] = deque(maxlen=3)

    def add(self, loss: float) -> float | None:
        """Take in one finished step; the curvature then."""
        if math.isfinite(loss):
            self._losses.append(loss)
            if len(self._losses) == _WINDOW:
                self._filtered.append(median(self._losses))
        if len(self._filtered) < 3:
            return None
        oldest, middle, newest = self._filtered
        return newest - 2 * middle + oldest

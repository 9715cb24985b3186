"""Signals of the training, out of what rank 0 reports: how the loss bends, how the gradient spreads, who is pressed.

Bounded, and without an opinion: whether a value calls for a save is said in instability_policy.py and
pressure_policy.py.
"""

from __future__ import annotations

import math
from collections import deque

from orchestrator.loss_curvature import LossCurvature
from orchestrator.save_facts import TrainingFacts
from workers.contract import StepReport

__all__ = ["RunningQuantile", "TrainingSignals"]

_LEAST_VALUES = 5
_CALM_EVALUATIONS = 3
"""So many evaluations in a row without a pressed rank end an episode: a share that sways about its limit is one."""


class RunningQuantile:
    """Quantile of ``window`` values that have ``lag`` newer ones: a change does not become the usual at once.

    None until five values are that old. As many values again are kept for a rewind.
    """

    def __init__(self, quantile: float, *, window: int, lag: int) -> None:
        if not 0 < quantile < 1 or window < _LEAST_VALUES or lag < 0:
            raise ValueError(
                f"quantile {quantile:g}, window {window}, lag {lag}: expected a quantile between 0 and 1, a window of "
                f"{_LEAST_VALUES} or more, a lag of 0 or more"
            )
        self._quantile, self._lag = quantile, lag
        self._values: deque[tuple[int, float]] = deque(maxlen=2 * window + lag)
        self._window = window

    def add(self, step: int, value: float) -> None:
        """Take in the value of ``step``. One that is not finite is left out."""
        if math.isfinite(value):
            self._values.append((step, value))

    def rewind(self, step: int) -> None:
        """Forget what came after ``step``."""
        while self._values and self._values[-1][0] > step:
            self._values.pop()

    @property
    def value(self) -> float | None:
        """Linear between the two values that are nearest."""
        old = [value for _, value in self._values][: max(0, len(self._values) - self._lag)][-self._window :]
        if len(old) < _LEAST_VALUES:
            return None
        old.sort()
        place = self._quantile * (len(old) - 1)
        below = math.floor(place)
        above = min(below + 1, len(old) - 1)
        return old[below] + (place - below) * (old[above] - old[below])


class TrainingSignals:
    """``TrainingSignals(evaluate_every_steps, quantile)``: one for a Run, fed with every finished step in order.

    ``window`` and ``lag`` count evaluations: from how many, and from how long ago, the usual is taken.
    """

    def __init__(self, evaluate_every_steps: int, quantile: float, *, window: int = 50, lag: int = 3) -> None:
        self._every_steps = evaluate_every_steps
        self._usual_curvature = RunningQuantile(quantile, window=window, lag=lag)
        self._usual_variance = RunningQuantile(quantile, window=window, lag=lag)
        self._newest_step: int | None = None
        self._forget_recent()

    def _forget_recent(self) -> None:
        """Begin the loss filter, the interval between two evaluations and the episode of pressure anew."""
        self._loss_curvature = LossCurvature()
        self._variance: float | None = None
        self._norm_of_variance: float | None = None
        self._norm: float | None = None
        self._pressed_since_step: int | None = None
        self._calm = 0
        self._begin_interval()

    def _begin_interval(self) -> None:
        self._curvature: float | None = None
        self._peak_norm: float | None = None
        self._ranks_pressed = 0
        self._share: float | None = None

    def add(self, report: StepReport) -> TrainingFacts | None:
        """Take in a finished step; a value every ``evaluate_every_steps`` steps. A step that was heard before means
        that the training went back."""
        if self._newest_step is not None and report.step <= self._newest_step:
            self.rewind(report.step - 1)
        self._newest_step = report.step
        self._take_loss_and_gradient(report)
        self._take_pressure(report)
        if report.step % self._every_steps:
            return None
        facts = self._evaluated(report.step)
        self._begin_interval()
        return facts

    def rewind(self, step: int) -> None:
        """The training goes on after ``step``, from an older state perhaps."""
        self._usual_curvature.rewind(step)
        self._usual_variance.rewind(step)
        self._newest_step = step
        self._forget_recent()

    def _take_loss_and_gradient(self, report: StepReport) -> None:
        curvature = self._loss_curvature.add(report.loss)
        if curvature is not None and (self._curvature is None or abs(curvature) > abs(self._curvature)):
            self._curvature = curvature
        is_norm_finite = math.isfinite(report.grad_norm)
        if is_norm_finite:
            self._norm = report.grad_norm
            self._peak_norm = max(report.grad_norm, self._peak_norm or 0.0)
        if is_norm_finite and report.grad_variance is not None and math.isfinite(report.grad_variance):
            self._variance, self._norm_of_variance = report.grad_variance, report.grad_norm

    def _take_pressure(self, report: StepReport) -> None:
        self._ranks_pressed = max(self._ranks_pressed, report.ranks_pressed)
        if report.pressed_share is not None:
            self._share = max(report.pressed_share, self._share or 0.0)
        if report.ranks_pressed and self._pressed_since_step is None:
            self._pressed_since_step = report.step

    def _evaluated(self, step: int) -> TrainingFacts:
        self._calm = 0 if self._ranks_pressed else self._calm + 1
        if self._calm >= _CALM_EVALUATIONS:
            self._pressed_since_step = None
        peak = self._peak_variance()
        if self._curvature is not None:
            self._usual_curvature.add(step, abs(self._curvature))
        if peak is not None:
            self._usual_variance.add(step, peak)
        return TrainingFacts(
            step=step,
            loss_curvature=self._curvature,
            grad_variance=self._variance,
            peak_variance=peak,
            grad_norm=self._norm,
            curvature_scale=self._usual_curvature.value,
            variance_scale=self._usual_variance.value,
            ranks_pressed=self._ranks_pressed,
            pressed_share=self._share,
            pressed_since_step=self._pressed_since_step,
        )

    def _peak_variance(self) -> float | None:
        """Largest since the last evaluation. The elements' mean is next to nothing beside their spread, so that the
        variance goes with the square of the norm, which every step tells."""
        if self._variance is None or self._peak_norm is None or not self._norm_of_variance:
            return self._variance
        peak = self._variance * max(1.0, self._peak_norm / self._norm_of_variance) ** 2
        return peak if math.isfinite(peak) else self._variance

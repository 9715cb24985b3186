"""How fast the Run goes, as its own Signals tell: the time of a step, and what a change of the World costs.

Measures only; whether a change pays is scaling_policy's business.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from orchestrator.signals import Signal, StepFinished
from storage.keys import Attempt
from workers.contract import StepReport

__all__ = ["DEFAULT_REGROUP_S", "Pace"]

DEFAULT_REGROUP_S = 5.0
"""Taken for the cost of a planned change until one was measured."""
_STEPS, _REGROUPS = 20, 5  # of the newest, whose median counts
_MAX_UNTOLD = 3  # last reports of a World that parts may stay untold


class Pace:
    """One per driver. A listener of the recorder."""

    def __init__(self) -> None:
        self._attempt: Attempt | None = None
        self._last: StepReport | None = None
        self._steps_s: deque[float] = deque(maxlen=_STEPS)
        self._regroups_s: deque[float] = deque(maxlen=_REGROUPS)
        self._is_interrupted = False
        self._step_s: float | None = None

    @property
    def step_s(self) -> float | None:
        """Of the present World; before its second step the last one's. The first step of a World is no measure."""
        return self._step_s

    @property
    def regroup_s(self) -> float:
        """From the last step of a World that parted as planned to the beginning of the next World's first."""
        return median(self._regroups_s) if self._regroups_s else DEFAULT_REGROUP_S

    def interrupt(self) -> None:
        """Workers are being waited for: what the present change takes is not what a change costs."""
        self._is_interrupted = True

    def on_signal(self, signal: Signal) -> None:
        if not isinstance(signal, StepFinished):
            return
        report = signal.report
        if signal.attempt != self._attempt:
            self._begin(signal.attempt, report)
        else:
            self._steps_s.append(report.step_s)
            self._step_s = median(self._steps_s)
        self._last = report

    def _begin(self, attempt: Attempt, first: StepReport) -> None:
        last, usual_s = self._last, self._step_s
        if last is not None and not self._is_interrupted and 0 < first.step - last.step <= _MAX_UNTOLD:
            untold_s = (first.step - last.step - 1) * (usual_s or 0.0)
            cost_s = first.finished_at_s - first.step_s - last.finished_at_s - untold_s
            self._regroups_s.append(max(0.0, cost_s))
        self._attempt = attempt
        self._steps_s.clear()
        self._is_interrupted = False

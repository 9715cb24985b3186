"""What a Commit says of its step: loss, metric and place in the data, as rank 0 reported them. Bounded size."""

from __future__ import annotations

from typing import NamedTuple

from workers.contract import EvalReport, StepReport

__all__ = ["StepBook", "StepWords"]

_KEPT_STEPS = 1000


class StepWords(NamedTuple):
    loss: float | None
    metric: float | None
    ledger: tuple[int, str] | None


class StepBook:
    """Owned and locked by the coordinator."""

    def __init__(self) -> None:
        self._losses: dict[int, float] = {}
        self._metrics: dict[int, float] = {}
        self._ledgers: dict[int, tuple[int, str]] = {}
        self.newest_step = 0

    def begin(self, base_step: int) -> None:
        """History goes on from ``base_step``: what was evaluated beyond it is evaluated again."""
        self.newest_step = base_step
        self._metrics = {step: loss for step, loss in self._metrics.items() if step <= base_step}

    def add(self, report: StepReport) -> bool:
        """False for a step that was heard of before: a call that failed may have arrived."""
        if report.step <= self.newest_step:
            return False
        self.newest_step = report.step
        self._losses[report.step] = report.loss
        self._ledgers[report.step] = (report.position, report.sample_chain)
        return True

    def add_evaluation(self, report: EvalReport) -> bool:
        if report.step in self._metrics:
            return False
        self._metrics[report.step] = report.loss
        return True

    def of(self, step: int) -> StepWords:
        return StepWords(self._losses.get(step), self._metrics.get(step), self._ledgers.get(step))

    def prune(self) -> None:
        horizon = self.newest_step - _KEPT_STEPS
        for table in (self._losses, self._ledgers, self._metrics):
            for step in [step for step in table if step < horizon]:
                del table[step]

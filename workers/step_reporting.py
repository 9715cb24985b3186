"""What rank 0 tells the driver of a finished step, from the sums over all ranks."""

from __future__ import annotations

from typing import Protocol

from workers.contract import StepReport
from workers.gradient_statistics import element_variance
from workers.loss_scaling import LossScaling
from workers.state import Progress
from workers.step_trace import StepTrace
from workers.step_vector import StepTotals

__all__ = ["MemoryFacts", "report_of"]


class MemoryFacts(Protocol):
    """The memory Tier as a report speaks of it (workers.memory_saver)."""

    @property
    def newest_step(self) -> int: ...

    @property
    def safe_step(self) -> int: ...


def report_of(
    progress: Progress,
    totals: StepTotals,
    finished_at_s: float,
    memory: MemoryFacts | None = None,
    trace: StepTrace | None = None,
    scaling: LossScaling | None = None,
) -> StepReport:
    """``progress`` stands at the step that ``totals``, ``trace`` and ``scaling`` are of."""
    return StepReport(
        step=progress.step,
        loss=totals.loss,
        grad_norm=totals.grad_norm,
        lr=totals.lr,
        tokens=progress.tokens,
        position=progress.position,
        sample_chain=progress.sample_chain,
        step_s=totals.step_s,
        finished_at_s=finished_at_s,
        memory_step=-1 if memory is None else memory.newest_step,
        safe_step=-1 if memory is None else memory.safe_step,
        memory_stall_s=0.0 if memory is None else totals.memory_stall_s,
        compute_s=totals.compute_s,
        grad_variance=element_variance(total=totals.gradient_sum, count=totals.gradient_count, norm=totals.grad_norm),
        ranks_pressed=totals.ranks_pressed,
        pressed_share=totals.pressed_share or None,
        weights_digest=None if trace is None else trace.weights,
        optimizer_digest=None if trace is None else trace.optimizer,
        schedule_digest=None if trace is None else trace.schedule,
        rest_digest=None if trace is None else trace.rest,
        rng_digest=None if trace is None else trace.rng,
        own_digest=None if trace is None else trace.own,
        loss_scale=None if scaling is None else scaling.scale,
        is_update_skipped=scaling is not None and scaling.is_skipped,
    )

"""The sums over all ranks that end each step: one small vector a step, taken into Progress when it has arrived.

The vector of step s is read at the end of step s + 1, when it has long arrived, so a step does not wait for its own;
only `settle` does. When to settle is the Session's business, and what is saved then, Saving's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from workers.advance import advance
from workers.compute_clock import ComputeClock
from workers.contract import AttemptSpec
from workers.courier import Courier
from workers.errors import RanksDisagree
from workers.loading import WarmParts
from workers.loss_scaling import LossScaling
from workers.memory_pressure import MemoryPressure
from workers.order_desk import OrderDesk
from workers.saving import Saving
from workers.settings import WorkerSettings
from workers.state import TrainingState
from workers.step_check import StepCheck
from workers.step_reporting import report_of
from workers.step_trace import StepTrace, StepTracer
from workers.step_vector import StepVectorLayout
from workers.train_step import TrainStep
from workers.vector_filling import VectorFiller
from workers.vector_reader import Reading, VectorReader

__all__ = ["StepSums"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _InFlight:
    """A step whose vector is under way."""

    step: int
    reading: Reading
    finished_at_s: float
    scaling: LossScaling
    trace: StepTrace | None


class StepSums:
    """One Attempt's, made together with the state. Collective: every rank begins the sums of the same steps."""

    def __init__(
        self,
        state: TrainingState,
        *,
        settings: WorkerSettings,
        spec: AttemptSpec,
        parts: WarmParts,
        desk: OrderDesk,
        saving: Saving,
        courier: Courier | None,
        start_sum: Callable[[torch.Tensor], dist.Work],
    ) -> None:
        self._state, self._settings, self._spec = state, settings, spec
        self._desk, self._saving, self._courier, self._start_sum = desk, saving, courier, start_sum
        self._num_rows = parts.dataset.num_rows
        self._layout = StepVectorLayout(num_leaves=settings.data.num_leaves, world_size=spec.world.size)
        self._reader = VectorReader(parts.device)
        clock = ComputeClock(parts.device)
        clock.attach(state.model)
        self._filler = VectorFiller(
            self._layout,
            rank=spec.rank,
            signals=settings.signals,
            clock=clock,
            pressure=MemoryPressure(parts.device, settings.signals),
            upload=self._reader.upload,
        )
        self._tracer = StepTracer(settings.trace_every, rank=spec.rank)
        self._check = StepCheck(
            rank=spec.rank,
            global_batch=settings.data.global_batch,
            must_be_finite=settings.must_be_finite,
            loss_spike=settings.loss_spike,
        )
        self._in_flight: _InFlight | None = None

    def begin(self, step: TrainStep) -> None:
        """At the end of ``step``: begin its sum, and take in the one before."""
        vector = self._filler.fill(step, self._saving.memory, self._desk)
        reading = self._reader.begin(vector, self._start_sum(vector))
        before = self._in_flight
        finished_at_s = time.time()
        trace = self._tracer.take(step.number, lambda: self._state)
        self._in_flight = _InFlight(
            step=step.number, reading=reading, finished_at_s=finished_at_s, scaling=step.scaling, trace=trace
        )
        if before is not None:
            self._take_in(before)

    def settle(self) -> None:
        """Read the vector that is still under way, if one is: Progress then stands at the last finished step."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            self._take_in(in_flight)

    def _take_in(self, in_flight: _InFlight) -> None:
        """The totals of one step: into Progress on every rank, and into the report on rank 0."""
        step, progress = in_flight.step, self._state.progress
        totals = self._layout.read(in_flight.reading.words())
        if totals.mean_step != step:
            raise RanksDisagree(self._spec.rank, step, totals.mean_step)
        # Before anything else learns of the step: all ranks end here together, and nothing of it was staged for a save.
        self._check.require_sound(
            step,
            loss=totals.loss,
            grad_norm=totals.grad_norm,
            before=progress,
            is_overflow=in_flight.scaling.is_overflow,
        )
        self._saving.learn(step, totals)
        advance(progress, step, totals.leaf_digests, self._settings.data, self._num_rows, self._spec.world)
        if self._courier is not None:
            memory = self._saving.memory
            self._courier.report(
                report_of(progress, totals, in_flight.finished_at_s, memory, in_flight.trace, in_flight.scaling)
            )

"""One rank's part of the step vector. Losses and the norm stay on the device: nothing here waits for it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from workers.compute_clock import ComputeClock
from workers.memory_pressure import MemoryPressure
from workers.memory_saver import MemorySaver
from workers.order_desk import OrderDesk
from workers.settings import SignalSettings
from workers.step_vector import StepVectorLayout
from workers.train_step import TrainStep

__all__ = ["VectorFiller"]


class VectorFiller:
    """One Attempt's. ``upload`` brings words to the rank's device."""

    def __init__(
        self,
        layout: StepVectorLayout,
        *,
        rank: int,
        signals: SignalSettings,
        clock: ComputeClock,
        pressure: MemoryPressure,
        upload: Callable[[list[float]], torch.Tensor],
    ) -> None:
        self._layout, self._rank, self._signals = layout, rank, signals
        self._clock, self._pressure, self._upload = clock, pressure, upload

    def fill(self, step: TrainStep, memory: MemorySaver | None, desk: OrderDesk) -> torch.Tensor:
        """The vector of ``step`` as this rank gives it into the sum."""
        look = self._pressure.look() if self._signals.measures(step.number) else None
        gradient = step.gradient_sum
        words = self._layout.rank_part(
            step=step.number,
            digests=step.digests,
            rank=self._rank,
            compute_s=self._clock.take(),
            replicated=() if memory is None else memory.replicated(step.number),
            left_out=() if memory is None else memory.left_out(step.number),
            gradient_count=0 if gradient is None else gradient.count,
            is_pressed=look is not None and look.is_pressed,
        )
        if self._rank == 0:
            step_s = step.elapsed_s()
            self._layout.add_rank0_part(
                words,
                order=desk.bind(step.number),
                lr=step.lr,
                step_s=step_s,
                memory_step=0 if memory is None else memory.bind(step.number, step_s),
                memory_stall_s=0.0 if memory is None else memory.stall_s,
                pressed_share=0.0 if look is None else look.share,
            )
        vector = self._upload(words)
        for index, loss in step.losses.items():
            vector[self._layout.loss_slot(index)] = loss
        if gradient is not None:
            vector[self._layout.gradient_sum_slot] = gradient.total
        if self._rank == 0 and step.grad_norm is not None:
            vector[self._layout.grad_norm_slot] = step.grad_norm
        return vector

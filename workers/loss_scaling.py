"""Loss scaling for float16: what TrainStep does with a GradScaler, on gradients as they lie on this rank.

Whether a gradient has overflowed is asked of its norm, which is summed over all ranks anyway: every rank comes to the
same verdict without a collective of its own, at any world size. What a skipped update means for a Run is said in
`TrainStep.apply`, and whether the step may stand in `step_check`.
"""

from __future__ import annotations

import math

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from workers.config import ModelConfig, OptimConfig
from workers.parallelize import Gradients

__all__ = ["LossScaling", "build_scaler", "is_in_use"]

_LEAST_SCALE = 1.0  # a gradient that is not finite at this scale or a smaller one has not overflowed by scaling


def build_scaler(optim: OptimConfig, model: ModelConfig, device: torch.device) -> GradScaler | None:
    """The built-in scaler: with ``optim.loss_scaling``, which follows ``model.compute_dtype`` where it is not set."""
    is_on = model.compute_dtype == "float16" if optim.loss_scaling is None else optim.loss_scaling
    return GradScaler(device.type) if is_on else None


def is_in_use(scaler: GradScaler | None) -> bool:
    """A disabled scaler has no state and does nothing: it counts as none."""
    return scaler is not None and scaler.is_enabled()


class LossScaling:
    """One step's use of ``scaler``; with None, or a disabled one, nothing is scaled and no update skipped."""

    def __init__(self, scaler: GradScaler | None) -> None:
        self._scaler = scaler if is_in_use(scaler) else None
        self.scale: float | None = None
        """The one this step's loss was multiplied by, once `unscale` has read it."""
        self.is_skipped = False
        """Whether the update is left out, on all ranks alike."""

    @property
    def is_overflow(self) -> bool:
        """Whether the update was left out for a reason that a smaller scale may mend: the step may stand."""
        return self.is_skipped and self.scale is not None and self.scale > _LEAST_SCALE

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """``loss`` times the scale."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def unscale(self, gradients: Gradients) -> None:
        """Divide every gradient by the scale, in place."""
        if self._scaler is None:
            return
        self.scale = self._scaler.get_scale()
        if self.scale != 1.0:
            inverse = 1.0 / self.scale if self.scale else math.inf
            for gradient in (*gradients.sharded, *gradients.replicated):
                gradient.mul_(inverse)

    def judge(self, norm: torch.Tensor, optimizer: Optimizer) -> torch.Tensor:
        """Take in the norm of all gradients, equal on every rank; the scale follows it. Returns the norm to record:
        infinite, never NaN, where the update is skipped."""
        if self._scaler is None:
            return norm
        self.is_skipped = not math.isfinite(float(norm))
        found = torch.tensor(float(self.is_skipped), device=norm.device)
        # What GradScaler.unscale_ would have noted; it looks at an optimizer's own gradients, of this rank alone.
        self._scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {norm.device: found}
        self._scaler.update()
        return torch.full_like(norm, math.inf) if self.is_skipped else norm

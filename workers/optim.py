"""AdamW and its learning rate: linear warm-up, then cosine decay, as a pure function of the step.

Restoring optimizer state is `resume`'s work; no dummy step is ever taken here to make state exist.
"""

from __future__ import annotations

import logging
import math

from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from workers.config import OptimConfig
from workers.names import named_parameters

__all__ = ["build_optimizer", "build_scheduler", "lr_factor_at", "warn_of_new_length"]

_log = logging.getLogger(__name__)


def lr_factor_at(step: int, config: OptimConfig, total_steps: int) -> float:
    """Share of the peak LR with which optimizer step ``step`` (counted from 1) is taken."""
    if step <= config.warmup_steps:
        return step / config.warmup_steps
    span = max(1, total_steps - config.warmup_steps)
    done = min(1.0, (step - config.warmup_steps) / span)
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * 0.5 * (1.0 + math.cos(math.pi * done))


def build_optimizer(model: nn.Module, config: OptimConfig) -> AdamW:
    """AdamW over every parameter, frozen ones included; matrices decay, vectors and scalars (norms, biases) do not.

    foreach, not fused: fused AdamW differs by an ulp across shardings on the CPU. The peak LR stays in each group as
    ``initial_lr``, so a scheduler never takes a decayed LR for the peak.
    """
    decay: list[tuple[str, nn.Parameter]] = []
    no_decay: list[tuple[str, nn.Parameter]] = []
    for name, parameter in named_parameters(model):
        (decay if parameter.ndim >= 2 else no_decay).append((name, parameter))
    groups = [
        {"params": params, "weight_decay": weight_decay}
        for params, weight_decay in ((decay, config.weight_decay), (no_decay, 0.0))
        if params
    ]
    return AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, foreach=True, fused=False)


def build_scheduler(optimizer: Optimizer, config: OptimConfig, total_steps: int) -> LambdaLR:
    """Call its ``step()`` after each ``optimizer.step()``. Its ``last_epoch`` counts finished optimizer steps."""
    return LambdaLR(optimizer, lambda finished: lr_factor_at(finished + 1, config, total_steps))


def warn_of_new_length(
    saved_steps: int | None, config: OptimConfig, total_steps: int, *, step: int, rank: int
) -> tuple[int, int] | None:
    """Say once, at a resume from ``step``, that the schedule is not as long as it was; both lengths, None if it is."""
    if saved_steps is None or saved_steps == total_steps or config.min_lr_ratio == 1.0:
        return None
    if rank == 0:
        before, now = (config.lr * lr_factor_at(step + 1, config, steps) for steps in (saved_steps, total_steps))
        _log.warning(
            "run.steps was %d when step %d was saved and is %d now: the learning rate follows a schedule of that "
            "length at once, and is %.3g at step %d (%.3g by the old one); with run.steps as it was the schedule "
            "stays, and `raysume stop` ends a run earlier",
            saved_steps,
            step,
            total_steps,
            now,
            step + 1,
            before,
        )
    return saved_steps, total_steps

"""Gradients of parameters without dimensions, which FSDP2 leaves to us: summed in leaf order, in fp64, rounded once.

They are few and tiny, so every rank gets those of all leaves and adds them up in the same order. Only reproducible
training needs this; else they are summed as they come.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from workers.exact_fold import fold

__all__ = ["ScalarGradients"]


class ScalarGradients:
    """`take` after each leaf's backward, `reduce` once a step on every rank."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        # Those without elements have nothing to sum.
        self._parameters = tuple(parameter for parameter in parameters if parameter.numel())
        self._rounds: list[torch.Tensor] = []

    def take(self) -> None:
        """Keep what this leaf has added, and begin the next leaf from nothing."""
        if not self._parameters:
            return
        gradients = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in self._parameters
        ]
        self._rounds.append(torch.stack([gradient.detach().double() for gradient in gradients]))
        for parameter in self._parameters:
            parameter.grad = None

    def reduce(self, num_leaves: int) -> list[torch.Tensor]:
        """Each parameter's gradient over the step's leaves. Collective."""
        if not self._parameters:
            return []
        own, self._rounds = torch.stack(self._rounds), []
        by_rank = [own]
        if dist.is_initialized():
            by_rank = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(by_rank, own)
        total = torch.zeros_like(own[0])
        fold(total, torch.stack(by_rank, dim=1).flatten(0, 1)[:num_leaves].unbind())
        for parameter, gradient in zip(self._parameters, total, strict=True):
            parameter.grad = gradient.to(parameter.dtype, copy=True) if parameter.requires_grad else None
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

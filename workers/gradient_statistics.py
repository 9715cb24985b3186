"""How much the elements of a gradient spread: what each rank adds to the step vector, and the variance of the sums.

Nothing here waits for the device or talks to another rank. The sum of squares is not taken again: the gradient's norm,
which clipping needs, is its root.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

__all__ = ["GradientSum", "element_variance", "sum_elements"]

_PIECE = 1 << 22  # elements turned into fp64 at a time, so that a large gradient needs no second copy of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSum:
    """``total``: of ``count`` elements, fp64 and still on the device."""

    total: torch.Tensor
    count: int


def sum_elements(gradients: Iterable[torch.Tensor], device: torch.device) -> GradientSum:
    """The sum over all elements of ``gradients``, in fp64: neither many of them nor large ones overflow."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    count = 0
    with torch.no_grad():
        for gradient in gradients:
            count += gradient.numel()
            for piece in _pieces(gradient):
                total += piece.sum(dtype=torch.float64)
    return GradientSum(total=total, count=count)


def element_variance(*, total: float, count: int, norm: float) -> float | None:
    """mean(g^2) - mean(g)^2 of ``count`` elements with that sum and L2 norm; None where there is no finite one."""
    if count == 0 or not (math.isfinite(total) and math.isfinite(norm)):
        return None
    return max(0.0, norm * norm / count - (total / count) ** 2)


def _pieces(gradient: torch.Tensor) -> Iterator[torch.Tensor]:
    flat = gradient.reshape(-1)
    for start in range(0, len(flat), _PIECE):
        yield flat[start : start + _PIECE]

"""The L2 norm of all gradients with the same bits however they are cut, in whatever order anything is added.

A rounded sum depends on its order, so none is rounded here: every square is first rounded to a multiple of a unit that
the largest of all elements fixes, so coarse that the sum of all of them is exact in fp64. What that leaves of each
square goes into further sums with ever finer units. Ranks sum a few numbers; nothing is gathered.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

__all__ = ["exact_norm"]

# Elements turned into fp64 at a time: on a CPU they stay in the cache, on a device its calls cost more than their work.
_PIECE_ON_CPU = 1 << 16
_PIECE_ON_DEVICE = 1 << 22
_DIGITS = 53  # of fp64
_AT_LEAST = 2  # sums
_KEPT = -20  # all that is left out together is below 2 ** _KEPT of the largest square, at the very worst


def exact_norm(own: Iterable[torch.Tensor], *, count: int, device: torch.device) -> torch.Tensor:
    """The norm over all ranks, fp64. Collective.

    ``own``: the tensors that this rank answers for, of fp32 or less; every element is some one rank's. ``count``: at
    least as many as there are elements on all ranks, and equal on all.
    """
    tensors = [tensor for tensor in own if tensor.numel()]
    exponent = _exponent(tensors, device)
    bits = max(1, count - 1).bit_length()
    units = [_two_to(power) for power in _powers(exponent, bits)]
    sums = torch.zeros(len(units), dtype=torch.float64, device=device)
    for piece in _pieces(tensors):
        rest = piece.double().square_()
        for index, unit in enumerate(units):
            # Adding and taking away a number of 1.5 * 2 ** 52 units rounds to whole units.
            anchor = unit * (1.5 * 2.0 ** (_DIGITS - 1))
            rounded = (rest + anchor).sub_(anchor)
            sums[index] += rounded.sum()
            rest.sub_(rounded)
    if dist.is_initialized():
        dist.all_reduce(sums)
    total = sums[-1]
    for index in range(len(units) - 2, -1, -1):
        total = total + sums[index]
    return total.sqrt()


def _exponent(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """e with every square below 2 ** e. Elements that are not finite show in the sums, whatever comes of this."""
    largest = torch.zeros((), dtype=torch.float64, device=device)
    for tensor in tensors:
        low, high = tensor.aminmax()
        largest = torch.maximum(largest, torch.maximum(-low, high).double())
    largest.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    if dist.is_initialized():
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return 2 * torch.frexp(largest).exponent.long()


def _two_to(power: torch.Tensor) -> torch.Tensor:
    """2 ** power, from its bits: exact on any device."""
    return ((power + 1023) << 52).view(torch.float64)


def _powers(exponent: torch.Tensor, bits: int) -> Iterator[torch.Tensor]:
    """Powers of two, coarse to fine: 2 ** bits numbers of up to 2 ** 52 / 2 ** bits units add up exactly."""
    reach, left_out = exponent, bits
    for number in itertools.count(1):
        power = reach + (bits - (_DIGITS - 2))
        yield power
        reach = power - 1  # what is left of a square is half a unit at most
        left_out += bits - (_DIGITS - 2) - 1
        if number >= _AT_LEAST and left_out <= _KEPT:
            return


def _pieces(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    for tensor in tensors:
        flat = tensor.reshape(-1)
        size = _PIECE_ON_CPU if tensor.is_cpu else _PIECE_ON_DEVICE
        for start in range(0, len(flat), size):
            yield flat[start : start + size]

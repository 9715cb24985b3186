"""Rounds optimizer moments to fewer mantissa bits within a bound that is verified on the very values to be stored.

Only low mantissa bits of fp32 become zero: sign and exponent stay, so nothing turns into zero or infinity and readers
need to know nothing of it. The error is that of the next update, exp_avg / (sqrt(exp_avg_sq) + eps): relative, L2, for
each block of a tensor, the worse of eps near 0 and eps 1e-8. What cannot keep the bound is not rounded at all.

Why not fp16: its exponent ends at 6e-8, where second moments begin. They become zero, and the next update explodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, sqrt
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["MANTISSA_BITS", "Rounding", "Words", "choose_rounding", "round_mantissa", "update_error"]

Words = NDArray[np.uint32]
Floats = NDArray[np.float64]

MANTISSA_BITS: Final = 23
_FEWEST_BITS: Final = 3
_MOST_BITS: Final = 16
_TRIES: Final = 3
_BLOCK: Final = 1 << 15  # numbers compared at a time: fits into a core's own cache
_EPS: Final = (0.0, 1e-8)
_TYPICAL: Final = 0.204  # RMS relative error of rounding to p mantissa bits is about this times 2**-p
_EXPONENT: Final = np.uint32(0x7F800000)
_MAGNITUDE: Final = np.uint32(0x7FFFFFFF)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """Mantissa bits kept of each moment, None: all. ``error``: the verified error of the next update."""

    exp_avg_bits: int | None
    exp_avg_sq_bits: int | None
    error: float


def round_mantissa(numbers: Words, bits: int) -> Words:
    """fp32 words rounded to the nearest with ``bits`` mantissa bits, ties to even.

    Subnormal numbers, which have fewer bits to give, and what would overflow stay as they are.
    """
    drop = MANTISSA_BITS - bits
    half = np.uint32((1 << (drop - 1)) - 1)
    rounded = numbers + half
    rounded += (numbers >> np.uint32(drop)) & np.uint32(1)
    rounded &= np.uint32(0xFFFFFFFF << drop & 0xFFFFFFFF)
    exact = (numbers & _EXPONENT) == 0
    exact |= (rounded & _EXPONENT) == _EXPONENT
    np.copyto(rounded, numbers, where=exact)
    return rounded


def choose_rounding(
    exp_avg: Words, exp_avg_sq: Words, *, bound: float, round_exp_avg: bool = True, round_exp_avg_sq: bool = True
) -> Rounding | None:
    """The fewest bits that keep ``bound`` for this block of a parameter; None when none of those tried does.

    A moment that may not be rounded counts as exact. NaN, infinity or a negative second moment never keep a bound.
    """
    for first, second in _candidates(bound, round_exp_avg, round_exp_avg_sq):
        error = update_error(exp_avg, exp_avg_sq, first, second)
        if error <= bound:
            return Rounding(exp_avg_bits=first, exp_avg_sq_bits=second, error=error)
    return None


def update_error(exp_avg: Words, exp_avg_sq: Words, first: int | None, second: int | None) -> float:
    """Relative L2 error of the next update once both moments are rounded; infinite where a value lost its kind."""
    wrong, whole = np.zeros(len(_EPS)), np.zeros(len(_EPS))
    for start in range(0, exp_avg.size, _BLOCK):
        m, v = exp_avg[start : start + _BLOCK], exp_avg_sq[start : start + _BLOCK]
        rounded_m = m if first is None else round_mantissa(m, first)
        rounded_v = v if second is None else round_mantissa(v, second)
        if not (_keeps_kind(m, rounded_m) and _keeps_kind(v, rounded_v)):
            return inf
        for number, (exact, stored) in enumerate(_updates(m, v, rounded_m, rounded_v)):
            stored -= exact
            wrong[number] += np.square(stored, out=stored).sum()
            whole[number] += np.square(exact, out=exact).sum()
    if not (np.isfinite(wrong).all() and np.isfinite(whole).all()):
        return inf
    return max(sqrt(a / b) if b else (inf if a else 0.0) for a, b in zip(wrong, whole, strict=True))


def _updates(m: Words, v: Words, rounded_m: Words, rounded_v: Words) -> Iterator[tuple[Floats, Floats]]:
    """The exact and the stored update for each eps. Where the second moment is 0 only a real eps makes sense."""
    with np.errstate(all="ignore"):  # what is not finite shows in the sums
        roots = np.sqrt(_values(v)), np.sqrt(_values(rounded_v))
        moments = _values(m), _values(rounded_m)
        for eps in _EPS:
            divisors = [root + eps if eps else np.where(root == 0, np.inf, root) for root in roots]
            yield moments[0] / divisors[0], moments[1] / divisors[1]


def _values(words: Words) -> Floats:
    return words.view(np.float32).astype(np.float64)


def _keeps_kind(words: Words, rounded: Words) -> bool:
    """Signs are the same, what was not zero is not zero, and all are finite."""
    if ((words & _EXPONENT) == _EXPONENT).any() or ((rounded & _EXPONENT) == _EXPONENT).any():
        return False
    if ((words ^ rounded) > _MAGNITUDE).any():
        return False
    return bool(np.array_equal((words & _MAGNITUDE) == 0, (rounded & _MAGNITUDE) == 0))


def _candidates(bound: float, round_first: bool, round_second: bool) -> list[tuple[int | None, int | None]]:
    """Pairs of widths from the cheapest that may do, by what rounding typically costs."""
    pairs: list[tuple[int | None, int | None]]
    widths = range(_FEWEST_BITS, _MOST_BITS + 1)
    if round_first and round_second:
        # The square root halves a relative error of exp_avg_sq: it needs one or two bits less.
        pairs = [(bits + 2, bits + odd) for bits in widths for odd in (0, 1)]
    elif round_first:
        pairs = [(bits, None) for bits in widths]
    elif round_second:
        pairs = [(None, bits) for bits in widths]
    else:
        return []
    likely = [pair for pair in pairs if _typical_error(*pair) <= bound]
    return likely[:_TRIES]


def _typical_error(first: int | None, second: int | None) -> float:
    a = 0.0 if first is None else 2.0**-first
    b = 0.0 if second is None else 2.0 ** -(second + 1)
    return _TYPICAL * sqrt(a * a + b * b)

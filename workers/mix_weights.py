"""The weights of a mix as the smallest whole numbers of the same ratio. Pure; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm
from typing import Final

__all__ = ["MAX_CYCLE", "whole_weights"]

MAX_CYCLE: Final = 4096
"""Places after which the pattern of sources has to come again."""


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """0.7 and 0.3 become 7 and 3. Raises ValueError where that takes numbers too large for a pattern."""
    # By its text: what was written as 0.1 is one tenth, not the nearest binary fraction.
    exact = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    smallest = tuple(weight // gcd(*whole) for weight in whole)
    if sum(smallest) > MAX_CYCLE:
        raise ValueError(
            f"the weights {list(weights)} are {list(smallest)} in whole numbers, a pattern of {sum(smallest)} samples; "
            f"expected at most {MAX_CYCLE}: use rounder weights"
        )
    return smallest

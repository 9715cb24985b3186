"""Permutations of ``[0, n)`` that a label alone decides, computed place by place: no state, no memory.

A Feistel network (Luby and Rackoff, "How to construct pseudorandom permutations from pseudorandom functions", 1988)
over the next even power of two, restricted to ``[0, n)`` by cycle walking (Black and Rogaway, "Ciphers with arbitrary
finite domains", 2002). Its round function is the SplitMix64 finaliser (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", 2014). It is its own definition: no library's random stream, which a new release may
change, has a part in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

__all__ = ["Ids", "permuted", "place_in"]

Ids = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_ROUNDS: Final = 8
_MIN_HALF_BITS: Final = 3
_TABLE_HALF_BITS: Final = 5


def permuted(label: str, size: int, places: Ids) -> Ids:
    """Where the permutation of this label sends each of ``places``, all within ``[0, size)``."""
    step = _step_of(label, _half_bits(size))
    words = step(places.astype(np.uint64))
    # Walking along the cycle of a place inside [0, n) must come back inside, at the latest at that place itself.
    outside = np.flatnonzero(words >= size)
    while outside.size:
        walked = step(words[outside])
        words[outside] = walked
        outside = outside[walked >= size]
    return words.astype(np.int64)


def place_in(label: str, size: int, value: int) -> int:
    """The place that `permuted` sends to ``value``."""
    half_bits, keys = _half_bits(size), _round_keys(label)
    word = _back(value, half_bits, keys)
    while word >= size:
        word = _back(word, half_bits, keys)
    return word


def _step_of(label: str, half_bits: int) -> Callable[[_Words], _Words]:
    """The network itself; a small one, which is walked for long, as a table."""
    if half_bits <= _TABLE_HALF_BITS:
        return _table(label, half_bits).__getitem__
    return partial(_feistel, half_bits=half_bits, keys=_round_keys(label))


@lru_cache(maxsize=64)
def _table(label: str, half_bits: int) -> _Words:
    return _feistel(np.arange(1 << 2 * half_bits, dtype=np.uint64), half_bits, _round_keys(label))


def _half_bits(size: int) -> int:
    return max(_MIN_HALF_BITS, ((size - 1).bit_length() + 1) // 2)


def _round_keys(label: str) -> list[np.uint64]:
    return [np.uint64(xxhash.xxh3_64_intdigest(f"{label}:{number}".encode())) for number in range(_ROUNDS)]


def _feistel(words: _Words, half_bits: int, keys: Sequence[np.uint64]) -> _Words:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = words >> shift, words & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right


def _back(value: int, half_bits: int, keys: Sequence[np.uint64]) -> int:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    word = np.array([value], dtype=np.uint64)
    left, right = word >> shift, word & mask
    for key in reversed(keys):
        left, right = right ^ (_mix(left ^ key) & mask), left
    return int(((left << shift) | right)[0])


def _mix(words: _Words) -> _Words:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))

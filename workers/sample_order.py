"""The order of samples, fixed by the seed alone, and the digests that prove it: no world size, no state, no memory.

Global position ``p`` is place ``p % num_rows`` of epoch ``p // num_rows``; each epoch has its own permutation.

The permutation is a Feistel network (Luby and Rackoff, "How to construct pseudorandom permutations from pseudorandom
functions", 1988) over the next even power of two, restricted to ``[0, n)`` by cycle walking (Black and Rogaway,
"Ciphers with arbitrary finite domains", 2002). Its round function is the SplitMix64 finaliser (Steele, Lea and Flood,
"Fast splittable pseudorandom number generators", 2014). It is its own definition: no library's random stream, which a
new release may change, has a part in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

__all__ = ["SampleOrder", "SourceRows", "chain", "leaf_digest", "permute", "sample_ids"]

Ids = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_ROUNDS: Final = 8
_MIN_HALF_BITS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRows:
    """The training rows of one source, and its share of the mix: ``weight`` of the sum of all weights."""

    name: str
    num_rows: int
    weight: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOrder:
    """Which row comes at which place of the stream. Row ids count through the sources in their order."""

    seed: int
    sources: tuple[SourceRows, ...]

    @property
    def num_rows(self) -> int:
        return sum(source.num_rows for source in self.sources)

    def ids(self, place: int, count: int) -> Ids:
        """Row ids at places ``[place, place + count)``, int64 of shape [count]."""
        return sample_ids(self.seed, self.num_rows, place, count)


def sample_ids(seed: int, num_rows: int, position_start: int, count: int) -> Ids:
    """Row ids at global positions ``[position_start, position_start + count)``; the span may straddle epochs."""
    if num_rows < 1:
        raise ValueError(f"a stream over {num_rows} rows has no order; expected at least one row")
    ids = np.empty(count, dtype=np.int64)
    done = 0
    while done < count:
        epoch, place = divmod(position_start + done, num_rows)
        length = min(count - done, num_rows - place)
        ids[done : done + length] = permute(seed, epoch, num_rows, np.arange(place, place + length, dtype=np.int64))
        done += length
    return ids


def permute(seed: int, epoch: int, num_rows: int, places: Ids) -> Ids:
    """Where the permutation of ``epoch`` sends each of ``places``, all within ``[0, num_rows)``."""
    half_bits = max(_MIN_HALF_BITS, ((num_rows - 1).bit_length() + 1) // 2)
    keys = [_round_key(seed, epoch, number) for number in range(_ROUNDS)]
    words = _feistel(places.astype(np.uint64), half_bits, keys)
    # Walking along the cycle of a place inside [0, n) must come back inside, at the latest at that place itself.
    outside = np.flatnonzero(words >= num_rows)
    while outside.size:
        walked = _feistel(words[outside], half_bits, keys)
        words[outside] = walked
        outside = outside[walked >= num_rows]
    return words.astype(np.int64)


def _round_key(seed: int, epoch: int, number: int) -> np.uint64:
    return np.uint64(xxhash.xxh3_64_intdigest(f"sample order 1:{seed}:{epoch}:{number}".encode()))


def _feistel(words: _Words, half_bits: int, keys: Sequence[np.uint64]) -> _Words:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = words >> shift, words & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right


def _mix(words: _Words) -> _Words:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def leaf_digest(ids: Ids) -> int:
    """48-bit digest of one leaf's row ids in order: small enough that a float64 all-reduce carries it exactly."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(ids, dtype="<i8").tobytes()) >> 16


def chain(previous: str, leaf_digests: Sequence[int]) -> str:
    """The sample chain after one more step: xxh3_128 over the chain so far and the step's digests in leaf order."""
    words = np.asarray(leaf_digests, dtype="<u8")
    return xxhash.xxh3_128_hexdigest(bytes.fromhex(previous) + words.tobytes())

"""The order of samples, fixed by the seed alone, and the digests that prove it: no world size, no state, no memory.

A place counts the samples of the stream. Each source has epochs of its own, each with a permutation of its own, and
every row of a source comes once in each of them. Sources are mixed in cycles: in every cycle each has exactly as many
places as its weight, in a pattern that the seed decides. Reading rows is `dataset`'s work.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final, Literal, Self, cast

import numpy as np
import xxhash
from pydantic import BaseModel, ConfigDict, Field, JsonValue

from workers.mix_weights import whole_weights
from workers.permutation import Ids, permuted, place_in

__all__ = [
    "SampleOrder",
    "Shuffle",
    "SourceRows",
    "chain",
    "leaf_digest",
    "permute",
    "sample_ids",
]

Shuffle = Literal["rows", "blocks"]

_FIELDS_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRows:
    """The training rows of one source, and its share of the mix: ``weight`` of the sum of all weights.

    ``block_rows``: rows that are stored and fetched together; only the shuffle "blocks" looks at it.
    """

    name: str
    num_rows: int
    weight: int = 1
    block_rows: int = 1


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """Which row comes at which place of the stream. Row ids count through the sources in their order.

    Shuffle "rows" permutes all rows of a source. "blocks" permutes its blocks, and then the rows within each window of
    ``window_blocks`` blocks: who reads places one after the other needs each block once an epoch, and one window at a
    time.
    """

    seed: int
    sources: tuple[SourceRows, ...]
    shuffle: Shuffle = "rows"
    window_blocks: int = 1

    def __post_init__(self) -> None:
        if not self.sources or any(source.num_rows < 1 for source in self.sources):
            empty = [source.name for source in self.sources if source.num_rows < 1]
            raise ValueError(f"a stream over no rows has no order; expected a row in each source, none in {empty}")
        if self.window_blocks < 1 or any(source.block_rows < 1 or source.weight < 1 for source in self.sources):
            raise ValueError(f"weights, block_rows and window_blocks are at least 1: {self}")
        whole_weights([source.weight for source in self.sources])

    @property
    def num_rows(self) -> int:
        """Rows of all sources together; so many places are one epoch of the whole stream."""
        return sum(source.num_rows for source in self.sources)

    @cached_property
    def weights(self) -> tuple[int, ...]:
        """The weights in their smallest whole numbers: places of each source in a cycle."""
        return whole_weights([source.weight for source in self.sources])

    @property
    def cycle(self) -> int:
        """Places after which the pattern of sources comes again."""
        return sum(self.weights)

    def ids(self, place: int, count: int) -> Ids:
        """Row ids at places ``[place, place + count)``, int64 of shape [count]."""
        result = np.empty(count, dtype=np.int64)
        for where, number, first, length in self._runs(place, count):
            result[where] = self._of_source(number, first, length) + self.first_id(number)
        return result

    def epochs(self, place: int, count: int) -> Ids:
        """At each place the epoch of the source whose row comes there, counted from 0."""
        result = np.empty(count, dtype=np.int64)
        for where, number, first, length in self._runs(place, count):
            result[where] = np.arange(first, first + length) // self.sources[number].num_rows
        return result

    def taken(self, place: int) -> tuple[int, ...]:
        """How many rows of each source come before ``place``, over all its epochs."""
        cycles, slot = divmod(place, self.cycle)
        before = np.bincount(_pattern(self.seed, self.weights)[:slot], minlength=len(self.sources))
        return tuple(cycles * weight + int(more) for weight, more in zip(self.weights, before, strict=True))

    def first_id(self, number: int) -> int:
        """The id of the first row of source ``number``."""
        return sum(source.num_rows for source in self.sources[:number])

    def as_fields(self) -> dict[str, JsonValue]:
        """All of it as plain values, for the record."""
        return cast(dict[str, JsonValue], _Fields.of(self).model_dump())

    @classmethod
    def from_fields(cls, fields: Mapping[str, JsonValue]) -> Self:
        """What `as_fields` gave. Raises ValueError when these are not such fields."""
        found = _Fields.model_validate(dict(fields))
        return cls(
            seed=found.seed,
            shuffle=found.shuffle,
            window_blocks=found.window_blocks,
            sources=tuple(SourceRows(**source.model_dump()) for source in found.sources),
        )

    def _runs(self, place: int, count: int) -> Iterator[tuple[Ids, int, int, int]]:
        """For each source met: where its rows go in the result, its number, its first index and how many."""
        slots = np.arange(place, place + count, dtype=np.int64) % self.cycle
        numbers = _pattern(self.seed, self.weights)[slots]
        for number, first in enumerate(self.taken(place)):
            where = np.flatnonzero(numbers == number)
            if where.size:
                yield where, number, first, int(where.size)

    def _of_source(self, number: int, first: int, count: int) -> Ids:
        """Rows of one source at its own indices ``[first, first + count)``; the span may straddle epochs."""
        source = self.sources[number]
        # One source alone keeps the order it always had; several of one size are not to be permuted alike.
        seed = str(self.seed) if len(self.sources) == 1 else f"{self.seed}/{number}"
        ids = np.empty(count, dtype=np.int64)
        done = 0
        while done < count:
            epoch, start = divmod(first + done, source.num_rows)
            length = min(count - done, source.num_rows - start)
            places = np.arange(start, start + length, dtype=np.int64)
            if self.shuffle == "rows":
                ids[done : done + length] = permute(seed, epoch, source.num_rows, places)
            else:
                blocks = _BlockOrder(f"{seed}:{epoch}", source.num_rows, source.block_rows, self.window_blocks)
                ids[done : done + length] = blocks.rows(places)
            done += length
        return ids


class _BlockOrder:
    """One epoch of one source, shuffled by blocks. All blocks are full but the last, which may come anywhere."""

    def __init__(self, label: str, num_rows: int, block_rows: int, window_blocks: int) -> None:
        self._label, self._block_rows, self._window_blocks = label, block_rows, window_blocks
        self._num_blocks = -(-num_rows // block_rows)
        self._window_rows = block_rows * window_blocks
        self._lacking = self._num_blocks * block_rows - num_rows
        self._short_at = place_in(f"block order 1:{label}", self._num_blocks, self._num_blocks - 1)

    def rows(self, places: Ids) -> Ids:
        """The rows at these places of the epoch."""
        short_window = self._short_at // self._window_blocks
        # Places behind the short window come earlier by the rows that it lacks.
        is_behind = places >= (short_window + 1) * self._window_rows - self._lacking
        full_places = places + np.where(is_behind, self._lacking, 0)
        windows, within = np.divmod(full_places, self._window_rows)
        result = np.empty_like(places)
        for window in np.unique(windows).tolist():
            chosen = windows == window
            result[chosen] = self._in_window(window, within[chosen], self._lacking if window == short_window else 0)
        return result

    def _in_window(self, window: int, places: Ids, lacking: int) -> Ids:
        first_block = window * self._window_blocks
        num_blocks = min(self._window_blocks, self._num_blocks - first_block)
        size = num_blocks * self._block_rows - lacking
        rows = permuted(f"rows of a window 1:{self._label}:{window}", size, places)
        if lacking:
            end_of_short = (self._short_at - first_block + 1) * self._block_rows - lacking
            rows = rows + np.where(rows >= end_of_short, lacking, 0)
        blocks, row = np.divmod(rows, self._block_rows)
        return permuted(f"block order 1:{self._label}", self._num_blocks, first_block + blocks) * self._block_rows + row


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _SourceFields(_Record):
    name: str
    num_rows: int = Field(ge=1)
    weight: int = Field(ge=1)
    block_rows: int = Field(ge=1)


class _Fields(_Record):
    version: Literal[1] = _FIELDS_VERSION
    seed: int
    shuffle: Shuffle
    window_blocks: int = Field(ge=1)
    sources: list[_SourceFields] = Field(min_length=1)

    @classmethod
    def of(cls, order: SampleOrder) -> Self:
        return cls(
            seed=order.seed,
            shuffle=order.shuffle,
            window_blocks=order.window_blocks,
            sources=[
                _SourceFields(name=source.name, num_rows=source.num_rows, weight=weight, block_rows=source.block_rows)
                for source, weight in zip(order.sources, order.weights, strict=True)
            ],
        )


@lru_cache(maxsize=16)
def _pattern(seed: int, weights: tuple[int, ...]) -> Ids:
    """The source at each place of a cycle."""
    sorted_places = np.repeat(np.arange(len(weights), dtype=np.int64), weights)
    return sorted_places[permuted(f"mix 1:{seed}", len(sorted_places), np.arange(len(sorted_places), dtype=np.int64))]


def sample_ids(seed: int, num_rows: int, position_start: int, count: int) -> Ids:
    """Row ids at places ``[position_start, position_start + count)`` of a stream over one source, shuffled by rows."""
    source = SourceRows(name="", num_rows=num_rows)
    return SampleOrder(seed=seed, sources=(source,)).ids(position_start, count)


def permute(seed: int | str, epoch: int, num_rows: int, places: Ids) -> Ids:
    """Where the permutation of ``epoch`` sends each of ``places``, all within ``[0, num_rows)``."""
    return permuted(f"sample order 1:{seed}:{epoch}", num_rows, places)


def leaf_digest(ids: Ids) -> int:
    """48-bit digest of one leaf's row ids in order: small enough that a float64 all-reduce carries it exactly."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(ids, dtype="<i8").tobytes()) >> 16


def chain(previous: str, leaf_digests: Sequence[int]) -> str:
    """The sample chain after one more step: xxh3_128 over the chain so far and the step's digests in leaf order."""
    words = np.asarray(leaf_digests, dtype="<u8")
    return xxhash.xxh3_128_hexdigest(bytes.fromhex(previous) + words.tobytes())

"""Counts rows by source and epoch in bitmaps, so that a row that comes twice in an epoch, or not at all, is seen.

Memory: one bit a row of the dataset for the newest epochs of each source, which are two, or as many as are fed at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from workers.sample_order import SampleOrder

__all__ = ["RowCounts", "SourceEpochs"]

Ids = npt.NDArray[np.int64]

_LIVE: Final = 2  # epochs of a source whose rows are still being counted, besides those that are fed at once


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceEpochs:
    """Of one source: how many epochs are whole, each row once, and of the others how many rows there were in which."""

    name: str
    num_rows: int
    whole: int
    partial: dict[int, int]


@dataclass(slots=True)
class _Source:
    num_rows: int
    max_live: int
    live: dict[int, npt.NDArray[np.uint8]] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)
    whole: int = 0
    newest: int = -1

    def add(self, epoch: int, rows: Ids) -> int:
        """How many of ``rows`` had come before."""
        bits = self.live.get(epoch)
        if bits is None:
            if epoch < self.newest:
                return 0  # long closed: going back so far is found by the places
            bits = self.live[epoch] = np.zeros(-(-self.num_rows // 8), dtype=np.uint8)
            self.newest = epoch
            while len(self.live) > self.max_live:
                self.close(min(self.live))
        fresh = np.unique(rows)
        index, bit = fresh >> 3, np.left_shift(1, fresh & 7).astype(np.uint8)
        num_known = int(np.count_nonzero(bits[index] & bit))
        np.bitwise_or.at(bits, index, bit)
        self.seen[epoch] = self.seen.get(epoch, 0) + fresh.size - num_known
        return int(rows.size - fresh.size + num_known)

    def close(self, epoch: int) -> None:
        del self.live[epoch]
        if self.seen[epoch] == self.num_rows:
            self.whole += 1
            del self.seen[epoch]


class RowCounts:
    """Of one order. Feed it whatever was trained on or left out, at most ``at_once``, about in the order of places."""

    def __init__(self, order: SampleOrder, at_once: int) -> None:
        self._order = order
        self._firsts = np.array([order.first_id(number) for number in range(len(order.sources))])
        self._sources = [_Source(one.num_rows, _LIVE + at_once // one.num_rows) for one in order.sources]

    def add(self, ids: Ids, epochs: Ids) -> int:
        """How many of these rows had come before in their epoch."""
        num_repeated = 0
        numbers = np.searchsorted(self._firsts, ids, side="right") - 1
        for number, source in enumerate(self._sources):
            is_here = numbers == number
            rows, their = ids[is_here] - self._firsts[number], epochs[is_here]
            by_epoch = np.argsort(their, kind="stable")
            rows, their = rows[by_epoch], their[by_epoch]
            borders = np.flatnonzero(np.diff(their)) + 1
            for some in np.split(np.arange(rows.size), borders):
                if some.size:
                    num_repeated += source.add(int(their[some[0]]), rows[some])
        return num_repeated

    def result(self) -> tuple[SourceEpochs, ...]:
        for source in self._sources:
            for epoch in sorted(source.live):
                source.close(epoch)
        return tuple(
            SourceEpochs(
                name=told.name, num_rows=told.num_rows, whole=found.whole, partial=dict(sorted(found.seen.items()))
            )
            for told, found in zip(self._order.sources, self._sources, strict=True)
        )

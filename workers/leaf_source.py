"""What a stream asks for and what comes of it: requests for leaves, one after the other, and the leaf that each names.

A request holds a position, not rows: the order of samples says which these are. Who fetches is `stream`'s business.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from storage.errors import StorageError
from workers.config import DataConfig
from workers.data_errors import DataError
from workers.dataset_mix import TokenRows
from workers.sample_order import SampleOrder
from workers.skipped_windows import Windows, spans

__all__ = ["Failed", "Fetched", "LeafSource", "Request", "Requests", "leaves_per_rank"]

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Request:
    """What it takes to make one leaf: the position of its first sample, and the leaf's name for the training side."""

    step: int
    index: int
    is_surplus: bool
    position: int


@dataclass(frozen=True, slots=True)
class Fetched:
    """The tokens of one leaf."""

    request: Request
    tokens: Ids
    sample_ids: Ids


@dataclass(frozen=True, slots=True)
class Failed:
    """An error as a value: the loader would rebuild a raised one from its text alone and lose type and fields."""

    error: DataError | StorageError


def leaves_per_rank(num_leaves: int, world_size: int) -> int:
    """How many leaves each rank runs per step, surplus ones included."""
    return -(-num_leaves // world_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """This rank's leaves of every step from ``step`` on, there from its ``first_round`` on; without end."""

    config: DataConfig
    rank: int
    world_size: int
    step: int
    position: int
    first_round: int = 0

    def __iter__(self) -> Iterator[Request]:
        num_leaves, micro_batch = self.config.num_leaves, self.config.micro_batch
        step, position, first_round = self.step, self.position, self.first_round
        while True:
            for number in range(first_round, leaves_per_rank(num_leaves, self.world_size)):
                index = number * self.world_size + self.rank
                is_surplus = index >= num_leaves
                yield Request(step, index, is_surplus, position + (0 if is_surplus else index * micro_batch))
            step, position, first_round = step + 1, position + self.config.global_batch, 0


@dataclass(frozen=True, slots=True)
class LeafSource:
    """A request in, one leaf's tokens out. The map-style dataset of a loader."""

    rows: TokenRows
    order: SampleOrder
    micro_batch: int
    skipped: Windows

    def __getitem__(self, request: Request) -> Fetched | Failed:
        runs = spans(request.position, self.micro_batch, self.skipped)
        ids = np.concatenate([self.order.ids(place, count) for place, count in runs])
        try:
            return Fetched(request, self.rows.rows(ids), ids)
        except (DataError, StorageError) as error:
            return Failed(error)

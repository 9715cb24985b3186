"""Feeds one rank its leaves: the order is fixed by the seed, the position is one global number kept outside the loader.

Leaf ``j`` of optimizer step ``s`` covers the same samples at any world size and any ``num_workers``; which rank runs it
is all that a World decides. Leaves are read ahead, by a thread or by loader processes, but what was read ahead never
counts as consumed: `LeafStream.seek` begins anew at the asked step, and no loader's state is ever saved.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from storage.errors import StoreUnavailable
from workers.config import DataConfig
from workers.data_errors import DataError
from workers.data_patience import DataPatience
from workers.dataset_mix import TokenRows, order_of
from workers.leaf_source import Failed, Fetched, LeafSource, Request, Requests, leaves_per_rank
from workers.loader_processes import LoaderProcesses
from workers.read_ahead import InTurn, ReadAhead
from workers.sample_order import SampleOrder, chain, leaf_digest, sample_ids
from workers.skipped_windows import Windows

__all__ = ["Leaf", "LeafStream", "chain", "leaf_digest", "leaves_per_rank", "sample_ids", "validation_leaves"]

logger = logging.getLogger(__name__)

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Leaf:
    """One micro-batch. A surplus leaf repeats leaf 0's data so that all ranks run equally many: give it no weight.

    ``index`` counts within the step; a surplus leaf's is at or above the number of leaves. ``sample_ids`` are row ids.
    """

    index: int
    is_surplus: bool
    input_ids: Tensor
    labels: Tensor
    sample_ids: Ids


class _Feed(Protocol):
    """Where leaves come from, one after the other."""

    def next(self) -> Fetched | Failed: ...

    def close(self) -> None: ...


class LeafStream:
    """The training leaves of one rank, step by step. Call `seek` first; `close` ends what reads ahead.

    ``skipped``: windows of the stream that are left out; positions do not count them.
    """

    def __init__(
        self,
        dataset: TokenRows,
        data_config: DataConfig,
        seed: int,
        rank: int,
        world_size: int,
        patience: DataPatience | None = None,
        *,
        skipped: Windows = (),
    ) -> None:
        if dataset.sequence_length != data_config.sequence_length:
            raise DataError(
                f"{dataset.url} is packed to sequence_length {dataset.sequence_length}, "
                f"data.sequence_length is {data_config.sequence_length}; set them equal or prepare the data again"
            )
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is outside a world of {world_size}")
        self._config, self._order = data_config, order_of(dataset, data_config, seed)
        self._source = LeafSource(dataset, self._order, data_config.micro_batch, skipped)
        self._rank, self._world_size = rank, world_size
        self._per_step = leaves_per_rank(data_config.num_leaves, world_size)
        self._patience = patience
        self._feed: _Feed | None = None
        self._is_broken = self._is_fresh = False
        self._step, self._consumed, self._position = 0, 0, 0

    @property
    def order(self) -> SampleOrder:
        """Which row comes at which place, left out or not."""
        return self._order

    @property
    def position(self) -> int:
        """The global position of the first sample of the step that is, or comes, next."""
        return self._position

    @property
    def num_leaves(self) -> int:
        """Leaves of one step over all ranks, without surplus."""
        return self._config.num_leaves

    def seek(self, step: int, position: int | None = None) -> None:
        """Begin at ``step`` (counting from 1), whose first sample is at global ``position``.

        ``position`` defaults to ``(step - 1) * global_batch``; it is another one after a Checkpoint of another global
        batch.
        """
        if step < 1:
            raise ValueError(f"steps count from 1; cannot seek to step {step}")
        self._step, self._consumed = step, 0
        self._position = (step - 1) * self._config.global_batch if position is None else position
        self._open()
        logger.info("stream of rank %d begins at step %d, position %d", self._rank, step, self._position)

    def _open(self) -> None:
        """A new feed that begins with the next leaf."""
        self.close()
        requests = Requests(
            config=self._config,
            rank=self._rank,
            world_size=self._world_size,
            step=self._step,
            position=self._position,
            first_round=self._consumed,
        )
        self._feed = self._make_feed(requests)
        self._is_broken, self._is_fresh = False, True

    def _make_feed(self, requests: Requests) -> _Feed:
        num_workers, prefetch = self._config.num_workers, self._config.prefetch
        if num_workers:
            return LoaderProcesses(self._source, requests, num_workers=num_workers, prefetch=prefetch)
        return ReadAhead(self._source, requests, prefetch) if prefetch else InTurn(self._source, requests)

    def leaves(self, step: int) -> Iterator[Leaf]:
        """This rank's leaves of ``step``, in leaf order. Steps come one after the other; `seek` to go elsewhere."""
        if self._feed is None:
            raise RuntimeError(f"rank {self._rank} asked for step {step} of a closed stream; seek({step}) first")
        if (step, 0) != (self._step, self._consumed):
            raise RuntimeError(
                f"rank {self._rank} asked for step {step}, but the stream stands at step {self._step} after "
                f"{self._consumed} of {self._per_step} leaves; seek({step}) first"
            )
        return self._leaves_of_step()

    def _leaves_of_step(self) -> Iterator[Leaf]:
        for consumed in range(1, self._per_step + 1):
            leaf = _as_leaf(self._next() if self._patience is None else self._patience.call(self._next))
            self._consumed = consumed
            if consumed == self._per_step:
                self._step, self._consumed = self._step + 1, 0
                self._position += self._config.global_batch
            yield leaf

    def _next(self) -> Fetched:
        """The next leaf. One that failed is asked for anew, with all that was fetched ahead after it."""
        if self._is_broken:
            self._open()
        was_fresh = self._is_fresh
        got = self._take()
        if isinstance(got, Failed) and isinstance(got.error, StoreUnavailable) and not was_fresh:
            # It failed while nobody needed it, perhaps long ago: only a read of now says how the store is.
            self._open()
            got = self._take()
        if isinstance(got, Failed):
            self._is_broken = True
            raise got.error
        return got

    def _take(self) -> Fetched | Failed:
        if self._feed is None:
            raise RuntimeError(f"the stream of rank {self._rank} was closed in the middle of step {self._step}")
        self._is_fresh = False
        return self._feed.next()

    def close(self) -> None:
        """End what reads ahead; nothing happens when it is closed already."""
        feed, self._feed = self._feed, None
        if feed is not None:
            feed.close()

    def __enter__(self) -> LeafStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def validation_leaves(
    dataset: TokenRows,
    num_leaves: int,
    micro_batch: int,
    rank: int,
    world_size: int,
    patience: DataPatience | None = None,
) -> Iterator[Leaf]:
    """This rank's part of a fixed validation set: the first rows of the split, the same at any world size.

    A split too small for ``num_leaves`` gives as many whole leaves as it has; one too small for a single leaf gives one
    in which its rows repeat. The surplus rule is that of training.
    """
    if not dataset.num_rows:
        raise DataError(
            f"{dataset.url} has no {dataset.split} rows; prepare it with data.validation_fraction > 0 or turn eval off"
        )
    available = max(1, min(num_leaves, dataset.num_rows // micro_batch))
    for number in range(leaves_per_rank(available, world_size)):
        index = number * world_size + rank
        is_surplus = index >= available
        first = 0 if is_surplus else index * micro_batch
        ids = dataset.in_turn(np.arange(first, first + micro_batch, dtype=np.int64) % dataset.num_rows)
        request = Request(step=0, index=index, is_surplus=is_surplus, position=first)
        read = partial(dataset.rows, ids)
        yield _as_leaf(Fetched(request, read() if patience is None else patience.call(read), ids))


def _as_leaf(fetched: Fetched) -> Leaf:
    tokens = torch.from_numpy(fetched.tokens)
    return Leaf(
        index=fetched.request.index,
        is_surplus=fetched.request.is_surplus,
        input_ids=tokens[:, :-1].contiguous(),
        labels=tokens[:, 1:].contiguous(),
        sample_ids=fetched.sample_ids,
    )

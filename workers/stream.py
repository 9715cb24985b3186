"""Feeds one rank its leaves: the order is fixed by the seed, the position is one global number kept outside the loader.

Leaf ``j`` of optimizer step ``s`` covers the same samples at any world size and any ``num_workers``; which rank runs it
is all that a World decides. A StatefulDataLoader fetches ahead, but what it has prefetched never counts as consumed:
`LeafStream.seek` builds a new one that begins at the asked step, and its own state is never saved.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context, parent_process
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader

from storage.errors import StorageError
from workers.config import DataConfig
from workers.data_errors import DataError
from workers.data_patience import DataPatience
from workers.dataset import TokenDataset
from workers.sample_order import SampleOrder, chain, leaf_digest, sample_ids
from workers.skipped_windows import Windows, spans

__all__ = ["Leaf", "LeafStream", "chain", "leaf_digest", "leaves_per_rank", "sample_ids", "validation_leaves"]

logger = logging.getLogger(__name__)

Ids = npt.NDArray[np.int64]

_PRELOADED: Final = ("ray", "torch", "pyarrow.parquet", "workers.stream")


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


@dataclass(frozen=True, slots=True)
class _Request:
    """What a loader process needs to make one leaf: the global positions, and the leaf's name for the training side."""

    step: int
    index: int
    is_surplus: bool
    position: int


@dataclass(frozen=True, slots=True)
class _Fetched:
    request: _Request
    tokens: Ids
    sample_ids: Ids


@dataclass(frozen=True, slots=True)
class _Failed:
    """An error as a value: the loader would rebuild a raised one from its text alone and lose type and fields."""

    error: DataError | StorageError


def leaves_per_rank(num_leaves: int, world_size: int) -> int:
    """How many leaves each rank runs per step, surplus ones included."""
    return -(-num_leaves // world_size)


class LeafStream:
    """The training leaves of one rank, step by step. Call `seek` first; `close` ends the loader processes.

    ``skipped``: windows of the stream that are left out; positions do not count them.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        data_config: DataConfig,
        seed: int,
        rank: int,
        world_size: int,
        patience: DataPatience | None = None,
        *,
        skipped: Windows = (),
    ) -> None:
        if dataset.card.sequence_length != data_config.sequence_length:
            raise DataError(
                f"{dataset.url} is packed to sequence_length {dataset.card.sequence_length}, "
                f"data.sequence_length is {data_config.sequence_length}; set them equal or prepare the data again"
            )
        if not dataset.num_rows:
            raise DataError(f"{dataset.url} has no rows in its {dataset.split} split")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is outside a world of {world_size}")
        self._dataset, self._config, self._order = dataset, data_config, dataset.order(seed)
        self._rank, self._world_size, self._skipped = rank, world_size, skipped
        self._per_step = leaves_per_rank(data_config.num_leaves, world_size)
        self._patience = patience
        self._fetched: Iterator[_Fetched | _Failed] | None = None
        self._is_broken = False
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
        """A new loader that begins with the next leaf."""
        self.close()
        requests = _Requests(
            self._config, self._rank, self._world_size, self._step, self._position, first_round=self._consumed
        )
        source = _LeafSource(self._dataset, self._order, self._config.micro_batch, self._skipped)
        with warnings.catch_warnings():
            # Said by torch of torchdata's own call, once in every process; nothing a reader could act on.
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated", category=UserWarning)
            loader = _make_loader(source, requests, self._config)
        self._fetched, self._is_broken = iter(loader), False

    def leaves(self, step: int) -> Iterator[Leaf]:
        """This rank's leaves of ``step``, in leaf order. Steps come one after the other; `seek` to go elsewhere."""
        if self._fetched is None:
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

    def _next(self) -> _Fetched:
        """The next leaf. One that failed is asked for anew, with all that was fetched ahead after it."""
        if self._is_broken:
            self._open()
        if self._fetched is None:
            raise RuntimeError(f"the stream of rank {self._rank} was closed in the middle of step {self._step}")
        got = next(self._fetched)
        if isinstance(got, _Failed):
            self._is_broken = True
            raise got.error
        return got

    def close(self) -> None:
        """End the loader and wait for its processes; nothing happens when it is closed already."""
        iterator, self._fetched = self._fetched, None
        shut_down = getattr(iterator, "_shutdown_workers", None)  # absent without loader processes
        if shut_down is not None:
            shut_down()

    def __enter__(self) -> LeafStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def validation_leaves(
    dataset: TokenDataset,
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
        ids = np.arange(first, first + micro_batch, dtype=np.int64) % dataset.num_rows
        request = _Request(step=0, index=index, is_surplus=is_surplus, position=first)
        read = partial(dataset.rows, ids)
        yield _as_leaf(_Fetched(request, read() if patience is None else patience.call(read), ids))


def _as_leaf(fetched: _Fetched) -> Leaf:
    tokens = torch.from_numpy(fetched.tokens)
    return Leaf(
        index=fetched.request.index,
        is_surplus=fetched.request.is_surplus,
        input_ids=tokens[:, :-1].contiguous(),
        labels=tokens[:, 1:].contiguous(),
        sample_ids=fetched.sample_ids,
    )


class _Requests:
    """The endless sampler: this rank's leaves of every step from ``step`` on, there from its ``first_round`` on."""

    def __init__(
        self, config: DataConfig, rank: int, world_size: int, step: int, position: int, *, first_round: int = 0
    ) -> None:
        self._config, self._rank, self._world_size = config, rank, world_size
        self._step, self._position, self._first_round = step, position, first_round

    def __iter__(self) -> Iterator[_Request]:
        num_leaves, micro_batch = self._config.num_leaves, self._config.micro_batch
        step, position, first_round = self._step, self._position, self._first_round
        while True:
            for number in range(first_round, leaves_per_rank(num_leaves, self._world_size)):
                index = number * self._world_size + self._rank
                is_surplus = index >= num_leaves
                yield _Request(step, index, is_surplus, position + (0 if is_surplus else index * micro_batch))
            step, position, first_round = step + 1, position + self._config.global_batch, 0


class _LeafSource(torch.utils.data.Dataset[_Fetched | _Failed]):
    """The map-style dataset of the loader: a request in, one leaf's tokens out."""

    def __init__(self, dataset: TokenDataset, order: SampleOrder, micro_batch: int, skipped: Windows) -> None:
        self._dataset, self._order, self._micro_batch, self._skipped = dataset, order, micro_batch, skipped

    def __getitem__(self, request: _Request) -> _Fetched | _Failed:
        runs = spans(request.position, self._micro_batch, self._skipped)
        ids = np.concatenate([self._order.ids(place, count) for place, count in runs])
        try:
            return _Fetched(request, self._dataset.rows(ids), ids)
        except (DataError, StorageError) as error:
            return _Failed(error)


def _make_loader(
    source: _LeafSource, requests: _Requests, config: DataConfig
) -> StatefulDataLoader[_Fetched | _Failed]:
    # Its own generator: an iterator draws a base seed, and from the global one every resume would shift the RNG state.
    generator = torch.Generator().manual_seed(0)
    if not config.num_workers:
        return StatefulDataLoader(source, batch_size=None, sampler=requests, collate_fn=_as_it_is, generator=generator)
    return StatefulDataLoader(
        source,
        batch_size=None,
        sampler=requests,
        collate_fn=_as_it_is,
        generator=generator,
        num_workers=config.num_workers,
        prefetch_factor=config.prefetch,
        multiprocessing_context=_process_context(),
        worker_init_fn=_end_with_parent,
        # No time-out of its own, which would also put off noticing a dead process (else seen within 5 s): each read in
        # a loader process has the store's deadline, and a step that never comes is the heartbeat's to judge.
        timeout=0,
        snapshot_every_n_steps=1 << 30,  # its state is never asked for
    )


def _as_it_is(fetched: _Fetched | _Failed) -> _Fetched | _Failed:
    """Keeps arrays as arrays: they cross by the queue, so no shared-memory file can outlive a killed process."""
    return fetched


def _process_context() -> ForkServerContext:
    """A clean server process to fork from: this process may run threads, whose locks a plain fork would copy held.

    It imports beforehand what this process has imported, so that a seek after a regroup does not wait for torch again.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload([name for name in _PRELOADED if name in sys.modules])
    return context


def _end_with_parent(_worker_number: int) -> None:
    """End this loader process when its training process is killed: its parent, the fork server, would live on."""
    parent = parent_process()
    assert parent is not None
    threading.Thread(target=_exit_after, args=(parent,), name="end-with-parent", daemon=True).start()


def _exit_after(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)  # not sys.exit: the queue's feeder may be blocked on a pipe that nobody reads any more

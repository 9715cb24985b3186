"""Loader processes that fetch leaves ahead. They end with their stream, and with the training process in any case.

Their own state is never asked for: a stream knows its position.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Iterator
from multiprocessing import get_context, parent_process
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Final, cast

import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from workers.leaf_source import Failed, Fetched, LeafSource, Requests

__all__ = ["LoaderProcesses"]

_PRELOADED: Final = ("ray", "torch", "pyarrow.parquet", "workers.loader_processes")


class LoaderProcesses:
    """The leaves of ``requests``, fetched by ``num_workers`` processes, ``prefetch`` ahead in each."""

    def __init__(self, source: LeafSource, requests: Requests, *, num_workers: int, prefetch: int) -> None:
        with warnings.catch_warnings():
            # Said by torch of torchdata's own call, once in every process; nothing a reader could act on.
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated", category=UserWarning)
            loader: StatefulDataLoader[Fetched | Failed] = StatefulDataLoader(
                cast("Dataset[Fetched | Failed]", source),
                batch_size=None,
                sampler=requests,
                collate_fn=_as_it_is,
                # Its own: an iterator draws a base seed, and from the global one a resume would shift the RNG state.
                generator=torch.Generator().manual_seed(0),
                num_workers=num_workers,
                prefetch_factor=prefetch,
                multiprocessing_context=_process_context(),
                worker_init_fn=_end_with_parent,
                # No time-out of its own, which would also put off noticing a dead process (else seen within 5 s): each
                # read in a loader process has the store's deadline, and a step that never comes is the heartbeat's.
                timeout=0,
                snapshot_every_n_steps=1 << 30,  # its state is never asked for
            )
        self._leaves: Iterator[Fetched | Failed] = iter(loader)

    def next(self) -> Fetched | Failed:
        """The next leaf, or why it did not come."""
        return next(self._leaves)

    def close(self) -> None:
        """End the processes and wait for that."""
        shut_down = getattr(self._leaves, "_shutdown_workers")  # noqa: B009 - torch has no public name for it
        shut_down()


def _as_it_is(fetched: Fetched | Failed) -> Fetched | Failed:
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

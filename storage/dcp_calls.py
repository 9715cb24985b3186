"""Save and load through DCP on one rank alone: no collective, and no exception that slips past ``except Exception``.

DCP's CheckpointException derives from BaseException; what left a rank is always the first cause inside it. Nothing is
pickled either way: only tensors are handed to DCP.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from storage.dcp_writer import TENSORS, RankPlanner
from storage.errors import StorageError

__all__ = ["load_tensors", "save_tensors"]


def save_tensors(tensors: Mapping[str, torch.Tensor], writer: StorageWriter, planner: RankPlanner) -> None:
    """Hand this rank's part of ``tensors`` to ``writer``."""
    with _own_errors("save"):
        save({TENSORS: dict(tensors)}, storage_writer=writer, planner=planner, no_dist=True)


def load_tensors(tensors: Mapping[str, torch.Tensor], reader: StorageReader, planner: LoadPlanner) -> None:
    """Fill this rank's part of ``tensors`` in place."""
    with _own_errors("load"):
        load(dict(tensors), storage_reader=reader, planner=planner, no_dist=True)


@contextmanager
def _own_errors(verb: str) -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            # Working without its collectives is what we want, not an accident to warn about.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            # Decoded bytes are only copied from.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            yield
    except CheckpointException as error:
        causes = [failure[0] for failure in error.failures.values()]
        first = causes[0] if causes else None
        if isinstance(first, Exception):
            raise first from None
        if first is not None:  # KeyboardInterrupt, SystemExit: not ours to turn into an error
            raise first from None
        raise StorageError(f"{verb} through torch.distributed.checkpoint failed without a cause: {error}") from None

"""Load through DCP on one rank alone: no collective, and no exception that slips past ``except Exception``.

DCP's CheckpointException derives from BaseException; what left a rank is always the first cause inside it. Nothing is
unpickled: only tensors are asked of DCP.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader

from storage.errors import StorageError

__all__ = ["load_tensors", "own_errors"]


def load_tensors(tensors: Mapping[str, torch.Tensor], reader: StorageReader, planner: LoadPlanner) -> None:
    """Fill this rank's part of ``tensors`` in place."""
    with own_errors("load"):
        load(dict(tensors), storage_reader=reader, planner=planner, no_dist=True)


@contextmanager
def own_errors(verb: str) -> Iterator[None]:
    """Calls of torch.distributed.checkpoint inside raise the first cause instead of a CheckpointException.

    The cause is noted to be of its rank; KeyboardInterrupt and SystemExit pass as they are.
    """
    try:
        with warnings.catch_warnings():
            # Working without its collectives is what we want, not an accident to warn about.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            # Decoded bytes are only copied from.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            yield
    except CheckpointException as error:
        for rank, failure in error.failures.items():
            failure[0].add_note(f"on rank {rank}, while it was to {verb}")
            raise failure[0] from None
        raise StorageError(f"{verb} through torch.distributed.checkpoint failed without a cause: {error}") from None

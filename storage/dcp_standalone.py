"""Raysume's Checkpoints for any torch program, without Ray: what a user imports.

``dcp.save(state, storage_writer=RaysumeWriter(url, step=40))`` and
``dcp.load(state, storage_reader=RaysumeReader(url))`` are enough. `load` adds the fallback to an older Checkpoint, and
ordinary exceptions.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from storage.dcp_calls import own_errors
from storage.dcp_load import RaysumeReader
from storage.dcp_save import RaysumeWriter
from storage.errors import CorruptCheckpoint
from storage.events import utc_text

__all__ = ["RaysumeReader", "RaysumeWriter", "load", "own_errors"]

logger = logging.getLogger(__name__)


def load(
    state_dict: dict[str, Any],
    reader: RaysumeReader,
    *,
    planner: LoadPlanner | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
) -> int:
    """`torch.distributed.checkpoint.load`, called by every rank; returns the step that was loaded.

    A Checkpoint that proves corrupt while it is read is quarantined and the one before it is loaded instead, unless the
    reader was told its step. Raises StorageError and what torch raises, never a CheckpointException.
    """
    while True:
        try:
            with own_errors("load"):
                dcp_load(
                    state_dict, storage_reader=reader, planner=planner, process_group=process_group, no_dist=no_dist
                )
        except CorruptCheckpoint as error:
            if not reader.may_fall_back:
                raise
            # Every rank writes it before it looks again, so that all of them find the same older one.
            reader.quarantine(error.key, error.reason, utc_text(time.time()))
            logger.warning("step %d is quarantined: %s; the one before it is loaded", error.step, error)
        else:
            return reader.step

"""What a worker does for one save, without torch: lease, one copy of numpy arrays into the buffer, seal."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from storage.buffer_map import map_buffer
from storage.keeper_protocol import BufferLease, KeeperPort, LeaseRequest, SealedSnapshot
from storage.keys import Attempt
from storage.snapshot_format import SnapshotHeader, StagedChunk, assign_offsets, write_header

Arrays = Mapping[str, NDArray[np.float32]]


def make_header(
    arrays: Arrays, *, run_id: str = "run", attempt: Attempt, step: int, rank: int = 0, world_size: int = 2
) -> tuple[SnapshotHeader, int]:
    """Header with offsets, each array being its rank's rows of a tensor ``world_size`` times as long."""
    chunks = tuple(
        StagedChunk(
            name=name,
            dtype="float32",
            shape=(array.shape[0] * world_size, *array.shape[1:]),
            offsets=(array.shape[0] * rank, *(0 for _ in array.shape[1:])),
            sizes=array.shape,
            level="L1",
            num_bytes=array.nbytes,
        )
        for name, array in arrays.items()
    )
    header = SnapshotHeader(
        run_id=run_id,
        attempt=attempt,
        step=step,
        rank=rank,
        world_size=world_size,
        chunks=chunks,
        shared_state={"lr": 0.1} if rank == 0 else None,
        rank_state={"rank": rank},
    )
    return assign_offsets(header)


def fill(buffer: memoryview | bytearray, header: SnapshotHeader, arrays: Arrays) -> str:
    """Copy the arrays to their places and write the header; returns its digest."""
    for chunk in header.chunks:
        buffer[chunk.data_offset : chunk.data_offset + chunk.num_bytes] = arrays[chunk.name].tobytes()
    return write_header(buffer, header)


def lease_for(keeper: KeeperPort, header: SnapshotHeader, num_bytes: int, pid: int | None = None) -> BufferLease | None:
    return keeper.lease_buffer(
        LeaseRequest(
            run_id=header.run_id,
            attempt=header.attempt,
            step=header.step,
            rank=header.rank,
            pid=os.getpid() if pid is None else pid,
            num_bytes=num_bytes,
        )
    )


def sealed(header: SnapshotHeader, lease: BufferLease, digest: str) -> SealedSnapshot:
    return SealedSnapshot(
        lease_id=lease.lease_id,
        run_id=header.run_id,
        attempt=header.attempt,
        step=header.step,
        rank=header.rank,
        world_size=header.world_size,
        num_bytes=lease.num_bytes,
        header_digest=digest,
        stall_s=0.25,
    )


def save(
    keeper: KeeperPort, arrays: Arrays, *, attempt: Attempt, step: int, rank: int = 0, run_id: str = "run"
) -> BufferLease | None:
    """One whole save; None when the Keeper had no buffer to give."""
    header, num_bytes = make_header(arrays, run_id=run_id, attempt=attempt, step=step, rank=rank)
    lease = lease_for(keeper, header, num_bytes)
    if lease is None:
        return None
    with map_buffer(lease.path, lease.num_bytes) as buffer:
        digest = fill(buffer, header, arrays)
    keeper.seal(sealed(header, lease, digest))
    return lease

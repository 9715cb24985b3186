"""One sealed Snapshot to one durable Shard object: check the header, encode, put, and the Receipt that proves it.

Pure but for the one put: no threads, no leases, no coordinator.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from storage.config import CheckpointConfig
from storage.errors import StorageError
from storage.frames import RawChunk, encode_shard
from storage.keeper_protocol import SealedSnapshot
from storage.keys import StepKey, shard_key
from storage.manifest import AttemptRecord, ChunkPlace, Receipt, TensorLayout
from storage.object_store import ObjectStore
from storage.snapshot_format import SnapshotHeader, StagedChunk, header_digest, read_header

__all__ = ["ship_snapshot", "tensor_layouts"]

logger = logging.getLogger(__name__)


def ship_snapshot(
    snapshot: SealedSnapshot,
    buffer: memoryview,
    store: ObjectStore,
    config: CheckpointConfig,
    clock: Callable[[], float],
    is_over: Callable[[], bool],
) -> Receipt | None:
    """Encode and put the Snapshot in ``buffer``; None when its Attempt turned out to be over before the put."""
    header = read_header(buffer)
    _check_against_seal(snapshot, header, header_digest(buffer))
    started_at_s = clock()
    encoded = encode_shard(
        [_raw(chunk, buffer) for chunk in header.chunks if math.prod(chunk.sizes)],
        step=header.step,
        attempt=header.attempt,
        rank=header.rank,
        config=config,
    )
    encoded_at_s = clock()
    if is_over():
        return None
    key = shard_key(StepKey(step=header.step, attempt=header.attempt), header.rank)
    store.put(key, encoded.data, deadline_s=config.store.deadline_s)
    stored_at_s = clock()
    logger.info("attempt %s step %d rank %d: stored %s", header.attempt.label, header.step, header.rank, key)
    return Receipt(
        run_id=header.run_id,
        step=header.step,
        attempt=AttemptRecord.of(header.attempt),
        world_size=header.world_size,
        shard=encoded.record(key),
        tensors=tensor_layouts(header),
        shared_state=header.shared_state,
        rank_state=header.rank_state,
        stall_s=snapshot.stall_s,
        encode_s=encoded_at_s - started_at_s,
        upload_s=stored_at_s - encoded_at_s,
    )


def tensor_layouts(header: SnapshotHeader) -> dict[str, TensorLayout]:
    """Every tensor named in the Snapshot with this rank's blocks; one of which it holds nothing has no blocks."""
    layouts: dict[str, TensorLayout] = {}
    for chunk in header.chunks:
        known = layouts.setdefault(
            chunk.name, TensorLayout(dtype=chunk.dtype, shape=chunk.shape, level=chunk.level, chunks=())
        )
        if (known.dtype, known.shape, known.level) != (chunk.dtype, chunk.shape, chunk.level):
            raise StorageError(
                f"step {header.step} rank {header.rank}: blocks of {chunk.name} disagree: {known.dtype} {known.shape} "
                f"{known.level} and {chunk.dtype} {chunk.shape} {chunk.level}"
            )
        if math.prod(chunk.sizes):
            place = ChunkPlace(rank=header.rank, offsets=chunk.offsets, sizes=chunk.sizes)
            layouts[chunk.name] = known.model_copy(update={"chunks": (*known.chunks, place)})
    return layouts


def _raw(chunk: StagedChunk, buffer: memoryview) -> RawChunk:
    return RawChunk(
        name=chunk.name,
        dtype=chunk.dtype,
        offsets=chunk.offsets,
        sizes=chunk.sizes,
        level=chunk.level,
        itemsize=chunk.itemsize,
        data=buffer[chunk.data_offset : chunk.data_offset + chunk.num_bytes],
    )


def _check_against_seal(snapshot: SealedSnapshot, header: SnapshotHeader, digest: str) -> None:
    sealed = (snapshot.run_id, snapshot.attempt, snapshot.step, snapshot.rank, snapshot.world_size)
    written = (header.run_id, header.attempt, header.step, header.rank, header.world_size)
    if sealed != written or digest != snapshot.header_digest:
        raise StorageError(
            f"step {snapshot.step} rank {snapshot.rank}: the buffer holds {written} with header digest {digest}, "
            f"sealed were {sealed} with {snapshot.header_digest}; the buffer was written after it was sealed"
        )

"""The two halves of making a sealed Snapshot durable: encode it into a sink, and put the Shard where it can be proven.

Pure but for the sink and the store: no threads, no leases, no coordinator, no retries.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from storage.codec import digest128
from storage.config import CheckpointConfig, StoreConfig
from storage.errors import ObjectMissing, StorageError, StoreUnavailable
from storage.frames import TRAILER_BYTES, RawChunk, ShardSink, write_shard
from storage.keeper_protocol import SealedSnapshot
from storage.keys import StepKey, shard_key
from storage.levels import LevelTable
from storage.manifest import AttemptRecord, ChunkPlace, Receipt, ShardIndex, ShardRecord, TensorLayout
from storage.object_store import GrowingObject, GrowsObjects, ObjectStore
from storage.retry_tally import RetryTally
from storage.snapshot_format import SnapshotHeader, StagedChunk, header_digest, read_header

__all__ = [
    "MemorySink",
    "StreamedSink",
    "check_against_seal",
    "key_of",
    "most_bytes",
    "ship_snapshot",
    "streamed",
    "tensor_layouts",
    "upload_shard",
    "write_snapshot",
]

logger = logging.getLogger(__name__)

_SLACK_BYTES: Final = 64 << 10  # index and frames that do not get smaller, beside a 64th of the Snapshot


class MemorySink:
    """Holds one encoded Shard where there is no disk to hold it."""

    def __init__(self) -> None:
        self._content = bytearray()

    def write(self, data: bytes | memoryview, /) -> None:
        self._content += data

    @property
    def num_bytes(self) -> int:
        return len(self._content)

    def view(self) -> memoryview:
        """What was written. Nothing can be written while a view lives."""
        return memoryview(self._content).toreadonly()


class StreamedSink:
    """Writes to ``sink``, and the same bytes to ``growing`` until its Attempt ``is_over``."""

    def __init__(self, sink: ShardSink, growing: GrowingObject, is_over: Callable[[], bool]) -> None:
        self._sink, self._growing, self._is_over = sink, growing, is_over

    def write(self, data: bytes | memoryview, /) -> None:
        self._sink.write(data)
        if self._is_over():
            self._growing.abandon()
        self._growing.write(data)


def key_of(snapshot: SealedSnapshot) -> str:
    """Name of the Shard object that ``snapshot`` becomes."""
    return shard_key(StepKey(step=snapshot.step, attempt=snapshot.attempt), snapshot.rank)


def most_bytes(snapshot: SealedSnapshot) -> int:
    """The most that its Shard can take."""
    return snapshot.num_bytes + snapshot.num_bytes // 64 + _SLACK_BYTES


def write_snapshot(
    snapshot: SealedSnapshot,
    buffer: memoryview,
    sink: ShardSink,
    config: CheckpointConfig,
    clock: Callable[[], float],
    pool: Executor | None = None,
) -> Receipt:
    """Encode the Snapshot in ``buffer`` to ``sink``. The Receipt is a proof only once `upload_shard` has returned."""
    started_at_s = clock()
    if snapshot.bounded:  # rules that name a fidelity still come first
        config = config.model_copy(update={"fidelity": "bounded"})
    header = read_header(buffer)
    check_against_seal(snapshot, header, header_digest(buffer))
    levels = LevelTable.of(config)
    carried = (c for c in header.chunks if levels.treatment(c.name, c.dtype).is_in_checkpoints)
    header = replace(header, chunks=tuple(carried))
    summary = write_shard(
        [_raw(chunk, buffer) for chunk in header.chunks if math.prod(chunk.sizes)],
        sink,
        step=header.step,
        attempt=header.attempt,
        rank=header.rank,
        config=config,
        pool=pool,
    )
    return Receipt(
        run_id=header.run_id,
        step=header.step,
        attempt=AttemptRecord.of(header.attempt),
        world_size=header.world_size,
        shard=summary.record(key_of(snapshot)),
        tensors=tensor_layouts(header, summary.index),
        shared_state=header.shared_state,
        rank_state=header.rank_state,
        stall_s=snapshot.stall_s,
        encode_s=clock() - started_at_s,
        lossless_fallbacks=summary.lossless_fallbacks,
    )


@contextmanager
def streamed(
    store: ObjectStore | None,
    snapshot: SealedSnapshot,
    sink: ShardSink,
    config: StoreConfig,
    tally: RetryTally,
    is_over: Callable[[], bool],
) -> Iterator[tuple[ShardSink, GrowingObject | None]]:
    """Where to write the Shard so that it goes up while it is encoded, and what goes up; just ``sink`` and None where
    ``store`` cannot. After an error nothing of it stays in the store."""
    growing = None
    if isinstance(store, GrowsObjects):
        try:
            with tally.counting():
                growing = store.grow(key_of(snapshot), most_bytes(snapshot), deadline_s=config.deadline_s)
        except StorageError as error:
            logger.debug("step %d rank %d: not sent while it is encoded: %s", snapshot.step, snapshot.rank, error)
    if growing is None:
        yield sink, None
        return
    try:
        yield StreamedSink(sink, growing, is_over), growing
    except BaseException:
        growing.abandon()
        raise


def upload_shard(
    store: ObjectStore,
    receipt: Receipt,
    data: bytes | memoryview,
    *,
    deadline_s: float,
    clock: Callable[[], float],
    tally: RetryTally | None = None,
    on_retry: Callable[[str, float], None] | None = None,
) -> Receipt:
    """Put the Shard and read its end back on a second path; the Receipt, now true. ``tally``: retries of earlier tries.
    ``on_retry``: told why a call is sent again, and how long the one before took.

    Raises StoreUnavailable when the store gives back another end than was written: then it is not durable.
    """
    started_at_s = clock()
    tally = tally or RetryTally()
    with tally.counting(on_retry):
        store.put(receipt.shard.key, data, deadline_s=deadline_s)
        _read_back(store, receipt.shard, deadline_s)
    logger.info("step %d rank %d: stored %s", receipt.step, receipt.shard.rank, receipt.shard.key)
    return receipt.model_copy(update={"upload_s": clock() - started_at_s, "retries": tally.count})


def ship_snapshot(
    snapshot: SealedSnapshot,
    buffer: memoryview,
    store: ObjectStore,
    config: CheckpointConfig,
    clock: Callable[[], float],
) -> Receipt:
    """Both halves in one go, through memory."""
    sink = MemorySink()
    receipt = write_snapshot(snapshot, buffer, sink, config, clock)
    return upload_shard(store, receipt, sink.view(), deadline_s=config.store.deadline_s, clock=clock)


def tensor_layouts(header: SnapshotHeader, index: ShardIndex) -> dict[str, TensorLayout]:
    """Every tensor named in the Snapshot with this rank's blocks; one of which it holds nothing has no blocks.

    ``index``: of the Shard that was written, which says what is lossy.
    """
    bounds = _bounds(index)
    layouts: dict[str, TensorLayout] = {}
    for chunk in header.chunks:
        known = layouts.setdefault(
            chunk.name,
            TensorLayout(
                dtype=chunk.dtype, shape=chunk.shape, level=chunk.level, bound=bounds.get(chunk.name), chunks=()
            ),
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


def _bounds(index: ShardIndex) -> dict[str, float]:
    """The largest bound that a chunk of each lossy tensor promises."""
    bounds: dict[str, float] = {}
    for chunk in index.chunks:
        if chunk.bound is not None:
            bounds[chunk.name] = max(chunk.bound, bounds.get(chunk.name, 0.0))
    return bounds


def _read_back(store: ObjectStore, shard: ShardRecord, deadline_s: float) -> None:
    length = shard.index_bytes + TRAILER_BYTES
    try:
        end = store.get_range(shard.key, shard.size - length, length, deadline_s=deadline_s)
    except ObjectMissing as error:
        raise StoreUnavailable("read back", shard.key, "the object just written is not there") from error
    found = digest128(end[: shard.index_bytes])
    if found != shard.index_digest:
        raise StoreUnavailable(
            "read back", shard.key, f"its index has digest {found}, {shard.index_digest} was written; stored anew"
        )


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


def check_against_seal(snapshot: SealedSnapshot, header: SnapshotHeader, digest: str) -> None:
    """Raises StorageError unless the buffer that begins with ``header`` is the one that was sealed."""
    sealed = (snapshot.run_id, snapshot.attempt, snapshot.step, snapshot.rank, snapshot.world_size)
    written = (header.run_id, header.attempt, header.step, header.rank, header.world_size)
    if sealed != written or digest != snapshot.header_digest:
        raise StorageError(
            f"step {snapshot.step} rank {snapshot.rank}: the buffer holds {written} with header digest {digest}, "
            f"sealed were {sealed} with {snapshot.header_digest}; the buffer was written after it was sealed"
        )

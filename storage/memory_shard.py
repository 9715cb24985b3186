"""A sealed Snapshot as a raw Shard object: the index and trailer that follow its buffer, and the Receipt for it.

The object is the buffer as it was sealed (header, then chunks at 64-byte offsets), the index JSON and the trailer. The
header and the gaps between chunks stand in the index as chunks of their own: so frames lie back to back as in every
Shard, any reader of Shards reads it, and no byte is without a digest. It holds no file and decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import xxhash

from storage.codec import digest64, digest128
from storage.errors import StorageError
from storage.frames import read_index
from storage.keeper_protocol import SealedSnapshot
from storage.keys import StepKey, shard_key
from storage.manifest import SHARD_VERSION, AttemptRecord, ChunkIndex, Frame, Receipt, ShardIndex, ShardRecord
from storage.shard_format import MAGIC, TRAILER, TRAILER_BYTES, itemsize_of, num_rows, row_bytes
from storage.shipping import check_against_seal, key_of, tensor_layouts
from storage.snapshot_format import SnapshotHeader, StagedChunk, header_digest, read_header
from storage.transport import ReplicaRef

__all__ = ["FILLER", "MemoryShard", "index_snapshot", "likely_tail_bytes", "read_receipt"]

FILLER: Final = "snapshot/filler"  # bytes of the object that belong to no tensor
_FRAME_BYTES: Final = 1 << 20
_SLACK_BYTES: Final = 256 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShard:
    """What makes a sealed buffer of ``num_bytes`` less ``tail`` a Shard object of ``num_bytes``."""

    tail: bytes
    num_bytes: int
    receipt: Receipt


def likely_tail_bytes(num_bytes: int) -> int:
    """Room that the tail of a Snapshot of ``num_bytes`` will rarely exceed."""
    return (num_bytes >> 10) + _SLACK_BYTES


def index_snapshot(snapshot: SealedSnapshot, buffer: memoryview) -> MemoryShard:
    """Digest every byte of ``buffer``, once. Raises StorageError when it is not the Snapshot that was sealed."""
    header = read_header(buffer)
    check_against_seal(snapshot, header, header_digest(buffer))
    whole = xxhash.xxh3_128()
    index = ShardIndex.model_construct(
        step=header.step,
        attempt=AttemptRecord.of(header.attempt),
        rank=header.rank,
        chunks=tuple(_index(chunk, buffer, whole) for chunk in _tiles(header, len(buffer))),
    )
    footer = index.model_dump_json().encode()
    tail = footer + TRAILER.pack(len(footer), SHARD_VERSION, 0, MAGIC)
    whole.update(tail)
    record = ShardRecord(
        rank=header.rank,
        key=key_of(snapshot),
        size=len(buffer) + len(tail),
        digest=whole.hexdigest(),
        index_bytes=len(footer),
        index_digest=digest128(footer),
    )
    receipt = _receipt(header, index, record).model_copy(update={"tier": "own-memory", "stall_s": snapshot.stall_s})
    return MemoryShard(tail=tail, num_bytes=record.size, receipt=receipt)


def read_receipt(ref: ReplicaRef, content: memoryview) -> Receipt:
    """The Receipt of a replica, from its own bytes, whose digest is known to be ``ref.digest``.

    Raises StorageError when header, index and ``ref`` do not name the same Snapshot and the same places.
    """
    where = f"replica of step {ref.step} rank {ref.rank} of attempt {ref.attempt.label}"
    header = read_header(content)
    said = (header.run_id, header.attempt, header.step, header.rank, header.world_size)
    if said != (ref.run_id, ref.attempt, ref.step, ref.rank, ref.world_size) or len(content) != ref.num_bytes:
        raise StorageError(f"{where}: its header says {said}, its {len(content)} bytes are not what was announced")
    length, *_ = TRAILER.unpack(content[-TRAILER_BYTES:])
    if length > len(content) - TRAILER_BYTES:
        raise StorageError(f"{where}: an index of {length} bytes does not fit its {len(content)} bytes")
    record = ShardRecord(
        rank=ref.rank,
        key=shard_key(StepKey(step=ref.step, attempt=ref.attempt), ref.rank),
        size=ref.num_bytes,
        digest=ref.digest,
        index_bytes=length,
        index_digest=digest128(content[-TRAILER_BYTES - length : -TRAILER_BYTES]),
    )
    index = read_index(lambda offset, size: bytes(content[offset : offset + size]), record, step=ref.step)
    found = {(chunk.name, chunk.offsets): chunk.frames[0].offset for chunk in index.chunks if chunk.name != FILLER}
    expected = {(chunk.name, chunk.offsets): chunk.data_offset for chunk in header.chunks if math.prod(chunk.sizes)}
    if found != expected:
        raise StorageError(f"{where}: its index does not list the chunks that its header lists")
    return _receipt(header, index, record).model_copy(update={"tier": "peer-memory"})


def _receipt(header: SnapshotHeader, index: ShardIndex, record: ShardRecord) -> Receipt:
    return Receipt(
        run_id=header.run_id,
        step=header.step,
        attempt=AttemptRecord.of(header.attempt),
        world_size=header.world_size,
        shard=record,
        tensors=tensor_layouts(header, index),
        shared_state=header.shared_state,
        rank_state=header.rank_state,
    )


def _tiles(header: SnapshotHeader, num_bytes: int) -> Iterator[StagedChunk]:
    """The chunks that hold something, and what lies before, between and behind them, in the order of their bytes."""
    position = 0
    chunks = (chunk for chunk in header.chunks if math.prod(chunk.sizes))
    for chunk in sorted(chunks, key=lambda chunk: chunk.data_offset):
        if chunk.itemsize != itemsize_of(chunk.dtype):
            raise StorageError(
                f"step {header.step} rank {header.rank}: {chunk.name} of {chunk.dtype} has elements of "
                f"{chunk.itemsize} bytes"
            )
        if chunk.data_offset > position:
            yield _filler(position, chunk.data_offset)
        yield chunk
        position = chunk.data_offset + chunk.num_bytes
    if num_bytes > position:
        yield _filler(position, num_bytes)


def _filler(start: int, stop: int) -> StagedChunk:
    sizes = (stop - start,)
    return StagedChunk(
        name=FILLER,
        dtype="uint8",
        shape=sizes,
        offsets=(0,),
        sizes=sizes,
        level="L1",
        num_bytes=stop - start,
        data_offset=start,
    )


def _index(chunk: StagedChunk, buffer: memoryview, whole: xxhash.xxh3_128) -> ChunkIndex:
    """All three digests of a frame are taken while its bytes are in the cache."""
    width, rows = row_bytes(chunk.sizes, chunk.itemsize), num_rows(chunk.sizes)
    step = max(1, _FRAME_BYTES // width)
    raw_digest, frames = xxhash.xxh3_64(), []
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        offset = chunk.data_offset + start * width
        length = (stop - start) * width
        part = buffer[offset : offset + length]
        whole.update(part)
        raw_digest.update(part)
        frames.append(
            Frame.model_construct(
                rows=(start, stop), offset=offset, stored_bytes=length, raw_bytes=length, digest=digest64(part)
            )
        )
    return ChunkIndex.model_construct(
        name=chunk.name,
        dtype=chunk.dtype,
        offsets=chunk.offsets,
        sizes=chunk.sizes,
        level=chunk.level,
        encoding="raw",
        raw_digest=raw_digest.hexdigest(),
        frames=tuple(frames),
    )

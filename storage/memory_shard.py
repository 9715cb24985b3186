"""A sealed Snapshot as a raw Shard object: the index and trailer that follow its buffer, and the Receipt for it.

The object is the buffer as it was sealed (header, then chunks at 64-byte offsets), the index JSON and the trailer. The
header and the gaps between chunks stand in the index as chunks of their own: so frames lie back to back as in every
Shard, any reader of Shards reads it, and no byte is without a digest. It holds no file and decides nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import xxhash

from storage.codec import digest64, digest128
from storage.errors import StorageError
from storage.keeper_protocol import SealedSnapshot
from storage.keys import StepKey, shard_key
from storage.manifest import SHARD_VERSION, AttemptRecord, ChunkPlace, Receipt, ShardRecord, TensorLayout
from storage.shard_format import MAGIC, TRAILER, TRAILER_BYTES, itemsize_of, num_rows, row_bytes
from storage.shipping import check_against_seal
from storage.snapshot_format import SnapshotHeader, StagedChunk, header_digest, read_header
from storage.transport import ReplicaRef

__all__ = ["FILLER", "MemoryShard", "index_snapshot", "likely_tail_bytes", "read_receipt"]

FILLER: Final = "snapshot/filler"  # bytes of the object that belong to no tensor
_FRAME_BYTES: Final = 1 << 20
_SLACK_BYTES: Final = 256 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShard:
    """``tail`` behind the sealed buffer makes it a Shard object of ``num_bytes`` with xxh3_128 ``digest``."""

    tail: bytes
    num_bytes: int
    digest: str


def likely_tail_bytes(num_bytes: int) -> int:
    """Room that the tail of a Snapshot of ``num_bytes`` will rarely exceed."""
    return (num_bytes >> 10) + _SLACK_BYTES


def index_snapshot(snapshot: SealedSnapshot, buffer: memoryview) -> MemoryShard:
    """Digest every byte of ``buffer``, once. Raises StorageError when it is not the Snapshot that was sealed."""
    header = read_header(buffer)
    check_against_seal(snapshot, header, header_digest(buffer))
    whole = xxhash.xxh3_128()
    # By hand: it is made at every step, of thousands of chunks, and models would take longer than the digests.
    chunks = ",".join(_index(chunk, buffer, whole) for chunk in _tiles(header, len(buffer)))
    attempt = AttemptRecord.of(header.attempt).model_dump_json()
    footer = (
        f'{{"version":{SHARD_VERSION},"step":{header.step},"attempt":{attempt},"rank":{header.rank},'
        f'"chunks":[{chunks}]}}'
    ).encode()
    tail = footer + TRAILER.pack(len(footer), SHARD_VERSION, 0, MAGIC)
    whole.update(tail)
    return MemoryShard(tail=tail, num_bytes=len(buffer) + len(tail), digest=whole.hexdigest())


def read_receipt(ref: ReplicaRef, content: memoryview) -> Receipt:
    """The Receipt of the object ``content``, from its own bytes, whose digest is known to be ``ref.digest``.

    Raises StorageError when it is not the Snapshot that ``ref`` names.
    """
    where = f"step {ref.step} rank {ref.rank} of attempt {ref.attempt.label} in memory"
    header = read_header(content)
    said = (header.run_id, header.attempt, header.step, header.rank, header.world_size)
    if said != (ref.run_id, ref.attempt, ref.step, ref.rank, ref.world_size) or len(content) != ref.num_bytes:
        raise StorageError(f"{where}: its header says {said}, and it has {len(content)} bytes, not {ref.num_bytes}")
    length, version, _, magic = TRAILER.unpack(content[-TRAILER_BYTES:])
    if (version, magic) != (SHARD_VERSION, MAGIC) or length > len(content) - TRAILER_BYTES:
        raise StorageError(f"{where}: it does not end as a version {SHARD_VERSION} Shard of {len(content)} bytes does")
    return Receipt(
        run_id=header.run_id,
        step=header.step,
        attempt=AttemptRecord.of(header.attempt),
        world_size=header.world_size,
        tier="peer-memory",
        shard=ShardRecord(
            rank=ref.rank,
            key=shard_key(StepKey(step=ref.step, attempt=ref.attempt), ref.rank),
            size=ref.num_bytes,
            digest=ref.digest,
            index_bytes=length,
            index_digest=digest128(content[-TRAILER_BYTES - length : -TRAILER_BYTES]),
        ),
        tensors=_layouts(header),
        shared_state=header.shared_state,
        rank_state=header.rank_state,
    )


def _layouts(header: SnapshotHeader) -> dict[str, TensorLayout]:
    """As storage.shipping.tensor_layouts makes them for a Shard without rounded chunks, which all of these are."""
    first: dict[str, StagedChunk] = {}
    places: dict[str, list[ChunkPlace]] = {}
    for chunk in header.chunks:
        known = first.setdefault(chunk.name, chunk)
        if (known.dtype, known.shape, known.level) != (chunk.dtype, chunk.shape, chunk.level):
            raise StorageError(f"step {header.step} rank {header.rank}: blocks of {chunk.name} disagree")
        held = places.setdefault(chunk.name, [])
        if math.prod(chunk.sizes):
            held.append(ChunkPlace.model_construct(rank=header.rank, offsets=chunk.offsets, sizes=chunk.sizes))
    # Its values were checked with the header: thousands of them need not be a second time.
    return {
        name: TensorLayout.model_construct(
            dtype=chunk.dtype, shape=chunk.shape, level=chunk.level, chunks=tuple(places[name])
        )
        for name, chunk in first.items()
    }


def _tiles(header: SnapshotHeader, num_bytes: int) -> Iterator[StagedChunk]:
    """The chunks that hold something, and what lies before, between and behind them, in the order of their bytes."""
    position = 0
    chunks = (chunk for chunk in header.chunks if chunk.num_bytes)
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


def _index(chunk: StagedChunk, buffer: memoryview, whole: xxhash.xxh3_128) -> str:
    """The ChunkIndex as JSON. All digests of a frame are taken while its bytes are in the cache."""
    width, rows = row_bytes(chunk.sizes, chunk.itemsize), num_rows(chunk.sizes)
    step = max(1, _FRAME_BYTES // width)
    raw_digest, frames = xxhash.xxh3_64() if step < rows else None, []
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        offset, length = chunk.data_offset + start * width, (stop - start) * width
        part = buffer[offset : offset + length]
        whole.update(part)
        if raw_digest is not None:
            raw_digest.update(part)
        digest = digest64(part)
        frames.append(
            f'{{"rows":[{start},{stop}],"offset":{offset},"stored_bytes":{length},"raw_bytes":{length},'
            f'"digest":"{digest}"}}'
        )
    of_chunk = digest if raw_digest is None else raw_digest.hexdigest()
    known = _known(chunk.name, chunk.dtype, chunk.offsets, chunk.sizes, chunk.level)
    return f'{{{known},"raw_digest":"{of_chunk}","frames":[{",".join(frames)}]}}'


@lru_cache(maxsize=1 << 15)
def _known(name: str, dtype: str, offsets: tuple[int, ...], sizes: tuple[int, ...], level: str) -> str:
    """What stands in the index of a chunk at every step."""
    fields = {"name": name, "dtype": dtype, "offsets": offsets, "sizes": sizes, "level": level, "encoding": "raw"}
    return json.dumps(fields, separators=(",", ":"))[1:-1]

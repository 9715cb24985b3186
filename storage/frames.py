"""The format of a Shard object: frames back to back, then the index as JSON, then a fixed trailer.

A frame is a run of whole rows along dimension 0, encoded alone, so a reader fetches and checks only the rows it needs.
Trailer (24 bytes, little endian): index length u64, format version u32, reserved u32, magic of 8 bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import xxhash
from pydantic import ValidationError

from storage.codec import CodecError, decode, digest64, digest128, encode
from storage.config import CheckpointConfig
from storage.errors import CorruptCheckpoint
from storage.keys import Attempt
from storage.manifest import (
    SHARD_VERSION,
    AttemptRecord,
    ChunkIndex,
    Frame,
    Level,
    ShardIndex,
    ShardRecord,
)

__all__ = [
    "TRAILER_BYTES",
    "EncodedShard",
    "Fetch",
    "RawChunk",
    "check_index",
    "decode_frame",
    "encode_shard",
    "itemsize_of",
    "num_rows",
    "read_index",
    "read_rows",
    "row_bytes",
]

Fetch = Callable[[int, int], bytes]
"""``fetch(offset, length)`` gives exactly ``length`` bytes of one Shard object."""

_TRAILER = struct.Struct("<QII8s")
_MAGIC = b"RAYSUME\n"
TRAILER_BYTES = _TRAILER.size

_SMALLEST_TARGET = 256 << 10
_LARGEST_INDEX = 1 << 30
_LARGEST_FETCH = 64 << 20

_ITEMSIZES = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"), 1),
    "float8_e8m0fnu": 1,
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32", "complex32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}


def itemsize_of(dtype: str) -> int:
    """Bytes of one element of a torch dtype by its name, e.g. ``bfloat16``. Raises ValueError for an unknown one."""
    itemsize = _ITEMSIZES.get(dtype)
    if itemsize is None:
        raise ValueError(f"dtype {dtype!r} is unknown; known are {', '.join(sorted(_ITEMSIZES))}")
    return itemsize


def num_rows(sizes: Sequence[int]) -> int:
    """Rows of a chunk along dimension 0. A 0-dim chunk is one row; a chunk without elements has none."""
    if 0 in sizes:
        return 0
    return sizes[0] if sizes else 1


def row_bytes(sizes: Sequence[int], itemsize: int) -> int:
    """Bytes of one row."""
    return prod(sizes[1:]) * itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class RawChunk:
    """One contiguous block of one tensor, row-major, as captured: what `encode_shard` is given."""

    name: str
    dtype: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    level: Level
    itemsize: int
    data: memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedShard:
    """A whole Shard object, ready to be stored, and what its ShardRecord needs to say."""

    data: bytes | memoryview
    index: ShardIndex
    size: int
    digest: str
    index_bytes: int
    index_digest: str

    def record(self, key: str) -> ShardRecord:
        """The record of this Shard once it is stored under ``key``."""
        return ShardRecord(
            rank=self.index.rank,
            key=key,
            size=self.size,
            digest=self.digest,
            index_bytes=self.index_bytes,
            index_digest=self.index_digest,
        )


def encode_shard(
    chunks: Sequence[RawChunk], *, step: int, attempt: Attempt, rank: int, config: CheckpointConfig
) -> EncodedShard:
    """Encode the chunks of one rank in the order given."""
    content = bytearray()
    indexes = tuple(_encode_chunk(chunk, content, config) for chunk in chunks)
    index = ShardIndex(step=step, attempt=AttemptRecord.of(attempt), rank=rank, chunks=indexes)
    footer = index.model_dump_json().encode()
    content += footer
    content += _TRAILER.pack(len(footer), SHARD_VERSION, 0, _MAGIC)
    return EncodedShard(
        data=memoryview(content).toreadonly(),
        index=index,
        size=len(content),
        digest=digest128(content),
        index_bytes=len(footer),
        index_digest=digest128(footer),
    )


def _encode_chunk(chunk: RawChunk, content: bytearray, config: CheckpointConfig) -> ChunkIndex:
    raw = chunk.data.cast("B")
    width, rows = row_bytes(chunk.sizes, chunk.itemsize), num_rows(chunk.sizes)
    if chunk.itemsize != itemsize_of(chunk.dtype) or len(raw) != rows * width:
        raise ValueError(
            f"chunk {chunk.name} of {chunk.dtype} {chunk.sizes} must hold {rows * width} bytes of "
            f"{itemsize_of(chunk.dtype)}-byte elements, not {len(raw)} of {chunk.itemsize}-byte elements"
        )
    target = min(config.frame_bytes, max(_SMALLEST_TARGET, len(raw) // 16))
    step = max(1, target // width) if rows else 1
    frames = []
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        part = raw[start * width : stop * width]
        stored = encode(part, chunk.itemsize, config.encoding, config.zstd_level)
        frames.append(
            Frame(
                rows=(start, stop),
                offset=len(content),
                stored_bytes=len(stored),
                raw_bytes=len(part),
                digest=digest64(stored),
            )
        )
        content += stored
    return ChunkIndex(
        name=chunk.name,
        dtype=chunk.dtype,
        offsets=chunk.offsets,
        sizes=chunk.sizes,
        level=chunk.level,
        encoding=config.encoding,
        raw_digest=digest64(raw),
        frames=tuple(frames),
    )


def read_index(fetch: Fetch, record: ShardRecord, *, step: int) -> ShardIndex:
    """The index of the Shard object that ``record`` describes, checked against it and in itself."""

    def corrupt(reason: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(step, record.key, reason, record.rank)

    length = record.index_bytes + TRAILER_BYTES
    if length > record.size or record.index_bytes > _LARGEST_INDEX:
        raise corrupt(f"an index of {record.index_bytes} bytes does not fit an object of {record.size} bytes")
    tail = fetch(record.size - length, length)
    if len(tail) != length:
        raise corrupt(f"{len(tail)} of the last {length} bytes could be read")
    footer, trailer = tail[: record.index_bytes], tail[record.index_bytes :]
    if digest128(footer) != record.index_digest:
        raise corrupt(f"index hash mismatch: {digest128(footer)}, committed {record.index_digest}")
    stated, version, reserved, magic = _TRAILER.unpack(trailer)
    if (stated, version, reserved, magic) != (record.index_bytes, SHARD_VERSION, 0, _MAGIC):
        raise corrupt(f"the trailer is not that of a version {SHARD_VERSION} Shard with this index: {trailer.hex()}")
    try:
        index = ShardIndex.model_validate_json(footer)
    except ValidationError as error:
        raise corrupt(f"the index is not valid: {error}") from error
    if (index.step, index.rank) != (step, record.rank):
        raise corrupt(f"this is the Shard of step {index.step}, rank {index.rank}, not of rank {record.rank}")
    reason = check_index(index, record.size - length)
    if reason:
        raise corrupt(reason)
    return index


def check_index(index: ShardIndex, frames_end: int) -> str | None:
    """None when the frames of all chunks lie back to back in ``[0, frames_end)`` and tile each chunk's rows."""
    position = 0
    for chunk in index.chunks:
        reason = _check_chunk(chunk)
        if reason:
            return reason
        for number, frame in enumerate(chunk.frames):
            if frame.offset != position:
                return f"frame {number} of {chunk.name} starts at {frame.offset}, expected {position}"
            position += frame.stored_bytes
    if position != frames_end:
        return f"the frames end at {position}, expected {frames_end}"
    return None


def _check_chunk(chunk: ChunkIndex) -> str | None:
    try:
        width = row_bytes(chunk.sizes, itemsize_of(chunk.dtype))
    except ValueError as error:
        return f"chunk {chunk.name}: {error}"
    if len(chunk.offsets) != len(chunk.sizes):
        return f"chunk {chunk.name} has {len(chunk.offsets)} offsets and {len(chunk.sizes)} sizes"
    row = 0
    for number, frame in enumerate(chunk.frames):
        start, stop = frame.rows
        if start != row or stop <= start:
            return f"frame {number} of {chunk.name} holds rows {start} to {stop}, expected them from {row} on"
        if frame.raw_bytes != (stop - start) * width:
            return f"frame {number} of {chunk.name} has {frame.raw_bytes} bytes for {stop - start} rows of {width}"
        row = stop
    if row != num_rows(chunk.sizes):
        return f"the frames of {chunk.name} hold {row} rows, its sizes {chunk.sizes} need {num_rows(chunk.sizes)}"
    return None


def read_rows(
    chunk: ChunkIndex, row_start: int, row_stop: int, fetch: Fetch, *, step: int, key: str, rank: int | None = None
) -> bytes:
    """Raw bytes of rows ``[row_start, row_stop)``, from the frames that hold them alone, each checked before decoding.

    ``step``, ``key`` and ``rank`` are those of the Shard object and only name it in errors.
    """
    reason = _check_chunk(chunk)
    if reason:
        raise CorruptCheckpoint(step, key, reason, rank)
    if not 0 <= row_start <= row_stop <= num_rows(chunk.sizes):
        raise ValueError(f"rows {row_start} to {row_stop} are not within {chunk.name} of sizes {chunk.sizes}")
    if row_start == row_stop:
        return b""
    needed = [
        (number, frame)
        for number, frame in enumerate(chunk.frames)
        if frame.rows[0] < row_stop and frame.rows[1] > row_start
    ]
    raw = bytearray()
    for group in _adjacent(needed):
        base = group[0][1].offset
        stored = memoryview(fetch(base, group[-1][1].offset + group[-1][1].stored_bytes - base))
        for number, frame in group:
            part = stored[frame.offset - base : frame.offset - base + frame.stored_bytes]
            raw += decode_frame(chunk, number, part, step=step, key=key, rank=rank)
    width = row_bytes(chunk.sizes, itemsize_of(chunk.dtype))
    first = needed[0][1].rows[0]
    return bytes(memoryview(raw)[(row_start - first) * width : (row_stop - first) * width])


def _adjacent(frames: Sequence[tuple[int, Frame]]) -> list[list[tuple[int, Frame]]]:
    """Runs of frames that touch each other in the object: one ranged read each, of bounded length."""
    groups: list[list[tuple[int, Frame]]] = []
    for number, frame in frames:
        if groups:
            last, begin = groups[-1][-1][1], groups[-1][0][1].offset
            fits = frame.offset + frame.stored_bytes - begin <= _LARGEST_FETCH
            if last.offset + last.stored_bytes == frame.offset and fits:
                groups[-1].append((number, frame))
                continue
        groups.append([(number, frame)])
    return groups


def decode_frame(
    chunk: ChunkIndex, number: int, stored: bytes | memoryview, *, step: int, key: str, rank: int | None
) -> bytes | memoryview:
    """Frame ``number`` of ``chunk``, its digest checked before a decoder sees a byte of it."""
    frame = chunk.frames[number]
    where = f"frame {number} (rows {frame.rows[0]} to {frame.rows[1]}) of {chunk.name}"
    if len(stored) != frame.stored_bytes:
        raise CorruptCheckpoint(step, key, f"{where}: {len(stored)} bytes, committed {frame.stored_bytes}", rank)
    found = xxhash.xxh3_64_hexdigest(stored)
    if found != frame.digest:
        raise CorruptCheckpoint(step, key, f"{where}: hash mismatch: {found}, committed {frame.digest}", rank)
    try:
        return decode(stored, frame.raw_bytes, itemsize_of(chunk.dtype), chunk.encoding)
    except CodecError as error:
        raise CorruptCheckpoint(step, key, f"{where}: {error}", rank) from error

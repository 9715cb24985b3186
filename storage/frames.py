"""A Shard object: frames back to back, then the index as JSON, then a fixed trailer. Here it is read and checked.

A frame is a run of whole rows along dimension 0, encoded alone, so a reader fetches and checks only the rows it needs.
Writing lies in `shard_writer` and is offered here as well, so that the format has one door.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import xxhash
from pydantic import ValidationError

from storage.codec import CodecError, decode, digest128
from storage.errors import CorruptCheckpoint
from storage.manifest import SHARD_VERSION, ChunkIndex, Frame, ShardIndex, ShardRecord
from storage.shard_format import MAGIC, TRAILER, TRAILER_BYTES, itemsize_of, num_rows, row_bytes
from storage.shard_writer import EncodedShard, RawChunk, ShardSink, ShardSummary, encode_shard, write_shard

__all__ = [
    "TRAILER_BYTES",
    "EncodedShard",
    "Fetch",
    "RawChunk",
    "ShardSink",
    "ShardSummary",
    "check_index",
    "decode_frame",
    "encode_shard",
    "itemsize_of",
    "num_rows",
    "read_index",
    "read_rows",
    "row_bytes",
    "write_shard",
]

Fetch = Callable[[int, int], bytes]
"""``fetch(offset, length)`` gives exactly ``length`` bytes of one Shard object."""

_LARGEST_INDEX = 1 << 30
_LARGEST_FETCH = 64 << 20
_LARGEST_FRAME = 64 << 20  # the largest `frame_bytes`; only a single row may take more


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
    stated, version, reserved, magic = TRAILER.unpack(trailer)
    if (stated, version, reserved, magic) != (record.index_bytes, SHARD_VERSION, 0, MAGIC):
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
        if frame.raw_bytes > _LARGEST_FRAME and stop - start > 1:
            return f"frame {number} of {chunk.name} has {frame.raw_bytes} bytes, at most {_LARGEST_FRAME} are written"
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

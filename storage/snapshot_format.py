"""The versioned binary format of one Snapshot inside a shared-memory buffer.

Bytes only: it owns no file and trusts nothing it reads. A buffer holds the header, then each chunk's raw row-major
bytes at a 64-byte aligned offset from the start of the buffer.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass, replace
from typing import Final

import xxhash
from pydantic import JsonValue, TypeAdapter, ValidationError

from storage.errors import StorageError
from storage.keys import Attempt
from storage.manifest import Level

__all__ = [
    "SNAPSHOT_VERSION",
    "SnapshotHeader",
    "SnapshotLayout",
    "StagedChunk",
    "assign_offsets",
    "header_digest",
    "lay_out",
    "read_header",
    "write_header",
    "write_planned_header",
]

SNAPSHOT_VERSION: Final = 1
_MAGIC: Final = b"RAYSNAP\x00"
_PREFIX: Final = struct.Struct("<8sIQ")
_DIGEST_BYTES: Final = 8
_ALIGNMENT: Final = 64
_LARGEST_OFFSET: Final = (1 << 62) - 1
_SPARE_BYTES: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedChunk:
    """One contiguous block of one tensor in a Snapshot buffer: ``shape`` of the full tensor, ``sizes`` of the block.

    ``num_bytes`` raw row-major bytes lie at ``data_offset``, which `assign_offsets` fills in.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    level: Level
    num_bytes: int
    data_offset: int = 0

    @property
    def itemsize(self) -> int:
        """Bytes per element; 1 for an empty block, which has none to measure."""
        return self.num_bytes // max(1, math.prod(self.sizes)) or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotHeader:
    """What a Snapshot buffer says of itself. ``shared_state`` is set by rank 0 alone."""

    run_id: str
    attempt: Attempt
    step: int
    rank: int
    world_size: int
    chunks: tuple[StagedChunk, ...]
    shared_state: dict[str, JsonValue] | None
    rank_state: dict[str, JsonValue]


_HEADER: Final = TypeAdapter(SnapshotHeader)


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotLayout:
    """The chunks of Snapshots that differ in their plain state alone: placed, checked and encoded once for all.

    Their headers may take ``room_bytes``; whole buffers have ``num_bytes``.
    """

    chunks: tuple[StagedChunk, ...]
    chunks_json: str
    room_bytes: int
    num_bytes: int

    def has_room(self, header: SnapshotHeader) -> bool:
        """Whether the plain state of ``header``, whose own chunks do not count, still fits before the first chunk."""
        return len(_encode(header, self.chunks_json)) + _PREFIX.size + _DIGEST_BYTES <= self.room_bytes


def lay_out(header: SnapshotHeader) -> SnapshotLayout:
    """Places for the chunks of ``header`` that leave its plain state some room to grow."""
    placed, num_bytes = assign_offsets(header, spare_bytes=max(_SPARE_BYTES, len(_encode(header, "")) // 4))
    room = min((chunk.data_offset for chunk in placed.chunks), default=num_bytes)
    _check_chunks(placed, room, num_bytes)
    return SnapshotLayout(
        chunks=placed.chunks, chunks_json=_encode_chunks(placed.chunks), room_bytes=room, num_bytes=num_bytes
    )


def assign_offsets(header: SnapshotHeader, spare_bytes: int = 0) -> tuple[SnapshotHeader, int]:
    """The header with every chunk's place filled in, ``spare_bytes`` before the first, and the whole buffer's size."""
    # Offsets are numbers in the JSON, so its length depends on them: room is kept for the longest they could be.
    longest = tuple(replace(chunk, data_offset=_LARGEST_OFFSET) for chunk in header.chunks)
    end = _PREFIX.size + len(_encode(header, _encode_chunks(longest))) + _DIGEST_BYTES + spare_bytes
    placed: list[StagedChunk] = []
    for chunk in header.chunks:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        placed.append(replace(chunk, data_offset=start))
        end = start + chunk.num_bytes
    return replace(header, chunks=tuple(placed)), end


def write_header(buffer: bytearray | memoryview, header: SnapshotHeader) -> str:
    """Write ``header`` (offsets assigned) at the start of ``buffer``; returns its xxh3_64 as 16 hex digits."""
    body = _encode(header, _encode_chunks(header.chunks))
    _check_chunks(header, _PREFIX.size + len(body) + _DIGEST_BYTES, len(buffer))
    return _write(buffer, body)


def write_planned_header(buffer: bytearray | memoryview, header: SnapshotHeader, layout: SnapshotLayout) -> str:
    """`write_header` for a header whose chunks are those of ``layout``; its own are not looked at."""
    body = _encode(header, layout.chunks_json)
    if _PREFIX.size + len(body) + _DIGEST_BYTES > layout.room_bytes or len(buffer) < layout.num_bytes:
        raise StorageError(
            f"snapshot of step {header.step} rank {header.rank}: {len(body)} bytes of header have "
            f"{layout.room_bytes} before the first tensor, in a buffer of {len(buffer)} bytes; lay it out anew"
        )
    return _write(buffer, body)


def _write(buffer: bytearray | memoryview, body: bytes) -> str:
    prefix = _PREFIX.pack(_MAGIC, SNAPSHOT_VERSION, len(body))
    digest = xxhash.xxh3_64(prefix + body)
    whole = prefix + body + digest.digest()
    buffer[: len(whole)] = whole
    return digest.hexdigest()


def read_header(buffer: bytes | bytearray | memoryview) -> SnapshotHeader:
    """The header at the start of ``buffer``. Raises StorageError unless format, digest and every bound are right."""
    size = len(buffer)
    if size < _PREFIX.size + _DIGEST_BYTES:
        raise StorageError(f"snapshot buffer of {size} bytes is too short for a header; take a new Snapshot")
    prefix = bytes(buffer[: _PREFIX.size])
    magic, version, length = _PREFIX.unpack(prefix)
    if magic != _MAGIC:
        raise StorageError(f"snapshot buffer starts with {magic!r}, expected {_MAGIC!r}: it was never written whole")
    if version != SNAPSHOT_VERSION:
        raise StorageError(
            f"snapshot buffer has format version {version}, this build reads {SNAPSHOT_VERSION}; "
            "run worker and Keeper from one build"
        )
    end = _PREFIX.size + length + _DIGEST_BYTES
    if end > size:
        raise StorageError(f"snapshot header claims {length} bytes, the whole buffer has {size}")
    body = bytes(buffer[_PREFIX.size : end - _DIGEST_BYTES])
    digest = xxhash.xxh3_64(prefix + body)
    if digest.digest() != bytes(buffer[end - _DIGEST_BYTES : end]):
        raise StorageError("snapshot header does not match its digest: its bytes changed after they were written")
    try:
        header = _HEADER.validate_json(body, strict=True)
    except ValidationError as error:
        raise StorageError(f"snapshot header is malformed: {error}") from error
    _check_chunks(header, end, size)
    return header


def header_digest(buffer: bytes | bytearray | memoryview) -> str:
    """The digest stored in a header that `read_header` has accepted, as 16 hex digits."""
    _, _, length = _PREFIX.unpack(bytes(buffer[: _PREFIX.size]))
    start = _PREFIX.size + length
    return bytes(buffer[start : start + _DIGEST_BYTES]).hex()


def _check_chunks(header: SnapshotHeader, header_end: int, size: int) -> None:
    where = f"snapshot of step {header.step} rank {header.rank}"
    if not 0 <= header.rank < header.world_size or header.step < 0:
        raise StorageError(f"{where}: impossible in a world of {header.world_size}")
    free_from = header_end
    for chunk in sorted(header.chunks, key=lambda chunk: (chunk.data_offset, chunk.num_bytes)):
        end = chunk.data_offset + chunk.num_bytes
        if chunk.num_bytes < 0 or chunk.data_offset < free_from or end > size:
            raise StorageError(
                f"{where}: {chunk.name} lies at bytes {chunk.data_offset} to {end}, outside its own place in a buffer "
                f"of {size} bytes (free from {free_from})"
            )
        free_from = end
        _check_block(where, chunk)


def _check_block(where: str, chunk: StagedChunk) -> None:
    fits = len(chunk.shape) == len(chunk.offsets) == len(chunk.sizes) and all(
        offset >= 0 and size >= 0 and offset + size <= length
        for length, offset, size in zip(chunk.shape, chunk.offsets, chunk.sizes, strict=True)
    )
    elements = math.prod(chunk.sizes)
    is_whole = chunk.num_bytes % elements == 0 if elements else chunk.num_bytes == 0
    if not fits or not is_whole or (elements and not chunk.num_bytes):
        raise StorageError(
            f"{where}: {chunk.name} has {chunk.num_bytes} bytes for a block of {chunk.sizes} at {chunk.offsets} "
            f"in a tensor of {chunk.shape}"
        )


def _encode(header: SnapshotHeader, chunks_json: str) -> bytes:
    """The header as JSON, with its chunks given: they are most of it, and the same from Snapshot to Snapshot."""
    record = {
        "run_id": header.run_id,
        "attempt": {"number": header.attempt.number, "nonce": header.attempt.nonce},
        "step": header.step,
        "rank": header.rank,
        "world_size": header.world_size,
        "shared_state": header.shared_state,
        "rank_state": header.rank_state,
    }
    plain = json.dumps(record, separators=(",", ":"))
    return f'{plain[:-1]},"chunks":{chunks_json}}}'.encode()


def _encode_chunks(chunks: tuple[StagedChunk, ...]) -> str:
    records = [{name: getattr(chunk, name) for name in StagedChunk.__slots__} for chunk in chunks]
    return json.dumps(records, separators=(",", ":"))

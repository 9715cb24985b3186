"""Writes a Shard object front to back: frames encoded in parallel, written in order, then the index and the trailer.

Memory stays within a few frames, however large the Shard. Where the bytes go is the sink's affair.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import closing
from dataclasses import dataclass
from typing import Final, Protocol

import xxhash

from storage.codec import digest64, digest128, encode
from storage.config import CheckpointConfig
from storage.keys import Attempt
from storage.manifest import SHARD_VERSION, AttemptRecord, ChunkIndex, Frame, Level, ShardIndex, ShardRecord
from storage.shard_format import MAGIC, TRAILER, itemsize_of, num_rows, row_bytes

__all__ = ["EncodedShard", "RawChunk", "ShardSink", "ShardSummary", "encode_shard", "write_shard"]

_SMALLEST_TARGET: Final = 256 << 10
_WINDOW_BYTES: Final = 16 << 20  # raw bytes that are being encoded or wait for their turn to be written
_WINDOW_FRAMES: Final = 64
_ENCODE_TIMEOUT_S: Final = 600.0


class ShardSink(Protocol):
    """Takes the bytes of one Shard object in order. It must not keep ``data`` beyond the call."""

    def write(self, data: bytes | memoryview, /) -> object: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RawChunk:
    """One contiguous block of one tensor, row-major, as captured: what `write_shard` is given."""

    name: str
    dtype: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    level: Level
    itemsize: int
    data: memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSummary:
    """What was written: all that the ShardRecord of the object needs to say."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedShard(ShardSummary):
    """A whole Shard object in memory, ready to be stored."""

    data: bytes | memoryview


def encode_shard(
    chunks: Sequence[RawChunk],
    *,
    step: int,
    attempt: Attempt,
    rank: int,
    config: CheckpointConfig,
    pool: Executor | None = None,
) -> EncodedShard:
    """`write_shard` into memory."""
    content = _Content()
    summary = write_shard(chunks, content, step=step, attempt=attempt, rank=rank, config=config, pool=pool)
    return EncodedShard(
        index=summary.index,
        size=summary.size,
        digest=summary.digest,
        index_bytes=summary.index_bytes,
        index_digest=summary.index_digest,
        data=memoryview(content.data).toreadonly(),
    )


def write_shard(
    chunks: Sequence[RawChunk],
    sink: ShardSink,
    *,
    step: int,
    attempt: Attempt,
    rank: int,
    config: CheckpointConfig,
    pool: Executor | None = None,
) -> ShardSummary:
    """Encode the chunks of one rank in the order given and write the whole object to ``sink``.

    ``pool``: threads that encode; None encodes here. The bytes are the same. An error of the sink passes through, and
    no thread reads a chunk any more once this has returned or raised.
    """
    for chunk in chunks:
        _check(chunk)
    output = _Output(sink)
    frames: list[list[Frame]] = [[] for _ in chunks]
    with closing(_encoded(_parts(chunks, config), config, pool)) as encoded:
        for part, stored in encoded:
            frames[part.chunk].append(
                Frame(
                    rows=part.rows,
                    offset=output.size,
                    stored_bytes=len(stored),
                    raw_bytes=len(part.raw),
                    digest=digest64(stored),
                )
            )
            output.write(stored)
    indexes = tuple(_chunk_index(chunk, own, config) for chunk, own in zip(chunks, frames, strict=True))
    index = ShardIndex(step=step, attempt=AttemptRecord.of(attempt), rank=rank, chunks=indexes)
    footer = index.model_dump_json().encode()
    output.write(footer)
    output.write(TRAILER.pack(len(footer), SHARD_VERSION, 0, MAGIC))
    return ShardSummary(
        index=index,
        size=output.size,
        digest=output.digest.hexdigest(),
        index_bytes=len(footer),
        index_digest=digest128(footer),
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """A run of rows of one chunk that becomes one frame."""

    chunk: int
    rows: tuple[int, int]
    raw: memoryview
    itemsize: int


class _Content:
    """A sink in memory."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: bytes | memoryview, /) -> None:
        self.data += data


class _Output:
    """Counts and digests what goes to the sink."""

    def __init__(self, sink: ShardSink) -> None:
        self._sink = sink
        self.size = 0
        self.digest = xxhash.xxh3_128()

    def write(self, data: bytes) -> None:
        self._sink.write(data)
        self.digest.update(data)
        self.size += len(data)


def _check(chunk: RawChunk) -> None:
    width, rows = row_bytes(chunk.sizes, chunk.itemsize), num_rows(chunk.sizes)
    if chunk.itemsize != itemsize_of(chunk.dtype) or chunk.data.nbytes != rows * width:
        raise ValueError(
            f"chunk {chunk.name} of {chunk.dtype} {chunk.sizes} must hold {rows * width} bytes of "
            f"{itemsize_of(chunk.dtype)}-byte elements, not {chunk.data.nbytes} of {chunk.itemsize}-byte elements"
        )


def _parts(chunks: Sequence[RawChunk], config: CheckpointConfig) -> Iterator[_Part]:
    for number, chunk in enumerate(chunks):
        raw = chunk.data.cast("B")
        width, rows = row_bytes(chunk.sizes, chunk.itemsize), num_rows(chunk.sizes)
        target = min(config.frame_bytes, max(_SMALLEST_TARGET, len(raw) // 16))
        step = max(1, target // width) if rows else 1
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            yield _Part(number, (start, stop), raw[start * width : stop * width], chunk.itemsize)


def _encoded(parts: Iterator[_Part], config: CheckpointConfig, pool: Executor | None) -> Generator[tuple[_Part, bytes]]:
    """Every part with its stored bytes, in order."""
    if pool is None:
        for part in parts:
            yield part, _encode(part, config)
        return
    pending: deque[tuple[_Part, Future[bytes]]] = deque()
    pending_bytes = 0
    try:
        for part in parts:
            while pending and (pending_bytes + len(part.raw) > _WINDOW_BYTES or len(pending) >= _WINDOW_FRAMES):
                yield pending[0][0], pending[0][1].result(timeout=_ENCODE_TIMEOUT_S)
                pending_bytes -= len(pending.popleft()[0].raw)
            pending.append((part, pool.submit(_encode, part, config)))
            pending_bytes += len(part.raw)
        while pending:
            yield pending[0][0], pending[0][1].result(timeout=_ENCODE_TIMEOUT_S)
            pending.popleft()
    finally:
        # The caller may take the chunks' memory back next, so no thread may still be reading it.
        running = [future for _, future in pending if not future.cancel()]
        wait(running, timeout=_ENCODE_TIMEOUT_S)


def _encode(part: _Part, config: CheckpointConfig) -> bytes:
    return encode(part.raw, part.itemsize, config.encoding, config.zstd_level)


def _chunk_index(chunk: RawChunk, frames: Sequence[Frame], config: CheckpointConfig) -> ChunkIndex:
    return ChunkIndex(
        name=chunk.name,
        dtype=chunk.dtype,
        offsets=chunk.offsets,
        sizes=chunk.sizes,
        level=chunk.level,
        encoding=config.encoding,
        raw_digest=digest64(chunk.data),
        frames=tuple(frames),
    )

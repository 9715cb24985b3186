"""Writes a Shard object front to back: frames encoded in parallel, written in order, then the index and the trailer.

Memory stays within a few frames, however large the Shard. Where the bytes go is the sink's affair.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import xxhash

from storage.bounded import round_mantissa
from storage.codec import Buffer, CodecError, decode, digest64, digest128, encode
from storage.config import CheckpointConfig
from storage.keys import Attempt
from storage.manifest import SHARD_VERSION, AttemptRecord, ChunkIndex, Frame, ShardIndex, ShardRecord
from storage.moments import KeptMoment, plan_moments
from storage.ordered import in_order
from storage.shard_format import MAGIC, TRAILER, RawChunk, itemsize_of, num_rows, row_bytes

__all__ = ["EncodedShard", "RawChunk", "ShardSink", "ShardSummary", "encode_shard", "write_shard"]

_SMALLEST_TARGET: Final = 256 << 10


class ShardSink(Protocol):
    """Takes the bytes of one Shard object in order. It must not keep ``data`` beyond the call."""

    def write(self, data: bytes | memoryview, /) -> object: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSummary:
    """What was written: all that the ShardRecord of the object needs to say.

    ``lossless_fallbacks``: chunks that should have been rounded and were kept exactly, as no rounding kept the bound.
    """

    index: ShardIndex
    size: int
    digest: str
    index_bytes: int
    index_digest: str
    lossless_fallbacks: int = 0

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
        lossless_fallbacks=summary.lossless_fallbacks,
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
    moments = plan_moments(chunks, config, pool)
    output = _Output(sink)
    chunk_outputs = [_ChunkOutput(chunk) for chunk in chunks]

    def encode_part(part: _Part) -> _EncodedPart:
        return _encode(part, config)

    parts = _parts(chunks, moments, config)
    with closing(in_order(encode_part, parts, lambda part: len(part.raw), pool)) as encoded:
        for part, result in encoded:
            chunk_outputs[part.chunk].add(part, result, output)
    indexes = tuple(own.index(moments.get(number), config) for number, own in enumerate(chunk_outputs))
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
        lossless_fallbacks=sum(moment.mantissa_bits is None for moment in moments.values()),
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """A run of rows of one chunk that becomes one frame."""

    chunk: int
    rows: tuple[int, int]
    raw: memoryview
    itemsize: int
    mantissa_bits: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _EncodedPart:
    """The stored bytes of a part and what they decode to."""

    stored: bytes
    raw: Buffer


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


class _ChunkOutput:
    """Collects what the index says of one chunk while its frames go by."""

    def __init__(self, chunk: RawChunk) -> None:
        self._chunk = chunk
        self._frames: list[Frame] = []
        self._raw_digest = xxhash.xxh3_64()

    def add(self, part: _Part, encoded: _EncodedPart, output: _Output) -> None:
        self._frames.append(
            Frame(
                rows=part.rows,
                offset=output.size,
                stored_bytes=len(encoded.stored),
                raw_bytes=len(encoded.raw),
                digest=digest64(encoded.stored),
            )
        )
        self._raw_digest.update(encoded.raw)
        output.write(encoded.stored)

    def index(self, moment: KeptMoment | None, config: CheckpointConfig) -> ChunkIndex:
        bits = None if moment is None else moment.mantissa_bits
        return ChunkIndex(
            name=self._chunk.name,
            dtype=self._chunk.dtype,
            offsets=self._chunk.offsets,
            sizes=self._chunk.sizes,
            level=self._chunk.level,
            encoding=config.encoding,
            bound=None if bits is None else config.moment_bound,
            mantissa_bits=bits,
            update_error=None if moment is None else moment.error,
            raw_digest=self._raw_digest.hexdigest(),
            frames=tuple(self._frames),
        )


def _check(chunk: RawChunk) -> None:
    width, rows = row_bytes(chunk.sizes, chunk.itemsize), num_rows(chunk.sizes)
    if chunk.itemsize != itemsize_of(chunk.dtype) or chunk.data.nbytes != rows * width:
        raise ValueError(
            f"chunk {chunk.name} of {chunk.dtype} {chunk.sizes} must hold {rows * width} bytes of "
            f"{itemsize_of(chunk.dtype)}-byte elements, not {chunk.data.nbytes} of {chunk.itemsize}-byte elements"
        )


def _parts(chunks: Sequence[RawChunk], moments: Mapping[int, KeptMoment], config: CheckpointConfig) -> Iterator[_Part]:
    for number, chunk in enumerate(chunks):
        bits = moments[number].mantissa_bits if number in moments else None
        raw = chunk.data.cast("B")
        width, rows = row_bytes(chunk.sizes, chunk.itemsize), num_rows(chunk.sizes)
        target = min(config.frame_bytes, max(_SMALLEST_TARGET, len(raw) // 16))
        step = max(1, target // width) if rows else 1
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            yield _Part(number, (start, stop), raw[start * width : stop * width], chunk.itemsize, bits)


def _encode(part: _Part, config: CheckpointConfig) -> _EncodedPart:
    if part.mantissa_bits is None:
        return _EncodedPart(stored=encode(part.raw, part.itemsize, config.encoding, config.zstd_level), raw=part.raw)
    raw = round_mantissa(np.frombuffer(part.raw, np.uint32), part.mantissa_bits).data.cast("B")
    stored = encode(raw, part.itemsize, config.encoding, config.zstd_level)
    # The bound was verified on the rounded values: it holds of the Checkpoint when the stored bytes decode to them.
    if digest64(decode(stored, len(raw), part.itemsize, config.encoding)) != digest64(raw):
        raise CodecError(
            f"rows {part.rows} of a rounded tensor do not decode to what was encoded with {config.encoding}"
        )
    return _EncodedPart(stored=stored, raw=raw)

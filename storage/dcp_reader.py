"""Fills tensors from the Shards of one Manifest, as a DCP StorageReader: each rank reads only the frames it needs.

The Manifest comes in as a checked value; which Checkpoint that is was decided before. Every byte that reaches a tensor
has passed its frame's digest.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from storage.dcp_writer import named_dtype
from storage.errors import CorruptCheckpoint, ObjectMissing, StorageError
from storage.frames import decode_frame, read_index
from storage.manifest import ChunkIndex, Manifest, ShardIndex, ShardRecord, TensorLayout
from storage.sources import ShardLocation, ShardRange, ShardSource
from storage.spans import affordable_gap, join_ranges

__all__ = ["ManifestReader"]

T = TypeVar("T")

# One request costs about as long as transferring this many bytes.
_LARGEST_GAP = 256 << 10
# Gaps up to here are always read across; wider ones as long as all of them stay within this share of what is needed.
_SMALL_GAP = 16 << 10
_SPARE_SHARE = 0.02
_LARGEST_SPAN = 16 << 20
_SMALLEST_SPAN = 1 << 20
_ChunkKey = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Part:
    """One read item, the stored chunk that it is cut from and the tensor that it fills."""

    item: ReadItem
    chunk: ChunkIndex
    target: torch.Tensor

    @property
    def rows(self) -> tuple[int, int]:
        if not self.chunk.sizes:
            return 0, 1
        start = self.item.storage_offsets[0]
        return start, start + self.item.lengths[0]

    def take(self, rows: tuple[int, int], raw: bytes | bytearray | memoryview) -> None:
        """Copy what this part needs of the decoded ``rows`` of its chunk."""
        if memoryview(raw).readonly:  # torch warns of it, though nothing is written here
            raw = bytearray(raw)
        block = torch.frombuffer(raw, dtype=named_dtype(self.chunk.dtype))
        if not self.chunk.sizes:
            self.target.copy_(block.view(self.target.shape))
            return
        block = block.view(-1, *self.chunk.sizes[1:])
        first, last = self.rows
        start, stop = max(first, rows[0]), min(last, rows[1])
        block = block.narrow(0, start - rows[0], stop - start)
        for dim in range(1, block.ndim):
            block = block.narrow(dim, self.item.storage_offsets[dim], self.item.lengths[dim])
        self.target.narrow(0, start - first, stop - start).copy_(block)


@dataclass(frozen=True, slots=True)
class _Piece:
    """One frame and the parts that need rows of it: fetched once, checked once, decoded once."""

    chunk: ChunkIndex
    number: int
    parts: list[_Part]

    @property
    def stored(self) -> tuple[int, int]:
        frame = self.chunk.frames[self.number]
        return frame.offset, frame.offset + frame.stored_bytes


@dataclass(frozen=True, slots=True)
class _Job:
    """Bytes ``[start, stop)`` of one Shard and the frames in them."""

    record: ShardRecord
    start: int
    stop: int
    pieces: list[_Piece]


class ManifestReader(StorageReader):
    """Reads from ``manifest`` through ``source``. Each Shard's index is fetched once and kept.

    ``memory_bytes`` bounds what all threads together hold of fetched, not yet copied bytes, as long as a frame is
    smaller than a thread's share.
    """

    def __init__(
        self,
        manifest: Manifest,
        locations: Sequence[ShardLocation],
        source: ShardSource,
        *,
        num_threads: int = 4,
        memory_bytes: int = 128 << 20,
    ) -> None:
        self._manifest = manifest
        # Made here: DCP would hide an error of read_metadata behind an assertion.
        self._metadata = Metadata({name: _tensor_metadata(layout) for name, layout in manifest.tensors.items()})
        self._source = source
        self._num_threads = num_threads
        # A thread holds a span and, of it, one decoded frame.
        self._largest_span = min(_LARGEST_SPAN, max(_SMALLEST_SPAN, memory_bytes // (2 * num_threads)))
        self._locations = {location.rank: location for location in locations}
        self._records = {record.rank: record for record in manifest.shards}
        self._indexes: dict[int, dict[_ChunkKey, ChunkIndex]] = {}
        self._index_locks = {rank: threading.Lock() for rank in self._records}
        self._places = {
            (name, chunk.offsets): chunk for name, layout in manifest.tensors.items() for chunk in layout.chunks
        }

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002  # DCP's signature
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        return False  # never chosen by path

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_rank: dict[int, list[tuple[ReadItem, torch.Tensor]]] = {}
        targets: list[tuple[ReadItem, torch.Tensor]] = []
        for item in plan.items:
            target = planner.resolve_tensor(item).detach()
            targets.append((item, target))
            if 0 not in item.lengths:
                by_rank.setdefault(self._holder(item), []).append((item, target))
        planned = self._all([partial(self._jobs, rank, items) for rank, items in by_rank.items()])
        self._all([partial(self._read, job) for jobs in planned for job in jobs])
        for item, target in targets:
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _all(self, calls: list[Callable[[], T]]) -> list[T]:
        """What each call returns, or the first error. One alone, as with a small state in memory, needs no thread."""
        if len(calls) <= 1:
            return [call() for call in calls]
        with ThreadPoolExecutor(min(len(calls), self._num_threads), thread_name_prefix="shard-read") as pool:
            return _results([pool.submit(call) for call in calls])

    def _holder(self, item: ReadItem) -> int:
        name = item.storage_index.fqn
        if item.type == LoadItemType.BYTE_IO or item.storage_index.offset is None:
            raise StorageError(f"{name} is no tensor; plain values are in the Manifest's JSON")
        return self._places[name, tuple(item.storage_index.offset)].rank

    def _jobs(self, rank: int, items: list[tuple[ReadItem, torch.Tensor]]) -> list[_Job]:
        """The reads of one Shard: each needed frame once, neighbours joined."""
        record = self._records[rank]
        parts: dict[_ChunkKey, list[_Part]] = {}
        for item, target in items:
            key = (item.storage_index.fqn, tuple(item.storage_index.offset or ()))
            parts.setdefault(key, []).append(_Part(item, self._chunk(record, *key), target))
        pieces = [piece for own in parts.values() for piece in _pieces(own)]
        ranges = [piece.stored for piece in pieces]
        needed = sum(stop - start for start, stop in ranges)
        gap = affordable_gap(ranges, smallest=_SMALL_GAP, largest=_LARGEST_GAP, spare_bytes=int(_SPARE_SHARE * needed))
        spans = join_ranges(ranges, largest_gap=gap, largest_span=self._largest_span)
        return [_Job(record, span.start, span.stop, [pieces[member] for member in span.members]) for span in spans]

    def _chunk(self, record: ShardRecord, name: str, offsets: tuple[int, ...]) -> ChunkIndex:
        """The chunk in the Shard's own index, which must be what was committed."""
        chunk = self._index(record.rank).get((name, offsets))
        committed = (self._manifest.tensors[name].dtype, self._places[name, offsets].sizes)
        if chunk is None or (chunk.dtype, chunk.sizes) != committed:
            stored = "no chunk" if chunk is None else f"{chunk.dtype} {chunk.sizes}"
            raise self._corrupt(record, f"its index lists {stored} of {name} at {offsets}, committed {committed}")
        return chunk

    def _read(self, job: _Job) -> None:
        self._checked(job.record, partial(self._fill, job))

    def _fill(self, job: _Job, fetch: ShardRange) -> None:
        record, step = job.record, self._manifest.step
        content = memoryview(fetch(job.start, job.stop - job.start))
        for piece in job.pieces:
            start, stop = piece.stored
            stored = content[start - job.start : stop - job.start]
            raw = decode_frame(piece.chunk, piece.number, stored, step=step, key=record.key, rank=record.rank)
            for part in piece.parts:
                part.take(piece.chunk.frames[piece.number].rows, raw)

    def _index(self, rank: int) -> dict[_ChunkKey, ChunkIndex]:
        record = self._records[rank]
        with self._index_locks[rank]:
            if rank not in self._indexes:
                index = self._checked(record, partial(self._parse, record))
                self._indexes[rank] = {(chunk.name, chunk.offsets): chunk for chunk in index.chunks}
            return self._indexes[rank]

    def _parse(self, record: ShardRecord, fetch: ShardRange) -> ShardIndex:
        return read_index(lambda offset, length: bytes(fetch(offset, length)), record, step=self._manifest.step)

    def _checked(self, record: ShardRecord, take: Callable[[ShardRange], T]) -> T:
        """What ``take`` makes of the Shard; where it refuses the bytes, of another copy of it."""
        location = self._location(record)
        try:
            return take(partial(self._source.read_range, location))
        except ObjectMissing as error:
            raise self._corrupt(record, str(error)) from error
        except CorruptCheckpoint:
            for copy in self._source.other_copies(location):
                with contextlib.suppress(StorageError):
                    return take(copy)
            raise

    def _location(self, record: ShardRecord) -> ShardLocation:
        location = self._locations.get(record.rank)
        if location is None:
            raise StorageError(
                f"step {self._manifest.step}: the restore plan names no source for the Shard of rank {record.rank} "
                f"({record.key}); make a new plan"
            )
        return location

    def _corrupt(self, record: ShardRecord, reason: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(self._manifest.step, record.key, reason, record.rank)


def _results(futures: list[concurrent.futures.Future[T]]) -> list[T]:
    """All results, or the first error; what has not begun by then never does."""
    try:
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()


def _pieces(parts: list[_Part]) -> list[_Piece]:
    """The frames of one chunk that its parts need."""
    chunk = parts[0].chunk
    pieces = []
    for number, frame in enumerate(chunk.frames):
        needing = [part for part in parts if part.rows[0] < frame.rows[1] and frame.rows[0] < part.rows[1]]
        if needing:
            pieces.append(_Piece(chunk, number, needing))
    return pieces


def _tensor_metadata(layout: TensorLayout) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=named_dtype(layout.dtype)),
        size=torch.Size(layout.shape),
        chunks=[
            ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes))
            for chunk in layout.chunks
        ],
    )

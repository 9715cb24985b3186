"""Fills tensors from the Shards of one Manifest, as a DCP StorageReader: each rank reads only the frames it needs.

The Manifest comes in as a checked value; which Checkpoint that is was decided before. Every byte that reaches a tensor
has passed its frame's digest.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

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
from storage.frames import Fetch, read_index, read_rows
from storage.manifest import ChunkIndex, Manifest, ShardRecord, TensorLayout
from storage.sources import ShardLocation, ShardSource
from storage.spans import join_ranges

__all__ = ["ManifestReader"]

# One request costs about as long as transferring this many bytes.
_LARGEST_GAP = 256 << 10
_LARGEST_SPAN = 32 << 20
_ChunkKey = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Part:
    """One read item and the stored chunk that it is cut from."""

    item: ReadItem
    chunk: ChunkIndex

    @property
    def rows(self) -> tuple[int, int]:
        if not self.chunk.sizes:
            return 0, 1
        start = self.item.storage_offsets[0]
        return start, start + self.item.lengths[0]

    @property
    def stored(self) -> tuple[int, int]:
        """Bytes of the object that the frames of these rows take."""
        start, stop = self.rows
        needed = [frame for frame in self.chunk.frames if frame.rows[0] < stop and frame.rows[1] > start]
        return needed[0].offset, needed[-1].offset + needed[-1].stored_bytes

    def block(self, raw: bytes) -> torch.Tensor:
        """The rows' bytes as a tensor, cut to the item in the other dimensions."""
        block = torch.frombuffer(raw, dtype=named_dtype(self.chunk.dtype))
        if not self.chunk.sizes:
            return block.view(())
        block = block.view(-1, *self.chunk.sizes[1:])
        for dim in range(1, block.ndim):
            block = block.narrow(dim, self.item.storage_offsets[dim], self.item.lengths[dim])
        return block


@dataclass(frozen=True, slots=True)
class _Job:
    """Bytes ``[start, stop)`` of one Shard and what is in them."""

    record: ShardRecord
    start: int
    stop: int
    parts: list[_Part]


class ManifestReader(StorageReader):
    """Reads from ``manifest`` through ``source``. Each Shard's index is fetched once and kept."""

    def __init__(
        self,
        manifest: Manifest,
        locations: Sequence[ShardLocation],
        source: ShardSource,
        *,
        num_threads: int = 4,
    ) -> None:
        self._manifest = manifest
        # Made here: DCP would hide an error of read_metadata behind an assertion.
        self._metadata = Metadata({name: _tensor_metadata(layout) for name, layout in manifest.tensors.items()})
        self._source = source
        self._num_threads = num_threads
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
        by_rank: dict[int, list[ReadItem]] = {}
        for item in plan.items:
            if 0 not in item.lengths:
                by_rank.setdefault(self._holder(item), []).append(item)
        with ThreadPoolExecutor(self._num_threads, thread_name_prefix="shard-read") as pool:
            for jobs in [pool.submit(self._jobs, rank, items) for rank, items in by_rank.items()]:
                for pending in [pool.submit(self._read, job, planner) for job in jobs.result()]:
                    pending.result()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _holder(self, item: ReadItem) -> int:
        name = item.storage_index.fqn
        if item.type == LoadItemType.BYTE_IO or item.storage_index.offset is None:
            raise StorageError(f"{name} is no tensor; plain values are in the Manifest's JSON")
        return self._places[name, tuple(item.storage_index.offset)].rank

    def _jobs(self, rank: int, items: list[ReadItem]) -> list[_Job]:
        """The reads of one Shard, small neighbours joined."""
        record = self._records[rank]
        index = self._index(rank)
        parts: list[_Part] = []
        for item in items:
            name, offsets = item.storage_index.fqn, tuple(item.storage_index.offset or ())
            chunk = index.get((name, offsets))
            layout = self._manifest.tensors[name]
            committed = (layout.dtype, self._places[name, offsets].sizes)
            if chunk is None or (chunk.dtype, chunk.sizes) != committed:
                stored = "no chunk" if chunk is None else f"{chunk.dtype} {chunk.sizes}"
                raise self._corrupt(record, f"its index lists {stored} of {name} at {offsets}, committed {committed}")
            parts.append(_Part(item, chunk))
        spans = join_ranges([part.stored for part in parts], largest_gap=_LARGEST_GAP, largest_span=_LARGEST_SPAN)
        return [_Job(record, span.start, span.stop, [parts[member] for member in span.members]) for span in spans]

    def _read(self, job: _Job, planner: LoadPlanner) -> None:
        record, start = job.record, job.start
        fetch: Fetch = partial(self._source.read_range, self._location(record))
        try:
            if len(job.parts) > 1:
                fetch = _within(fetch(start, job.stop - start), start)
            for part in job.parts:
                raw = read_rows(
                    part.chunk, *part.rows, fetch, step=self._manifest.step, key=record.key, rank=record.rank
                )
                target = planner.resolve_tensor(part.item).detach()
                target.copy_(part.block(raw))
                planner.commit_tensor(part.item, target)
        except ObjectMissing as error:
            raise self._corrupt(record, str(error)) from error

    def _index(self, rank: int) -> dict[_ChunkKey, ChunkIndex]:
        record = self._records[rank]
        with self._index_locks[rank]:
            if rank not in self._indexes:
                location = self._location(record)
                try:
                    index = read_index(partial(self._source.read_range, location), record, step=self._manifest.step)
                except ObjectMissing as error:
                    raise self._corrupt(record, str(error)) from error
                self._indexes[rank] = {(chunk.name, chunk.offsets): chunk for chunk in index.chunks}
            return self._indexes[rank]

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


def _within(content: bytes, start: int) -> Fetch:
    """Reads of an object served from its bytes ``content``, which begin at ``start``."""
    return lambda offset, length: content[offset - start : offset - start + length]


def _tensor_metadata(layout: TensorLayout) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=named_dtype(layout.dtype)),
        size=torch.Size(layout.shape),
        chunks=[
            ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes))
            for chunk in layout.chunks
        ],
    )

"""Fills tensors from the Shards of one Manifest, as a DCP StorageReader: each rank reads only the frames it needs.

The Manifest comes in as a checked value; which Checkpoint that is was decided before. Every byte that reaches a tensor
has passed its frame's digest.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
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
from storage.frames import read_index, read_rows
from storage.manifest import ChunkIndex, Manifest, ShardRecord, TensorLayout
from storage.sources import ShardLocation, ShardSource

__all__ = ["ManifestReader"]

_ChunkKey = tuple[str, tuple[int, ...]]


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
        self._holders = {
            (name, chunk.offsets): chunk.rank for name, layout in manifest.tensors.items() for chunk in layout.chunks
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
        items = [item for item in plan.items if 0 not in item.lengths]
        with ThreadPoolExecutor(self._num_threads, thread_name_prefix="shard-read") as pool:
            for pending in [pool.submit(self._read_item, item, planner) for item in items]:
                pending.result()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_item(self, item: ReadItem, planner: LoadPlanner) -> None:
        name = item.storage_index.fqn
        if item.type == LoadItemType.BYTE_IO or item.storage_index.offset is None:
            raise StorageError(f"{name} is no tensor; plain values are in the Manifest's JSON")
        offsets = tuple(item.storage_index.offset)
        rank = self._holders[name, offsets]
        record = self._records[rank]
        try:
            index = self._index(rank).get((name, offsets))
            if index is None:
                raise self._corrupt(record, f"its index lists no chunk of {name} at {offsets}")
            block = self._block(record, index, item)
        except ObjectMissing as error:
            raise self._corrupt(record, str(error)) from error
        target = planner.resolve_tensor(item).detach()
        target.copy_(block)
        planner.commit_tensor(item, target)

    def _block(self, record: ShardRecord, index: ChunkIndex, item: ReadItem) -> torch.Tensor:
        layout = self._manifest.tensors[index.name]
        start, count = (item.storage_offsets[0], item.lengths[0]) if index.sizes else (0, 1)
        if index.dtype != layout.dtype:
            raise self._corrupt(record, f"{index.name} is stored as {index.dtype}, committed {layout.dtype}")
        raw = read_rows(
            index,
            start,
            start + count,
            lambda offset, length: self._source.read_range(self._location(record), offset, length),
            step=self._manifest.step,
            key=record.key,
            rank=record.rank,
        )
        block = torch.frombuffer(raw, dtype=named_dtype(index.dtype))
        if not index.sizes:
            return block.view(())
        block = block.view(count, *index.sizes[1:])
        for dim in range(1, block.ndim):
            block = block.narrow(dim, item.storage_offsets[dim], item.lengths[dim])
        return block

    def _index(self, rank: int) -> dict[_ChunkKey, ChunkIndex]:
        record = self._records[rank]
        with self._index_locks[rank]:
            if rank not in self._indexes:
                location = self._location(record)
                index = read_index(
                    lambda offset, length: self._source.read_range(location, offset, length),
                    record,
                    step=self._manifest.step,
                )
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


def _tensor_metadata(layout: TensorLayout) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=named_dtype(layout.dtype)),
        size=torch.Size(layout.shape),
        chunks=[
            ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes))
            for chunk in layout.chunks
        ],
    )

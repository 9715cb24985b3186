"""Copies one rank's tensors into a leased shared-memory buffer, as a DCP StorageWriter: one memcpy a tensor.

It leases and fills; sealing, waiting and giving back are the caller's. Only tensors come this way: a non-tensor in the
plan is refused, since DCP would pickle it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from storage.buffer_map import BufferMap
from storage.errors import StorageError
from storage.keeper_protocol import BufferLease
from storage.levels import LevelTable
from storage.snapshot_format import SnapshotHeader, StagedChunk, assign_offsets, write_header

__all__ = ["TENSORS", "FilledBuffer", "RankPlanner", "SnapshotWriter", "dtype_name", "named_dtype", "staged_chunk"]

# DCP logs every top-level entry of a state dict, which costs more than copying a small tensor: it gets one entry.
TENSORS = "tensors"


def dtype_name(dtype: torch.dtype) -> str:
    """As it stands in records: ``float32`` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def named_dtype(name: str) -> torch.dtype:
    """The inverse of `dtype_name`. Raises StorageError for a name that is no dtype."""
    dtype = getattr(torch, name, None) if name.isidentifier() else None
    if not isinstance(dtype, torch.dtype):
        raise StorageError(
            f"{name!r} is no tensor type of this torch; read the Checkpoint with the build that wrote it"
        )
    return dtype


class RankPlanner(DefaultSavePlanner):
    """DCP's default plan for one rank, kept from save to save while names, shapes and the mesh stay the same.

    The cache is this object's own: torch's is the class's, and serves stale plans after a resize.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._signature: object = None
        self._local: SavePlan | None = None
        self._global: tuple[list[SavePlan], Metadata] | None = None

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict[TENSORS], storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        signature = tuple((name, _layout(tensor)) for name, tensor in self.state_dict.items())
        if self._local is None or signature != self._signature:
            self._local = super().create_local_plan()
            self._global = None
            self._signature = signature
        return self._local

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        if self._global is None:
            self._global = super().create_global_plan(all_plans)
        return self._global


def _layout(tensor: torch.Tensor) -> object:
    if not isinstance(tensor, DTensor):
        return tensor.dtype, tensor.shape
    mesh = tensor.device_mesh
    return tensor.dtype, tensor.shape, tensor.placements, mesh.shape, tuple(mesh.get_coordinate() or ())


def staged_chunk(item: WriteItem, where: str, levels: LevelTable) -> StagedChunk:
    """What ``item`` will be in a Snapshot. Raises StorageError, which begins with ``where``, for what is no tensor."""
    data = item.tensor_data
    if item.type == WriteItemType.BYTE_IO or data is None:
        raise StorageError(f"{where}: {item.index.fqn} is no tensor; plain values belong into the state's JSON")
    dtype = data.properties.dtype
    sizes = tuple(data.chunk.sizes)
    return StagedChunk(
        name=item.index.fqn,
        dtype=dtype_name(dtype),
        shape=tuple(data.size),
        offsets=tuple(data.chunk.offsets),
        sizes=sizes,
        level=levels.treatment(item.index.fqn, dtype_name(dtype)).level,
        num_bytes=math.prod(sizes) * dtype.itemsize,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FilledBuffer:
    """A leased buffer that holds the whole Snapshot and waits to be sealed."""

    lease: BufferLease
    num_bytes: int
    header_digest: str


class SnapshotWriter(StorageWriter):
    """Fills one buffer with the Snapshot that ``header`` describes but for its chunks.

    ``lease`` is asked for a buffer of so many bytes; None means there is none, and ``filled`` stays None. ``levels``
    gives each tensor its Level; what it omits is not copied.
    """

    def __init__(
        self,
        header: SnapshotHeader,
        lease: Callable[[int], BufferLease | None],
        give_back: Callable[[BufferLease], None],
        buffers: BufferMap,
        levels: LevelTable,
    ) -> None:
        self._header = header
        self._levels = levels
        self._lease = lease
        self._give_back = give_back
        self._buffers = buffers
        self.filled: FilledBuffer | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:  # noqa: ARG002  # DCP's signature
        self.filled = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        return False  # never chosen by path

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        pairs = [(item, self._chunk(item)) for item in plan.items if not self._is_omitted(item)]
        kept = [(item, chunk) for item, chunk in pairs if self._is_written(chunk)]
        header, num_bytes = assign_offsets(replace(self._header, chunks=tuple(chunk for _, chunk in kept)))
        lease = self._lease(num_bytes)
        if lease is not None:
            try:
                items = [item for item, _ in kept]
                self.filled = FilledBuffer(
                    lease=lease, num_bytes=num_bytes, header_digest=self._fill(lease, num_bytes, header, items, planner)
                )
            except BaseException:
                self._give_back(lease)
                raise
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(item.index, chunk.num_bytes, None) for item, chunk in kept if lease is not None])
        return future

    def _chunk(self, item: WriteItem) -> StagedChunk:
        where = f"rank {self._header.rank} step {self._header.step}"
        return staged_chunk(item, where, self._levels)

    def _is_omitted(self, item: WriteItem) -> bool:
        data = item.tensor_data
        if data is None:
            return False
        return self._levels.treatment(item.index.fqn, dtype_name(data.properties.dtype)).fidelity == "omit"

    def _is_written(self, chunk: StagedChunk) -> bool:
        """Empty parts of a tensor are dropped; a tensor that is empty as a whole is named once, by rank 0."""
        return chunk.num_bytes > 0 or (math.prod(chunk.shape) == 0 and self._header.rank == 0)

    def _fill(
        self,
        lease: BufferLease,
        num_bytes: int,
        header: SnapshotHeader,
        items: list[WriteItem],
        planner: SavePlanner,
    ) -> str:
        view = self._buffers.open(lease.path, num_bytes)
        for chunk, item in zip(header.chunks, items, strict=True):
            if not chunk.num_bytes:
                continue
            source = cast(torch.Tensor, planner.resolve_data(item)).detach()
            count = math.prod(chunk.sizes)
            place = torch.frombuffer(view, dtype=source.dtype, count=count, offset=chunk.data_offset)
            place.view(chunk.sizes).copy_(source)
        return write_header(view, header)

"""Lays one rank's tensors out as DCP's default planner cuts them, and copies them into a buffer: one memcpy a tensor.

Leasing, sealing and waiting are the caller's. Only tensors come this way: a non-tensor in the plan is refused, since
DCP would pickle it. The plan is kept from Snapshot to Snapshot: DCP's own save() costs more than copying a small model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from storage.errors import StorageError
from storage.levels import LevelTable
from storage.snapshot_format import SnapshotHeader, SnapshotLayout, StagedChunk, lay_out

__all__ = ["SnapshotPlanner", "copy_chunks", "dtype_name", "local_parts", "named_dtype", "staged_chunk"]


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


class SnapshotPlanner:
    """The layout of one rank's Snapshots, kept while names, shapes, mesh and rank stay the same.

    The cache is this object's own: torch's is the class's, and serves stale plans after a resize.
    """

    def __init__(self, levels: LevelTable) -> None:
        self._levels = levels
        self._signature: object = None
        self._layout: SnapshotLayout | None = None

    def plan(self, tensors: Mapping[str, torch.Tensor], header: SnapshotHeader) -> SnapshotLayout:
        """The layout of ``tensors`` with the plain state of ``header``, whose own chunks do not count."""
        signature = (
            header.rank,
            header.world_size,
            tuple((name, _layout_of(tensor)) for name, tensor in tensors.items()),
        )
        if self._layout is None or signature != self._signature or not self._layout.has_room(header):
            self._layout = lay_out(replace(header, chunks=self._chunks(tensors, header)))
            self._signature = signature
        return self._layout

    def _chunks(self, tensors: Mapping[str, torch.Tensor], header: SnapshotHeader) -> tuple[StagedChunk, ...]:
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(tensors), is_coordinator=True)
        plans, _ = planner.create_global_plan([planner.create_local_plan()])
        where = f"rank {header.rank} step {header.step}"
        kept = []
        for item in planner.finish_plan(plans[0]).items:
            chunk = staged_chunk(item, where, self._levels)
            is_omitted = self._levels.treatment(chunk.name, chunk.dtype).fidelity == "omit"
            # Empty parts of a tensor are dropped; a tensor that is empty as a whole is named once, by rank 0.
            if not is_omitted and (chunk.num_bytes > 0 or (math.prod(chunk.shape) == 0 and header.rank == 0)):
                kept.append(chunk)
        return tuple(kept)


def local_parts(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What this rank holds of each tensor: the living memory, nothing is copied."""
    with torch.no_grad():
        return {
            name: tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
            for name, tensor in tensors.items()
        }


def copy_chunks(view: memoryview, chunks: Sequence[StagedChunk], parts: Mapping[str, torch.Tensor]) -> None:
    """Copy the local part of each chunk's tensor to its place."""
    with torch.no_grad():
        for chunk in chunks:
            if not chunk.num_bytes:
                continue
            part = parts[chunk.name]
            place = torch.frombuffer(view, dtype=part.dtype, count=math.prod(chunk.sizes), offset=chunk.data_offset)
            place.view(chunk.sizes).copy_(part)


def _layout_of(tensor: torch.Tensor) -> object:
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

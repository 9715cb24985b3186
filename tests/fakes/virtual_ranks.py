"""Worlds of any size in one process: every rank's part of a sharded state, planned and moved as its process would.

Tensors are cut along dimension 0 as FSDP2 cuts them. The calls and their order are those of
`torch.distributed.checkpoint`; only the collectives between them are plain lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

__all__ = ["load_as", "part_of", "save_as"]

Tensors = Mapping[str, torch.Tensor]


def part_of(tensor: torch.Tensor, rank: int, world_size: int) -> tuple[tuple[int, ...], torch.Tensor]:
    """Offsets and the view of what ``rank`` holds of ``tensor``; one without dimensions is whole on rank 0."""
    if tensor.ndim == 0:
        return (), tensor if rank == 0 else tensor.new_empty(0)
    share = -(-tensor.shape[0] // world_size)
    start = min(rank * share, tensor.shape[0])
    stop = min(start + share, tensor.shape[0])
    return (start, *(0 for _ in tensor.shape[1:])), tensor[start:stop]


def _parts(tensors: Tensors, rank: int, world_size: int) -> Iterator[tuple[str, tuple[int, ...], torch.Tensor]]:
    for name, tensor in tensors.items():
        offsets, part = part_of(tensor, rank, world_size)
        if tensor.ndim or rank == 0:
            yield name, offsets, part


class _SavePlanner(DefaultSavePlanner):
    def __init__(self, tensors: Tensors, rank: int, world_size: int) -> None:
        super().__init__()
        self._parts = {(name, offsets): part for name, offsets, part in _parts(tensors, rank, world_size)}
        self._tensors = tensors

    def create_local_plan(self) -> SavePlan:
        items = []
        for (name, offsets), part in self._parts.items():
            tensor = self._tensors[name]
            data = TensorWriteData(
                chunk=ChunkStorageMetadata(torch.Size(offsets), part.shape),
                properties=TensorProperties.create_from_tensor(part),
                size=tensor.shape,
            )
            items.append(WriteItem(MetadataIndex(name, torch.Size(offsets)), WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._parts[index.fqn, tuple(index.offset or ())]


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self, tensors: Tensors, rank: int, world_size: int) -> None:
        super().__init__()
        self._parts = {(name, offsets): part for name, offsets, part in _parts(tensors, rank, world_size)}

    def local_plan(self, metadata: Metadata) -> LoadPlan:
        items: list[ReadItem] = []
        for (name, offsets), part in self._parts.items():
            stored = metadata.state_dict_metadata[name]
            own = ChunkStorageMetadata(torch.Size(offsets), part.shape)
            items += create_read_items_for_chunk_list(name, stored, [own])  # type: ignore[arg-type]
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._parts[index.fqn, tuple(index.offset or ())]


def save_as(writers: Sequence[StorageWriter], tensors: Tensors) -> None:
    """Save ``tensors`` as a world of ``len(writers)`` ranks would; the first writer is the coordinator's."""
    size = len(writers)
    planners = [_SavePlanner(tensors, rank, size) for rank in range(size)]
    for rank, writer in enumerate(writers):
        writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
    plans = [
        writer.prepare_local_plan(planner.create_local_plan())
        for writer, planner in zip(writers, planners, strict=True)
    ]
    plans, metadata = create_default_global_save_plan(plans)
    plans = writers[0].prepare_global_plan(plans)
    results = [
        writer.write_data(plan, planner).wait() for writer, plan, planner in zip(writers, plans, planners, strict=True)
    ]
    writers[0].finish(metadata, results)


def load_as(readers: Sequence[StorageReader], tensors: Tensors) -> None:
    """Fill ``tensors`` as a world of ``len(readers)`` ranks would, one rank after another."""
    size = len(readers)
    planners = [_LoadPlanner(tensors, rank, size) for rank in range(size)]
    plans = []
    for rank, (reader, planner) in enumerate(zip(readers, planners, strict=True)):
        metadata = reader.read_metadata()
        reader.set_up_storage_reader(metadata, rank == 0, rank=rank, use_collectives=True)
        plans.append(reader.prepare_local_plan(planner.local_plan(metadata)))
    plans = readers[0].prepare_global_plan(plans)
    for reader, plan, planner in zip(readers, plans, planners, strict=True):
        reader.read_data(plan, planner).wait()

"""`RaysumeWriter`: saves a state dict of any torch program as a Checkpoint, under DCP's own protocol, without Ray.

Each rank encodes and stores its part as one Shard; the coordinator rank alone merges the Receipts and writes Manifest
and Commit. Nothing is pickled into the store. Order, as `torch.distributed.checkpoint.save` calls it: stage (async_save
only), storage_meta, set_up_storage_writer, prepare_local_plan, prepare_global_plan (coordinator), write_data, finish
(coordinator).
"""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping
from concurrent.futures import Future as StagingFuture
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from pydantic import JsonValue
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from storage.config import CheckpointConfig
from storage.dcp_commit import RankReport, commit_save
from storage.dcp_lineage import Lineage, SaveTicket, lineage_of
from storage.dcp_state import aliases_of, flat_state, paths_of, plain_values, refuse_unstorable
from storage.dcp_writer import staged_chunk
from storage.errors import StorageError
from storage.keys import MAX_STEP, shard_key
from storage.levels import LevelTable
from storage.manifest import AttemptRecord, Commit, Receipt
from storage.shard_writer import RawChunk, encode_shard
from storage.shipping import tensor_layouts
from storage.snapshot_format import SnapshotHeader, StagedChunk

__all__ = ["RaysumeWriter"]

_MAX_ENCODERS = 4


class RaysumeWriter(StorageWriter):
    """Saves step ``step`` under ``url``. One object for each save, made alike on every rank.

    ``keep``: Checkpoints kept after this one is committed; None deletes nothing. ``base_step``: the step that training
    went on from, where this process did not load it with a `RaysumeReader`. ``metric`` (lower is better) shields the
    best Checkpoint from deletion. ``metadata`` goes into the Manifest, and so do the plain sections ``shared_state``
    (of rank 0) and ``rank_state`` (of each rank), for readers of their own. Credentials come from the environment.
    """

    # DCP asks these of a stager; `stage` copies before it returns, so there is nothing to wait for.
    _synchronize_after_execute = False
    should_synchronize_after_execute = False

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        step: int,
        keep: int | None = None,
        base_step: int | None = None,
        loss: float | None = None,
        metric: float | None = None,
        metadata: Mapping[str, JsonValue] | None = None,
        shared_state: Mapping[str, JsonValue] | None = None,
        rank_state: Mapping[str, JsonValue] | None = None,
        config: CheckpointConfig | None = None,
    ) -> None:
        self._url = os.fspath(url)
        self._step = _whole("step", step, 0)
        self._keep = None if keep is None else _whole("keep", keep, 1)
        self._base_step = None if base_step is None else _whole("base_step", base_step, 0)
        if self._base_step is not None and self._base_step > self._step:
            raise ValueError(f"base_step {base_step}: expected at most the step that is saved, {step}")
        self._loss = None if loss is None else _measure("loss", loss)
        self._metric = None if metric is None else _measure("metric", metric)
        self._metadata = dict(metadata or {})
        self._shared_state, self._rank_state = dict(shared_state or {}), dict(rank_state or {})
        self._config = config or CheckpointConfig()
        self._rank = 0
        self.commit: Commit | None = None
        """What the coordinator rank wrote, once it has."""

    @property
    def _lineage(self) -> Lineage:
        # Looked up, never held: async_save may send this object to a process of its own.
        return lineage_of(self._url, self._config.store)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any] | StagingFuture[dict[str, Any]]:
        """A copy in host memory that later changes of the state do not reach; async_save calls it before it returns."""
        stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )
        staged = stager.stage(state_dict)
        self._lineage.begin(self._step)
        return staged

    def synchronize_staging(self) -> None:
        pass

    def close(self) -> None:
        pass

    def __getstate__(self) -> dict[str, Any]:
        self._lineage.forget(self._step)
        return self.__dict__

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            raise ValueError(
                f"checkpoint_id {checkpoint_id!r}: a RaysumeWriter has its url and step already; leave it out"
            )

    def storage_meta(self) -> StorageMeta | None:
        # The first that DCP asks in the thread that saves.
        self._lineage.start(self._step)
        return None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self._rank = int(kwargs.get("rank", 0))
        if not kwargs.get("use_collectives", True):
            raise StorageError(
                f"{self._where}: use_collectives=False leaves nobody to merge the ranks' parts into one Checkpoint; "
                "leave it on"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        ticket = self._lineage.ticket(self._step, base_step=self._base_step)
        tickets = [replace(ticket, rank=rank, world_size=len(plans)) for rank in range(len(plans))]
        return [replace(plan, storage_data=own) for plan, own in zip(plans, tickets, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        report = self._write(self._ticket(plan), plan, planner)
        future: Future[list[WriteResult]] = Future()
        size = report.receipt.shard.size
        future.set_result([WriteResult(MetadataIndex("raysume"), size_in_bytes=size, storage_data=report)])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:  # noqa: ARG002  # DCP's signature
        self.commit = commit_save(
            self._lineage,
            [result.storage_data for own in results for result in own],
            keep=self._keep,
            loss=self._loss,
            metric=self._metric,
            metadata=self._metadata,
            orphan_grace_s=self._config.orphan_grace_s,
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        return False  # never chosen by path

    @property
    def _where(self) -> str:
        return f"rank {self._rank} step {self._step}"

    def _ticket(self, plan: SavePlan) -> SaveTicket:
        ticket = plan.storage_data
        if isinstance(ticket, SaveTicket) and ticket.rank == self._rank and ticket.step != self._step:
            raise StorageError(
                f"{self._where}: the coordinator rank saves step {ticket.step}, not {self._step}; "
                "give every rank's RaysumeWriter the same step, and one writer to each save"
            )
        if not isinstance(ticket, SaveTicket) or ticket.rank != self._rank:
            raise StorageError(
                f"{self._where}: the plan belongs to another save; plan caching (enable_plan_caching) cannot be used, "
                "nor one writer for two saves"
            )
        return ticket

    def _write(self, ticket: SaveTicket, plan: SavePlan, planner: SavePlanner) -> RankReport:
        """Store this rank's Shard; all the coordinator needs to know of it."""
        values = plain_values(plan, planner, self._where)
        state = flat_state(planner)
        refuse_unstorable(state, self._where)
        aliases = aliases_of(state)
        levels = LevelTable.of(self._config)
        items = [item for item in plan.items if item.type != WriteItemType.BYTE_IO and item.index.fqn not in aliases]
        staged = [(item, staged_chunk(item, self._where, levels)) for item in items]
        staged = [pair for pair in staged if levels.treatment(pair[1].name, pair[1].dtype).is_in_checkpoints]
        store = self._lineage.store
        key = shard_key(ticket.key, ticket.rank)
        with ThreadPoolExecutor(min(_MAX_ENCODERS, os.cpu_count() or 1), thread_name_prefix="shard-encode") as pool:
            encoded = encode_shard(
                [_raw(chunk, item, planner) for item, chunk in staged if chunk.num_bytes],
                step=ticket.step,
                attempt=ticket.attempt,
                rank=ticket.rank,
                config=self._config,
                pool=pool,
            )
        store.put(key, encoded.data, deadline_s=self._config.store.deadline_s)
        header = SnapshotHeader(
            run_id=ticket.run_id,
            attempt=ticket.attempt,
            step=ticket.step,
            rank=ticket.rank,
            world_size=ticket.world_size,
            chunks=tuple(chunk for _, chunk in staged),
            shared_state=None,
            rank_state={},
        )
        receipt = Receipt(
            run_id=ticket.run_id,
            step=ticket.step,
            attempt=AttemptRecord.of(ticket.attempt),
            world_size=ticket.world_size,
            shard=encoded.record(key),
            tensors=tensor_layouts(header, encoded.index),
            lossless_fallbacks=encoded.lossless_fallbacks,
        )
        return RankReport(
            receipt=receipt,
            base_step=ticket.base_step,
            values=values,
            paths=paths_of(planner),
            aliases=aliases,
            shared_state=self._shared_state if self._rank == 0 else {},
            rank_state=self._rank_state,
        )


def _whole(name: str, number: object, least: int) -> int:
    """``number`` as an int. Raises ValueError for what no key could hold, before anything is written."""
    try:
        value = operator.index(number)  # type: ignore[arg-type]
    except TypeError as error:
        raise ValueError(f"{name} {number!r}: expected an integer of {least} to {MAX_STEP}") from error
    if not least <= value <= MAX_STEP:
        raise ValueError(f"{name} {value}: expected {least} to {MAX_STEP}")
    return value


def _measure(name: str, number: object) -> float:
    try:
        return float(number)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} {number!r}: expected a number") from error


def _raw(chunk: StagedChunk, item: WriteItem, planner: SavePlanner) -> RawChunk:
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, torch.Tensor)
    # Bytes of any dtype: numpy knows no bfloat16, and a tensor without dimensions cannot be viewed as bytes.
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return RawChunk(
        name=chunk.name,
        dtype=chunk.dtype,
        offsets=chunk.offsets,
        sizes=chunk.sizes,
        level=chunk.level,
        itemsize=chunk.itemsize,
        data=flat.numpy().data,
    )

"""`RaysumeReader`: fills a state dict of any torch program from a Checkpoint, under DCP's own protocol, without Ray.

Which Checkpoint is read is asked of the commit log once, when a load begins, and all ranks must have got the same
answer. Stored bytes are never unpickled: plain values come out of the Manifest's JSON.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from pydantic import JsonValue
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from storage.config import StoreConfig
from storage.dcp_commit import DCP_STATE
from storage.dcp_lineage import Lineage, lineage_of
from storage.dcp_reader import ManifestReader
from storage.errors import ManifestMismatch, ObjectMissing, StorageError
from storage.keys import Attempt, StepKey, new_nonce
from storage.manifest import Manifest
from storage.object_source import ObjectStoreSource
from storage.plain_values import plain_to_value
from storage.restore import plan_restore, read_manifest
from storage.sources import RestorePlan

__all__ = ["RaysumeReader"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What one rank's plan tells the coordinator: the Checkpoint it found, and the names it looked for."""

    source: StepKey
    names: frozenset[str]
    missing: frozenset[str]


class _Names(dict[str, STORAGE_TYPES]):
    """Everything stored, by name, which remembers what it was asked for.

    A planner stops at the first name that is not there. Here each such name passes for a plain value, so that
    `RaysumeReader` sees all of them in the plan and can name them together.
    """

    def __init__(self, stored: Mapping[str, STORAGE_TYPES]) -> None:
        super().__init__(stored)
        self.asked: set[str] = set()

    def __contains__(self, name: object) -> bool:
        if isinstance(name, str):
            self.asked.add(name)
        return True

    def __missing__(self, name: str) -> STORAGE_TYPES:
        self.asked.add(name)
        return BytesStorageMetadata()


class RaysumeReader(StorageReader):
    """Reads the newest usable Checkpoint under ``url``, or exactly that of ``step``. One object for each load.

    ``allow_partial``: names missing here or there are left as they are, and logged; otherwise they are refused.
    ``wait_s``: how long a load waits for an async save of this process that is still under way. ``memory_bytes`` bounds
    what is held besides the state itself.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        step: int | None = None,
        allow_partial: bool = False,
        wait_s: float = 120.0,
        num_threads: int = 4,
        memory_bytes: int = 128 << 20,
        config: StoreConfig | None = None,
    ) -> None:
        self._url = os.fspath(url)
        self._step = step
        self._allow_partial = allow_partial
        self._wait_s = wait_s
        self._num_threads = num_threads
        self._memory_bytes = memory_bytes
        self._config = config or StoreConfig()
        self._rank = 0
        self._failure: StorageError | None = None
        self._opened: _Opened | None = None

    @property
    def manifest(self) -> Manifest:
        """Of the Checkpoint that is, or was, read."""
        return self._checkpoint.manifest

    @property
    def step(self) -> int:
        """Of the Checkpoint that is, or was, read."""
        return self.manifest.step

    @property
    def bytes_read(self) -> int:
        """Bytes of Shards that this rank fetched."""
        return self._checkpoint.source.bytes_read

    @property
    def may_fall_back(self) -> bool:
        """Whether another Checkpoint than the one opened may be read instead."""
        return self._step is None and self._opened is not None

    def quarantine(self, key: str, reason: str, time_utc: str) -> None:
        """Take the opened Checkpoint out of use for every reader: object ``key`` is not what was committed."""
        opened = self._checkpoint
        opened.lineage.log.quarantine(opened.manifest.step_key, key, reason, time_utc)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            raise ValueError(
                f"checkpoint_id {checkpoint_id!r}: a RaysumeReader has its url and step already; leave it out"
            )

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002  # DCP's signature
        self._failure = self._opened = None
        try:
            self._opened = self._open()
        except StorageError as error:
            # DCP would turn it into an assertion of its own here; `set_up_storage_reader` raises it as it is.
            self._failure = error
            return Metadata({})
        return self._opened.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self._rank = int(kwargs.get("rank", 0))
        if self._failure is not None:
            raise self._failure

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        opened = self._checkpoint
        values = opened.values_of(self._rank)
        items = plan.items
        names = opened.names.asked | {item.storage_index.fqn for item in items}
        missing = {name for name in names if name not in opened.tensors and name not in values}
        asked = _Asked(source=opened.manifest.step_key, names=frozenset(names - missing), missing=frozenset(missing))
        kept = [item for item in items if item.storage_index.fqn not in missing]
        return replace(plan, items=kept, storage_data=asked)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        opened = self._checkpoint
        asked = [cast(_Asked, plan.storage_data) for plan in plans]
        for rank, own in enumerate(asked):
            if own.source != opened.manifest.step_key:
                raise StorageError(
                    f"rank {rank} found {own.source.stem}, rank 0 {opened.manifest.step_key.stem} in {self._url}: "
                    "a save was committed meanwhile; load again, or give the step"
                )
        found: frozenset[str] = frozenset().union(*(own.names for own in asked))
        missing = frozenset().union(*(own.missing for own in asked))
        unexpected = opened.all_names - found
        of_each_rank = opened.own_names & found if len(plans) != opened.manifest.world_size else frozenset()
        if (missing or unexpected or of_each_rank) and not self._allow_partial:
            number = opened.manifest.world_size
            raise ManifestMismatch(
                opened.manifest.step,
                tuple(sorted(missing)),
                tuple(sorted(unexpected)),
                tuple(
                    f"{name} (one value for each of {number} ranks, {len(plans)} load)" for name in sorted(of_each_rank)
                ),
            )
        for title, names in (("not in the checkpoint, left as it was", missing), ("not loaded", unexpected)):
            if names:
                logger.info("partial load of step %d, %s: %s", opened.manifest.step, title, ", ".join(sorted(names)))
        return [replace(plan, storage_data=None) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        opened = self._checkpoint
        tensors: list[ReadItem] = []
        values = opened.values_of(self._rank)
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, _pickled_here(plain_to_value(values[name])))
            else:
                stored = opened.aliases.get(name, name)
                tensors.append(replace(item, storage_index=replace(item.storage_index, fqn=stored)))
        future = opened.reader.read_data(replace(plan, items=tensors), planner)
        opened.lineage.note_loaded(opened.manifest.step)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        return False  # never chosen by path

    @property
    def _checkpoint(self) -> _Opened:
        if self._opened is None:
            raise StorageError(f"nothing was read from {self._url} yet") from self._failure
        return self._opened

    def _open(self) -> _Opened:
        lineage = lineage_of(self._url, self._config)
        lineage.wait_for_saves(self._wait_s)
        # Nobody journals this plan: the Attempt in it is that of no one.
        reading = Attempt(number=0, nonce=new_nonce())
        plan = plan_restore(lineage.log, attempt=reading, step=self._step, allow_partial=self._allow_partial)
        if plan is None:
            raise ObjectMissing("any checkpoint", self._url)
        return _Opened(lineage, plan, self._num_threads, self._memory_bytes, self._config.deadline_s)


class _Opened:
    """One Checkpoint, as DCP has to see it."""

    def __init__(
        self, lineage: Lineage, plan: RestorePlan, num_threads: int, memory_bytes: int, deadline_s: float
    ) -> None:
        self.lineage = lineage
        self.manifest = read_manifest(plan, lineage.store, deadline_s=deadline_s)
        self.source = ObjectStoreSource(lineage.store, deadline_s=deadline_s)
        self.reader = ManifestReader(
            self.manifest, plan.shards, self.source, num_threads=num_threads, memory_bytes=memory_bytes
        )
        stored = self.reader.read_metadata().state_dict_metadata
        state = _section(self.manifest.shared_state, DCP_STATE)
        self.aliases = {
            alias: name
            for alias, name in _section(state, "aliases").items()
            if isinstance(name, str) and name in stored
        }
        self.tensors: dict[str, STORAGE_TYPES] = {
            **stored,
            **{alias: cast(TensorStorageMetadata, stored[name]) for alias, name in self.aliases.items()},
        }
        self._shared = _section(state, "values")
        self._own = [_section(_section(own, DCP_STATE), "values") for own in self.manifest.rank_states]
        self.own_names = frozenset().union(*self._own)
        value_names = self.own_names | set(self._shared)
        self.names = _Names({**self.tensors, **{name: BytesStorageMetadata() for name in value_names}})
        # What has no elements may have been asked for by nobody.
        self.all_names = value_names | {
            name for name, layout in self.tensors.items() if 0 not in cast(TensorStorageMetadata, layout).size
        }
        self.metadata = Metadata(self.names, planner_data=_paths(state))

    def values_of(self, rank: int) -> dict[str, JsonValue]:
        """Plain values of ``rank``: those of all ranks, and its own ones."""
        own = self._own[rank] if rank < len(self._own) else {}
        return {**self._shared, **own}


def _section(values: Mapping[str, JsonValue], name: str) -> dict[str, JsonValue]:
    value = values.get(name)
    return value if isinstance(value, dict) else {}


def _paths(state: Mapping[str, JsonValue]) -> dict[str, tuple[str | int, ...]]:
    """Where each flat name stood, for planners that rebuild a nested state; a name without a path stands on its own."""
    return {
        name: tuple(part for part in path if isinstance(part, str | int))
        for name, path in _section(state, "paths").items()
        if isinstance(path, list)
    }


def _pickled_here(value: object) -> io.BytesIO:
    """DCP takes a value only as the bytes of torch.save, which are made here, of a plain value."""
    content = io.BytesIO()
    torch.save(value, content)
    content.seek(0)
    return content

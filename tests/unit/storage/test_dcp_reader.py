"""What is asked of the store while tensors are filled; saved through the real writer, codec and commit log."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from storage.commit_log import CommitLog
from storage.config import CheckpointConfig
from storage.dcp_calls import load_tensors
from storage.dcp_reader import ManifestReader
from storage.direct import DirectKeeper
from storage.errors import CorruptCheckpoint, StorageError
from storage.manifest import RowBlocks
from storage.memory_store import MemoryStore
from storage.object_source import ObjectStoreSource
from storage.restore import plan_restore
from storage.sources import RestorePlan, ShardLocation
from tests.fakes.checkpoints import COLUMNS, RUN, save, weights
from tests.fakes.recording_sink import RecordingSink
from tests.fakes.small_training import ATTEMPT, RUN_ID, commit, newest_plan
from workers.resume import read_manifest
from workers.snapshot import Capture
from workers.staging import Stager

Tensors = dict[str, torch.Tensor]


class CountingSource(ObjectStoreSource):
    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.lengths: list[int] = []

    def read_range(self, location: ShardLocation, offset: int, length: int) -> bytes:
        self.lengths.append(length)
        return super().read_range(location, offset, length)


def saved(store: MemoryStore, tensors: Tensors) -> RestorePlan:
    sink = RecordingSink()
    with DirectKeeper(store, sink, CheckpointConfig()) as keeper:
        stager = Stager(keeper, RUN_ID, 1)
        captured = Capture(tensors=tensors, shared_state={}, rank_state={})
        stager.stage(captured, attempt=ATTEMPT, step=1, rank=0, world_size=1, wait_s=0.0)
        stager.close()
    commit(store, sink.receipts)
    return newest_plan(store)


def load(store: MemoryStore, plan: RestorePlan, tensors: Tensors) -> CountingSource:
    source = CountingSource(store)
    reader = ManifestReader(read_manifest(plan, store), plan.shards, source)
    load_tensors(tensors, reader, DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False))
    return source


def test_many_small_tensors_come_in_one_request_beside_the_index() -> None:
    store = MemoryStore()
    tensors = {f"model.{index}": torch.randn(17, 3) for index in range(50)}
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    source = load(store, saved(store, tensors), loaded)
    assert len(source.lengths) == 2
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_a_tensor_alone_costs_its_own_bytes_and_the_index() -> None:
    store = MemoryStore()
    tensors = {f"model.{index}": torch.randn(1024, 256) for index in range(4)}
    plan = saved(store, tensors)
    loaded = {"model.2": torch.zeros(1024, 256)}
    source = load(store, plan, loaded)
    assert torch.equal(loaded["model.2"], tensors["model.2"])
    assert source.bytes_read < 1.1 * 1024 * 256 * 4


def test_an_error_inside_torch_comes_out_as_itself() -> None:
    store = MemoryStore()
    plan = saved(store, {"model.a": torch.ones(3)})
    with pytest.raises(ValueError, match="Size mismatch"):
        load(store, plan, {"model.a": torch.ones(4)})


def test_a_shard_that_the_plan_does_not_place_is_an_error() -> None:
    store = MemoryStore()
    plan = saved(store, {"model.a": torch.ones(3)})
    reader = ManifestReader(read_manifest(plan, store), (), ObjectStoreSource(store))
    with pytest.raises(StorageError, match="names no source for the Shard of rank 0"):
        load_tensors({"model.a": torch.ones(3)}, reader, DefaultLoadPlanner())


def test_a_large_tensor_comes_in_requests_of_bounded_size() -> None:
    store = MemoryStore()
    tensors = {"model.a": torch.randn(4096, 512)}
    plan = saved(store, tensors)
    loaded = {"model.a": torch.zeros(4096, 512)}
    source = CountingSource(store)
    reader = ManifestReader(read_manifest(plan, store), plan.shards, source, num_threads=2, memory_bytes=4 << 20)
    load_tensors(loaded, reader, DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False))
    assert torch.equal(loaded["model.a"], tensors["model.a"])
    assert len(source.lengths) > 5
    assert max(source.lengths) <= 1 << 20


def test_a_flipped_bit_is_named_and_reaches_no_tensor() -> None:
    store = MemoryStore()
    plan = saved(store, {"model.a": torch.ones(300, 4)})
    key = plan.shards[0].location
    content = bytearray(store.get(key))
    content[3] ^= 1
    store.put(key, bytes(content))
    loaded = {"model.a": torch.zeros(300, 4)}
    with pytest.raises(CorruptCheckpoint, match=r"step 1: .*rank 0.*frame 0 .*model\.a: hash mismatch"):
        load(store, plan, loaded)
    assert not loaded["model.a"].any()


def test_a_layout_stored_as_a_rule_loads_as_a_list_of_chunks_does() -> None:
    store = MemoryStore()
    save(store, 10, world_size=70)
    plan = plan_restore(CommitLog(store, RUN), attempt=ATTEMPT)
    assert plan is not None
    assert isinstance(read_manifest(plan, store).tensors["w"].chunks, RowBlocks)
    loaded = {"w": torch.zeros(70 * 8, COLUMNS)}
    load(store, plan, loaded)
    assert loaded["w"].numpy().tobytes() == weights(10, 70 * 8)

"""Copying into a leased buffer: what is in the file, when a save is skipped, and what is given back."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from storage.config import CheckpointConfig
from storage.dcp_calls import load_tensors
from storage.dcp_reader import ManifestReader
from storage.direct import DirectKeeper
from storage.errors import StorageError
from storage.keeper import Keeper
from storage.keeper_protocol import BufferLease, LeaseRequest, SealedSnapshot
from storage.memory_store import MemoryStore
from storage.object_source import ObjectStoreSource
from tests.fakes.recording_sink import RecordingSink
from tests.fakes.small_training import ATTEMPT, RUN_ID, build_state, commit, newest_plan, train_step
from workers.names import named_parameters
from workers.resume import read_manifest, restore
from workers.snapshot import Capture, capture
from workers.staging import Stager, StageResult


class SlowKeeper(DirectKeeper):
    """Encodes only when told to, as a Keeper in another process may; can do so at a given request."""

    def __init__(self, store: MemoryStore, sink: RecordingSink) -> None:
        super().__init__(store, sink, CheckpointConfig())
        self.sealed: list[SealedSnapshot] = []
        self.requests: list[LeaseRequest] = []
        self.encode_at_request = 0

    def lease_buffer(self, request: LeaseRequest) -> BufferLease | None:
        self.requests.append(request)
        if len(self.requests) == self.encode_at_request:
            self.encode_all()
        return super().lease_buffer(request)

    def seal(self, snapshot: SealedSnapshot) -> None:
        self.sealed.append(snapshot)

    def encode_all(self) -> None:
        for snapshot in self.sealed:
            super().seal(snapshot)
        self.sealed.clear()


def stage(stager: Stager, captured: Capture, *, step: int = 1, rank: int = 0, wait_s: float = 0.0) -> StageResult:
    return stager.stage(captured, attempt=ATTEMPT, step=step, rank=rank, world_size=1, wait_s=wait_s)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def sink() -> RecordingSink:
    return RecordingSink()


@pytest.fixture
def keeper(store: MemoryStore, sink: RecordingSink) -> SlowKeeper:
    return SlowKeeper(store, sink)


def test_a_change_right_after_the_call_never_reaches_the_file(
    mesh: DeviceMesh, store: MemoryStore, sink: RecordingSink, keeper: SlowKeeper
) -> None:
    """B20: all ones when saved, twos a moment later."""
    state = build_state(mesh)
    train_step(state)
    tensors = [parameter.detach() for _, parameter in named_parameters(state.model)]
    tensors += [entry[key] for entry in state.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq", "step")]
    for tensor in tensors:
        tensor.fill_(1)
    assert stage(Stager(keeper, RUN_ID, 1), capture(state, rank=0, world_size=1)).staged
    for tensor in tensors:
        tensor.fill_(2)
    keeper.encode_all()
    commit(store, sink.receipts)
    loaded = build_state(mesh, init_weights=False)
    restore(loaded, newest_plan(store), store, rank=0, world_size=1)
    for name, tensor in capture(loaded, rank=0, world_size=1, rng=False).tensors.items():
        if name != "model.count":
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            assert set(whole.flatten().tolist()) == {1.0}, name


def test_a_save_without_a_free_buffer_is_skipped_and_the_next_one_taken(keeper: SlowKeeper) -> None:
    stager = Stager(keeper, RUN_ID, 1)
    captured = Capture(tensors={"model.a": torch.ones(3)}, shared_state={}, rank_state={})
    assert stage(stager, captured, step=1).staged
    skipped = stage(stager, captured, step=2)
    assert (skipped.staged, skipped.num_bytes) == (False, 0)
    keeper.encode_all()
    assert stage(stager, captured, step=3).staged


def test_a_wait_for_a_buffer_ends_when_it_comes_free(keeper: SlowKeeper) -> None:
    stager = Stager(keeper, RUN_ID, 1)
    captured = Capture(tensors={"model.a": torch.ones(3)}, shared_state={}, rank_state={})
    assert stage(stager, captured, step=1).staged
    keeper.encode_at_request = 4
    assert stage(stager, captured, step=2, wait_s=30.0).staged
    assert len(keeper.requests) == 4


def test_a_cancelled_wait_ends_at_once(keeper: SlowKeeper) -> None:
    stager = Stager(keeper, RUN_ID, 1)
    captured = Capture(tensors={"model.a": torch.ones(3)}, shared_state={}, rank_state={})
    stage(stager, captured, step=1)
    stager.cancel()
    assert not stage(stager, captured, step=2, wait_s=3600.0).staged
    keeper.encode_all()
    stager.resume()
    assert stage(stager, captured, step=3).staged


def test_an_error_while_copying_gives_the_buffer_back(keeper: SlowKeeper) -> None:
    stager = Stager(keeper, RUN_ID, 1)
    bad = Capture(tensors={"model.a": torch.ones(3, device="meta")}, shared_state={}, rank_state={})
    with pytest.raises(NotImplementedError):
        stage(stager, bad, step=1)
    good = Capture(tensors={"model.a": torch.ones(3)}, shared_state={}, rank_state={})
    assert stage(stager, good, step=2).staged


def test_what_is_no_tensor_is_refused_before_it_can_be_pickled(keeper: SlowKeeper) -> None:
    bad = Capture(tensors={"model.a": "text"}, shared_state={}, rank_state={})  # type: ignore[dict-item]
    with pytest.raises((StorageError, AttributeError)):
        stage(Stager(keeper, RUN_ID, 1), bad)
    assert not keeper.sealed


def test_a_plan_is_kept_while_shapes_stay_and_made_anew_when_they_change(
    keeper: SlowKeeper, sink: RecordingSink
) -> None:
    stager = Stager(keeper, RUN_ID, 1)
    for step, rows in enumerate((2, 2, 5), start=1):
        tensors: dict[str, torch.Tensor] = {"model.a": torch.full((rows, 3), float(step))}
        stage(stager, Capture(tensors=tensors, shared_state={}, rank_state={}), step=step)
        keeper.encode_all()
    assert [receipt.tensors["model.a"].shape for receipt in sink.receipts] == [(2, 3), (2, 3), (5, 3)]


def test_strided_and_unusual_tensors_are_stored_as_they_read(
    keeper: SlowKeeper, sink: RecordingSink, store: MemoryStore
) -> None:
    tensors = {
        "model.transposed": torch.arange(6.0).view(2, 3).T,
        "model.bfloat16": torch.arange(5, dtype=torch.bfloat16),
        "model.bool": torch.tensor([True, False]),
        "model.empty": torch.empty(0, 4),
        "model.scalar": torch.tensor(7),
    }
    stage(Stager(keeper, RUN_ID, 1), Capture(tensors=tensors, shared_state={}, rank_state={}))
    keeper.encode_all()
    commit(store, sink.receipts)
    plan = newest_plan(store)
    loaded = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
    reader = ManifestReader(read_manifest(plan, store), plan.shards, ObjectStoreSource(store))
    load_tensors(loaded, reader, DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False))
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor), name


def test_ranks_beside_zero_write_only_sharded_tensors_and_their_own_random_state(mesh: DeviceMesh) -> None:
    state = build_state(mesh)
    train_step(state)
    zero, one = capture(state, rank=0, world_size=2), capture(state, rank=1, world_size=2)
    assert one.shared_state is None
    assert all(isinstance(tensor, DTensor) for name, tensor in one.tensors.items() if not name.startswith("rng."))
    assert {name for name in one.tensors if name.startswith("rng.")} == {
        f"rng.rank-00001.{kind}" for kind in ("python", "numpy", "torch_cpu")
    }
    assert {"model.temperature", "model.count", "optim.wide.step"} <= set(zero.tensors) - set(one.tensors)


def test_the_plain_state_is_json_by_parameter_name(mesh: DeviceMesh) -> None:
    state = build_state(mesh)
    train_step(state)
    shared = capture(state, rank=0, world_size=1).shared_state
    text = json.dumps(shared, allow_nan=False)
    assert '"lr": 0.04' in text
    assert "blocks.0.linear.weight" in text
    assert shared is not None
    assert shared["progress"] == {
        "step": 1,
        "epoch": 0,
        "position": 3,
        "tokens": 12,
        "sample_chain": "0" * 32,
        "best_metric": None,
        "best_step": None,
        "skipped": {"__tuple__": []},
        "ledger": "",
    }


def test_warming_up_leaves_both_buffers_free_and_mapped_for_the_saves_that_follow(
    mesh: DeviceMesh, store: MemoryStore, tmp_path: Path
) -> None:
    state = build_state(mesh)
    train_step(state)
    captured = capture(state, rank=0, world_size=1)
    keeper = Keeper(RUN_ID, "node", store, RecordingSink(), CheckpointConfig(), tmp_path / "arena")
    try:
        stager = Stager(keeper, RUN_ID, os.getpid())
        stager.warm(captured, attempt=ATTEMPT, step=1, rank=0, world_size=1)
        warmed = {path.name: path.stat().st_ino for path in (tmp_path / "arena").glob("buffer-*")}
        assert len(warmed) == 2
        for step in (1, 2):
            assert stage(stager, captured, step=step).staged
        after = {path.name: path.stat().st_ino for path in (tmp_path / "arena").glob("buffer-*")}
        assert after == warmed, "a save after the warm-up took memory that nobody had touched"
        stager.close()
    finally:
        keeper.close()

"""An L1-only resume where every moment is damaged. Real: FSDP2 on gloo, the codec, the commit log, the reader."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from storage.commit_log import CommitLog
from storage.errors import CorruptCheckpoint
from storage.frames import read_index
from storage.memory_store import MemoryStore
from storage.salvage import whole_levels
from storage.sources import RestorePlan
from tests.fakes.small_training import RUN_ID, build_state, newest_plan, save_alone, train_step
from workers.names import named_parameters
from workers.resume import restore
from workers.state import TrainingState


def damage_the_moments(store: MemoryStore) -> None:
    """One bit in every frame that is not L1."""
    log = CommitLog(store, RUN_ID)
    (commit,) = log.commits()
    for record in log.read_manifest(commit).shards:
        content = bytearray(store.get(record.key))
        whole = bytes(content)
        index = read_index(lambda offset, length, of=whole: of[offset : offset + length], record, step=commit.step)
        for chunk in index.chunks:
            for frame in chunk.frames:
                if chunk.level != "L1":
                    content[frame.offset + frame.stored_bytes // 2] ^= 1
        store.put(record.key, bytes(content))


@pytest.fixture
def damaged(mesh: DeviceMesh) -> tuple[TrainingState, MemoryStore, RestorePlan]:
    store = MemoryStore()
    state = build_state(mesh)
    for _ in range(3):
        train_step(state)
    plan = save_alone(state, store)
    damage_the_moments(store)
    return state, store, plan


def weights(state: TrainingState) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in named_parameters(state.model)}


def test_a_full_resume_refuses_and_an_l1_only_one_takes_all_but_the_moments(
    mesh: DeviceMesh,
    damaged: tuple[TrainingState, MemoryStore, RestorePlan],
    caplog: pytest.LogCaptureFixture,
) -> None:
    state, store, plan = damaged
    log = CommitLog(store, RUN_ID)
    assert whole_levels(store, log.read_manifest(log.commits()[0])) == {"L1"}
    with pytest.raises(CorruptCheckpoint):
        restore(build_state(mesh, seed=99, init_weights=False), plan, store, rank=0, world_size=1)
    resumed = build_state(mesh, seed=99, init_weights=False)
    with caplog.at_level(logging.WARNING):
        report = restore(resumed, replace(plan, levels=("L1",)), store, rank=0, world_size=1)
    assert "L1 ALONE" in caplog.text
    assert any("L1 ALONE" in line for line in report.lines)
    for name, value in weights(state).items():
        assert torch.equal(value, weights(resumed)[name]), name
    assert resumed.progress == state.progress
    assert resumed.scheduler.state_dict() == state.scheduler.state_dict()
    assert dict(resumed.optimizer.state) == {}


def test_the_first_update_after_it_is_no_larger_than_that_of_a_new_optimizer(
    mesh: DeviceMesh, damaged: tuple[TrainingState, MemoryStore, RestorePlan]
) -> None:
    """Zero moments beside an old step counter would make it three times as large."""
    _, store, plan = damaged
    resumed = build_state(mesh, seed=99, init_weights=False)
    restore(resumed, replace(plan, levels=("L1",)), store, rank=0, world_size=1)
    lr, before = resumed.optimizer.param_groups[0]["lr"], weights(resumed)
    train_step(resumed)
    largest = max(float((weights(resumed)[name] - value).abs().max()) for name, value in before.items())
    assert lr * 0.5 < largest <= lr * 1.001


def test_the_next_save_is_a_full_one_again(
    mesh: DeviceMesh, damaged: tuple[TrainingState, MemoryStore, RestorePlan]
) -> None:
    _, store, plan = damaged
    resumed = build_state(mesh, seed=99, init_weights=False)
    restore(resumed, replace(plan, levels=("L1",)), store, rank=0, world_size=1)
    train_step(resumed)
    fresh = MemoryStore()
    again = build_state(mesh, seed=7, init_weights=False)
    restore(again, save_alone(resumed, fresh), fresh, rank=0, world_size=1)
    assert [train_step(resumed) for _ in range(3)] == [train_step(again) for _ in range(3)]
    assert newest_plan(fresh).levels is None

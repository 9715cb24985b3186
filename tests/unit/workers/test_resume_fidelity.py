"""Levels on the whole way from a training state to a resumed one; real: FSDP2 on gloo, staging, Shards, Manifest."""

from __future__ import annotations

import logging
import os

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from storage.config import CheckpointConfig
from storage.direct import DirectKeeper
from storage.levels import LevelTable
from storage.manifest import Manifest
from storage.memory_store import MemoryStore
from storage.sources import RestorePlan
from tests.fakes.recording_sink import RecordingSink
from tests.fakes.small_training import ATTEMPT, RUN_ID, build_state, commit, newest_plan, train_step
from workers.resume import read_manifest, restore
from workers.snapshot import capture
from workers.staging import Stager
from workers.state import TrainingState


def save(state: TrainingState, store: MemoryStore, config: CheckpointConfig) -> tuple[RestorePlan, Manifest]:
    sink = RecordingSink()
    with DirectKeeper(store, sink, config) as keeper:
        stager = Stager(keeper, RUN_ID, os.getpid(), LevelTable.of(config))
        captured = capture(state, rank=0, world_size=1)
        stager.stage(captured, attempt=ATTEMPT, step=state.progress.step, rank=0, world_size=1, wait_s=5.0)
        stager.close()
    commit(store, sink.receipts)
    plan = newest_plan(store)
    return plan, read_manifest(plan, store)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def changed(state: TrainingState, other: TrainingState) -> set[str]:
    """Entries, by the last part of their name, that are not equal bit for bit."""
    before, after = capture(state, rank=0, world_size=1, rng=False), capture(other, rank=0, world_size=1, rng=False)
    return {
        name.rpartition(".")[2] if name.startswith("optim.") else name
        for name, tensor in before.tensors.items()
        if name not in after.tensors or not torch.equal(local(tensor), local(after.tensors[name]))
    }


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "workers.resume"]


def trained(mesh: DeviceMesh) -> TrainingState:
    state = build_state(mesh)
    for _ in range(3):
        train_step(state)
    return state


def test_a_bounded_resume_is_labelled_and_changes_the_moments_alone(
    mesh: DeviceMesh, caplog: pytest.LogCaptureFixture
) -> None:
    store, state = MemoryStore(), trained(mesh)
    plan, manifest = save(state, store, CheckpointConfig(fidelity="bounded", moment_bound=5e-3))
    bounds = {name: layout.bound for name, layout in manifest.tensors.items() if layout.bound is not None}
    assert {name.rpartition(".")[2] for name in bounds} == {"exp_avg", "exp_avg_sq"}
    assert set(bounds.values()) == {5e-3}
    resumed = build_state(mesh, seed=9, init_weights=False)
    with caplog.at_level(logging.WARNING, "workers.resume"):
        report = restore(resumed, plan, store, rank=0, world_size=1)
    assert report.bound == 5e-3
    (warning,) = said(caplog)
    assert "fidelity: bounded" in warning
    assert "within 0.005" in warning
    assert changed(state, resumed) == {"exp_avg", "exp_avg_sq"}


def test_a_lossless_resume_says_nothing_of_rounding(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    store, state = MemoryStore(), trained(mesh)
    plan, manifest = save(state, store, CheckpointConfig())
    resumed = build_state(mesh, seed=9, init_weights=False)
    with caplog.at_level(logging.WARNING, "workers.resume"):
        report = restore(resumed, plan, store, rank=0, world_size=1)
    assert (report.bound, manifest.lossless_fallbacks, said(caplog)) == (None, 0, [])
    assert changed(state, resumed) == set()


def test_moments_that_keep_no_bound_are_exact_and_counted_up_to_the_manifest(mesh: DeviceMesh) -> None:
    store, state = MemoryStore(), trained(mesh)
    plan, manifest = save(state, store, CheckpointConfig(fidelity="bounded", moment_bound=1e-9))
    assert manifest.lossless_fallbacks == 2 * len(state.optimizer.state)
    resumed = build_state(mesh, seed=9, init_weights=False)
    assert restore(resumed, plan, store, rank=0, world_size=1).bound is None
    assert changed(state, resumed) == set()


def test_what_a_rule_omits_is_not_staged_and_a_resume_does_without(mesh: DeviceMesh) -> None:
    store, state = MemoryStore(), trained(mesh)
    for parameter, entries in state.optimizer.state.items():
        entries["trace"] = torch.ones_like(parameter)
    rule = {"pattern": "optim.*.trace", "fidelity": "omit"}
    plan, manifest = save(state, store, CheckpointConfig.model_validate({"levels": [rule]}))
    assert manifest.tensors
    assert not [name for name in manifest.tensors if name.endswith(".trace")]
    resumed = build_state(mesh, seed=9, init_weights=False)
    restore(resumed, plan, store, rank=0, world_size=1)
    assert changed(state, resumed) == {"trace"}
    assert [train_step(state) for _ in range(3)] == [train_step(resumed) for _ in range(3)]

"""One rank saves and resumes through the real record path; real: FSDP2 on gloo, the codec, the commit log."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from storage.errors import CorruptCheckpoint, ManifestMismatch
from storage.local_store import LocalStore
from storage.memory_store import MemoryStore
from tests.fakes.small_training import OPTIM, TOTAL_STEPS, OddModel, build_state, newest_plan, save_alone, train_step
from workers.names import named_parameters
from workers.optim import lr_factor_at
from workers.plain_state import NotPlain
from workers.resume import restore
from workers.snapshot import capture
from workers.state import TrainingState


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def meta(num_blocks: int = 2, width: int = 5) -> OddModel:
    with torch.device("meta"):
        return OddModel(num_blocks, width)


def assert_equal_states(state: TrainingState, other: TrainingState) -> None:
    saved, loaded = capture(state, rank=0, world_size=1), capture(other, rank=0, world_size=1)
    assert set(saved.tensors) == set(loaded.tensors)
    for name, tensor in saved.tensors.items():
        if not name.startswith("rng."):
            assert torch.equal(whole(tensor), whole(loaded.tensors[name])), name
    assert saved.shared_state == loaded.shared_state


def test_a_resumed_state_is_equal_to_the_bit_and_trains_on_like_the_unbroken_one(mesh: DeviceMesh) -> None:
    store = MemoryStore()
    state = build_state(mesh)
    for _ in range(3):
        train_step(state)
    plan = save_alone(state, store)
    resumed = build_state(mesh, seed=99, init_weights=False)
    report = restore(resumed, plan, store, rank=0, world_size=1)
    assert report.step == 3
    assert not report.reseeded
    assert_equal_states(state, resumed)
    assert [train_step(state) for _ in range(4)] == [train_step(resumed) for _ in range(4)]


@pytest.mark.parametrize(("metadata", "steps"), [({"config": {"run": {"steps": 1500}}}, 1500), ({}, None)])
def test_a_resume_knows_how_long_the_run_was_to_be_when_it_was_saved(
    mesh: DeviceMesh, metadata: dict[str, Any], steps: int | None
) -> None:
    store, state = MemoryStore(), build_state(mesh)
    train_step(state)
    plan = save_alone(state, store, metadata=metadata)
    resumed = build_state(mesh, seed=5)
    assert restore(resumed, plan, store, rank=0, world_size=1).saved_run_steps == steps


def test_a_save_before_the_first_step_changes_no_update(mesh: DeviceMesh) -> None:
    """B25: no dummy step; counters start at 1 after the first real one."""
    store = MemoryStore()
    state = build_state(mesh)
    plan = save_alone(state, store)
    assert not state.optimizer.state
    resumed = build_state(mesh, seed=5)
    restore(resumed, plan, store, rank=0, world_size=1)
    assert not resumed.optimizer.state
    assert [train_step(state) for _ in range(5)] == [train_step(resumed) for _ in range(5)]
    assert {float(entry["step"]) for entry in resumed.optimizer.state.values()} == {5.0}


def test_state_of_a_parameter_frozen_later_is_kept(mesh: DeviceMesh) -> None:
    """B27: both restored, and the count is in the log."""
    store = MemoryStore()
    state = build_state(mesh)
    train_step(state)
    dict(named_parameters(state.model))["frozen_later"].requires_grad_(False)
    train_step(state)
    plan = save_alone(state, store)
    resumed = build_state(mesh, seed=5, init_weights=False)
    frozen = dict(named_parameters(resumed.model))["frozen_later"]
    frozen.requires_grad_(False)
    report = restore(resumed, plan, store, rank=0, world_size=1)
    assert float(resumed.optimizer.state[frozen]["step"]) == 1.0
    assert whole(resumed.optimizer.state[frozen]["exp_avg"]).abs().sum() > 0
    num_tensors = 3 * len(list(named_parameters(resumed.model)))
    assert f"optimizer state tensors: saved {num_tensors}, restored {num_tensors}" in report.lines


def test_progress_counts_on_through_two_resumes_in_the_object_that_the_loop_holds(mesh: DeviceMesh) -> None:
    """B28: 30 steps, not 10 or 20."""
    store = MemoryStore()
    held: list[object] = []
    plan = None
    for _ in range(3):
        state = build_state(mesh, init_weights=plan is None)
        progress = state.progress
        if plan is not None:
            restore(state, plan, store, rank=0, world_size=1)
        for _ in range(10):
            train_step(state)
        held.append(progress)
        assert state.progress is progress
        plan = save_alone(state, store)
    assert (progress.step, progress.position, progress.tokens) == (30, 30 * 3, 30 * 12)


@pytest.mark.parametrize(("saved_blocks", "here"), [(2, 3), (3, 2)])
def test_a_model_of_another_depth_is_refused_with_the_names(mesh: DeviceMesh, saved_blocks: int, here: int) -> None:
    """B38, both directions; nothing is changed by the refusal."""
    store = MemoryStore()
    state = build_state(mesh, model=meta(saved_blocks))
    train_step(state)
    plan = save_alone(state, store)
    other = build_state(mesh, model=meta(here), seed=7)
    before = {name: whole(parameter).clone() for name, parameter in named_parameters(other.model)}
    with pytest.raises(ManifestMismatch) as caught:
        restore(other, plan, store, rank=0, world_size=1)
    names = caught.value.missing if here > saved_blocks else caught.value.unexpected
    assert "model.blocks.2.linear.weight" in names
    assert "optim.blocks.2.linear.weight" in names
    assert all(torch.equal(before[name], whole(parameter)) for name, parameter in named_parameters(other.model))


def test_a_wider_model_is_refused_with_both_shapes(mesh: DeviceMesh) -> None:
    store = MemoryStore()
    state = build_state(mesh)
    train_step(state)
    plan = save_alone(state, store)
    with pytest.raises(ManifestMismatch, match=r"saved float32 \(5, 5\), here float32 \(6, 6\)"):
        restore(build_state(mesh, model=meta(width=6)), plan, store, rank=0, world_size=1)


def test_allow_partial_takes_what_fits_and_says_what_does_not(mesh: DeviceMesh) -> None:
    store = MemoryStore()
    state = build_state(mesh)
    train_step(state)
    save_alone(state, store)
    other = build_state(mesh, model=meta(3), seed=7)
    fresh = whole(dict(named_parameters(other.model))["blocks.2.linear.weight"]).clone()
    report = restore(other, newest_plan(store, allow_partial=True), store, rank=0, world_size=1)
    mine, theirs = dict(named_parameters(other.model)), dict(named_parameters(state.model))
    assert torch.equal(whole(mine["blocks.1.linear.weight"]), whole(theirs["blocks.1.linear.weight"]))
    assert torch.equal(whole(mine["blocks.2.linear.weight"]), fresh)
    assert any("model.blocks.2.linear.weight" in line for line in report.lines)
    train_step(other)


def test_the_learning_rate_after_a_resume_is_the_unbroken_one(mesh: DeviceMesh) -> None:
    """B39: warm-up 5, cosine to 100, resumed at 40: steps 41 to 60."""
    store = MemoryStore()
    state = build_state(mesh)
    for _ in range(40):
        train_step(state)
    plan = save_alone(state, store)
    resumed = build_state(mesh, init_weights=False)
    restore(resumed, plan, store, rank=0, world_size=1)
    for step in range(41, 61):
        for group in resumed.optimizer.param_groups:
            assert group["lr"] == pytest.approx(OPTIM.lr * lr_factor_at(step, OPTIM, TOTAL_STEPS), abs=1e-12)
            assert group["initial_lr"] == OPTIM.lr
        train_step(resumed)


@pytest.mark.parametrize("damage", ["missing", "short", "flipped"])
def test_a_damaged_shard_is_an_ordinary_error_that_names_step_and_object(
    mesh: DeviceMesh, tmp_path: Path, damage: str
) -> None:
    """B87: CheckpointException is a BaseException; what we raise is not."""
    store = LocalStore(tmp_path)
    state = build_state(mesh)
    train_step(state)
    plan = save_alone(state, store)
    path = tmp_path / plan.shards[0].location
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "short":
        path.write_bytes(content[: len(content) // 2])
    else:
        content[10] ^= 1
        path.write_bytes(content)
    assert issubclass(CorruptCheckpoint, Exception)
    with pytest.raises(CorruptCheckpoint, match="rank 0") as caught:
        restore(build_state(mesh, init_weights=False), plan, store, rank=0, world_size=1)
    assert (caught.value.step, caught.value.key) == (1, plan.shards[0].location)


def test_a_manifest_that_is_not_the_planned_one_is_refused(mesh: DeviceMesh, tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    plan = save_alone(build_state(mesh), store)
    path = tmp_path / plan.manifest_key
    path.write_bytes(path.read_bytes().replace(b'"seed"', b'"dees"') + b" ")
    with pytest.raises(CorruptCheckpoint, match="hash mismatch"):
        restore(build_state(mesh), plan, store, rank=0, world_size=1)


class Average:
    """A tracker with a sharded tensor, a plain tensor, and numbers JSON has no word for."""

    def __init__(self, model: nn.Module) -> None:
        self.values = {name: torch.zeros_like(parameter) for name, parameter in named_parameters(model)}
        self.best = float("inf")
        self.window = torch.zeros(3, dtype=torch.float64)
        self.history: list[tuple[int, float]] = []

    def update(self, model: nn.Module) -> None:
        for name, parameter in named_parameters(model):
            self.values[name].lerp_(parameter.detach(), 0.5)
        self.window += 0.1
        self.history.append((1, 0.5))

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "best": self.best, "window": self.window, "history": self.history}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.values, self.best = state_dict["values"], state_dict["best"]
        self.window, self.history = state_dict["window"], state_dict["history"]


def test_a_tracker_comes_back_with_its_tensors_and_its_infinities(mesh: DeviceMesh) -> None:
    store = MemoryStore()
    state = build_state(mesh)
    tracker = Average(state.model)
    state.trackers["average"] = tracker
    train_step(state)
    tracker.update(state.model)
    plan = save_alone(state, store)
    resumed = build_state(mesh, init_weights=False)
    restored = Average(resumed.model)
    resumed.trackers["average"] = restored
    restore(resumed, plan, store, rank=0, world_size=1)
    assert restored.best == float("inf")
    assert restored.history == [(1, 0.5)]
    assert torch.equal(restored.window, tracker.window)
    for name, value in tracker.values.items():
        assert isinstance(restored.values[name], DTensor) == isinstance(value, DTensor)
        assert torch.equal(whole(restored.values[name]), whole(value))


def test_a_tracker_missing_on_one_side_is_refused(mesh: DeviceMesh) -> None:
    store = MemoryStore()
    state = build_state(mesh)
    plan = save_alone(state, store)
    state.trackers["average"] = Average(state.model)
    with pytest.raises(ManifestMismatch, match=r"missing.*tracker\.average"):
        restore(state, plan, store, rank=0, world_size=1)


class Unsavable:
    def state_dict(self) -> dict[str, Any]:
        return {"files": {"log": itertools.count()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError


def test_what_is_neither_tensor_nor_plain_is_refused_by_name(mesh: DeviceMesh) -> None:
    state = build_state(mesh)
    state.trackers["log"] = Unsavable()
    with pytest.raises(NotPlain, match=r"tracker\.log\.files\.log is a itertools\.count"):
        capture(state, rank=0, world_size=1)

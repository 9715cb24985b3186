"""One rank's whole state (R1.1) goes between a model that is sharded, one that every rank holds whole, and one alone.

Real: FSDP2 on gloo, the record path. Saved with each kind, restored into each: nothing may be missing or misnamed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from storage.errors import ManifestMismatch
from storage.memory_store import MemoryStore
from storage.restore import read_manifest
from tests.fakes.small_training import OPTIM, TOTAL_STEPS, OddModel, build_state, newest_plan, save_alone, train_step
from workers.config import ModelConfig
from workers.models import materialize
from workers.names import named_parameters
from workers.optim import build_optimizer, build_scheduler
from workers.plain_state import NotPlain
from workers.rank_trackers import differing_trackers
from workers.restore_match import compare
from workers.resume import restore
from workers.snapshot import capture
from workers.state import TrainingState

SETTINGS = {"init_scale": 512.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 7}


class Average:
    """A moving average of the weights in the form that they have here, and how often it was taken."""

    def __init__(self, model: nn.Module) -> None:
        self.values = {name: torch.zeros_like(parameter) for name, parameter in named_parameters(model)}
        self.taken = 0

    def update(self, model: nn.Module) -> None:
        self.taken += 1
        for name, parameter in named_parameters(model):
            self.values[name].lerp_(parameter.detach(), 0.5)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "taken": self.taken}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.values, self.taken = state_dict["values"], state_dict["taken"]


class Position:
    """A rank's own."""

    def __init__(self) -> None:
        self.position, self.window = 0, torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "window": self.window}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position, self.window = state_dict["position"], state_dict["window"]


def completed(state: TrainingState) -> TrainingState:
    state.scaler = GradScaler("cpu")
    state.trackers["average"] = Average(state.model)
    state.rank_trackers["loader"] = Position()
    return state


def alone(_mesh: DeviceMesh, seed: int) -> TrainingState:
    """Not sharded, as a program of one process has it."""
    with torch.device("meta"):
        model = OddModel()
    materialize(model, "cpu", seed)
    optimizer = build_optimizer(model, OPTIM)
    return TrainingState(model=model, optimizer=optimizer, scheduler=build_scheduler(optimizer, OPTIM, TOTAL_STEPS))


def fsdp(mesh: DeviceMesh, seed: int) -> TrainingState:
    return build_state(mesh, seed=seed)


def ddp(mesh: DeviceMesh, seed: int) -> TrainingState:
    return build_state(mesh, seed=seed, config=ModelConfig.model_validate({"parallelism": "ddp"}))


Kind = Callable[[DeviceMesh, int], TrainingState]
KINDS: list[Kind] = [alone, fsdp, ddp]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def trained(state: TrainingState) -> TrainingState:
    """Three steps, after which nothing has the value that it was built with."""
    state.scaler = GradScaler("cpu", **SETTINGS)  # type: ignore[arg-type]
    state.scaler.load_state_dict(state.scaler.state_dict() | {"scale": 2048.0, "_growth_tracker": 5})
    average, own = state.trackers["average"], state.rank_trackers["loader"]
    assert isinstance(average, Average)
    assert isinstance(own, Position)
    for _ in range(3):
        train_step(state)
        average.update(state.model)
    own.position, own.window = 103, torch.tensor([1.5, -2.5])
    state.progress.epoch, state.progress.best_metric, state.progress.best_step = 2, 0.75, 2
    return state


@pytest.mark.parametrize("here", KINDS)
@pytest.mark.parametrize("there", KINDS)
def test_everything_comes_back_in_whatever_form_it_was_saved(mesh: DeviceMesh, there: Kind, here: Kind) -> None:
    store = MemoryStore()
    saved = trained(completed(there(mesh, 3)))
    plan = save_alone(saved, store)
    resumed = completed(here(mesh, 77))
    held = resumed.scaler, resumed.trackers["average"], resumed.rank_trackers["loader"], resumed.progress
    restore(resumed, plan, store, rank=0, world_size=1)
    # The very objects that a loop holds are filled.
    assert held == (resumed.scaler, resumed.trackers["average"], resumed.rank_trackers["loader"], resumed.progress)
    before, after = capture(saved, rank=0, world_size=1), capture(resumed, rank=0, world_size=1)
    assert before.shared_state == after.shared_state
    assert before.rank_state == after.rank_state
    assert before.tensors.keys() == after.tensors.keys()
    for name, tensor in before.tensors.items():
        assert name.startswith("rng.") or torch.equal(whole(tensor), whole(after.tensors[name])), name
    assert resumed.scaler is not None
    assert resumed.scaler.state_dict() == {
        "scale": 2048.0,
        "growth_factor": 4.0,
        "backoff_factor": 0.25,
        "growth_interval": 7,
        "_growth_tracker": 5,
    }
    average = resumed.trackers["average"]
    assert isinstance(average, Average)
    assert average.taken == 3
    for name, parameter in named_parameters(resumed.model):
        assert isinstance(average.values[name], DTensor) is isinstance(parameter, DTensor)
    assert [train_step(saved) for _ in range(3)] == pytest.approx([train_step(resumed) for _ in range(3)], rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_no_stored_name_depends_on_what_wraps_the_model(mesh: DeviceMesh, kind: Kind) -> None:
    store = MemoryStore()
    plan = save_alone(trained(completed(kind(mesh, 3))), store)
    names = set(read_manifest(plan, store).tensors)
    expected = set(capture(trained(completed(alone(mesh, 3))), rank=0, world_size=1).tensors)
    assert names == expected
    assert "rank_tracker.rank-00000.loader.window" in names
    assert "model.scale" not in names  # recomputed, never stored


@pytest.mark.parametrize("part", ["scaler", "average", "loader"])
@pytest.mark.parametrize("is_saved", [True, False])
def test_a_part_that_only_one_side_has_is_refused_by_its_name(mesh: DeviceMesh, part: str, is_saved: bool) -> None:
    def without(state: TrainingState) -> TrainingState:
        if part == "scaler":
            state.scaler = GradScaler("cpu", enabled=False)  # as good as none
        else:
            (state.trackers if part == "average" else state.rank_trackers).clear()
        return state

    store = MemoryStore()
    full, less = completed(alone(mesh, 3)), without(completed(alone(mesh, 3)))
    save_alone(full if is_saved else less, store)
    here = less if is_saved else full
    name = {"scaler": "scaler", "average": "tracker.average", "loader": "rank_tracker.loader"}[part]
    with pytest.raises(ManifestMismatch) as caught:
        restore(here, newest_plan(store), store, rank=0, world_size=1)
    assert (caught.value.unexpected if is_saved else caught.value.missing) == (name,)
    report = restore(here, newest_plan(store, allow_partial=True), store, rank=0, world_size=1)
    assert any(name in line for line in report.lines)


def test_a_sharded_tensor_is_no_ranks_own(mesh: DeviceMesh) -> None:
    state = fsdp(mesh, 3)
    state.rank_trackers["average"] = Average(state.model)
    with pytest.raises(NotPlain, match=r"rank_tracker\.rank-00000\.average\.values\..*make_trackers"):
        capture(state, rank=0, world_size=1)


def test_a_scaler_of_ones_own_with_more_state_keeps_it_and_one_with_tensors_is_refused(mesh: DeviceMesh) -> None:
    class Patient(GradScaler):
        extra: Any = (3, "calm")

        def state_dict(self) -> dict[str, Any]:
            return super().state_dict() | {"extra": self.extra}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict)
            self.extra = state_dict["extra"]

    store = MemoryStore()
    state = alone(mesh, 3)
    state.scaler = Patient("cpu")
    state.scaler.extra = (4, "calmer")
    plan = save_alone(state, store)
    resumed = alone(mesh, 3)
    resumed.scaler = Patient("cpu")
    restore(resumed, plan, store, rank=0, world_size=1)
    assert resumed.scaler.extra == (4, "calmer")
    state.scaler.extra = torch.zeros(2)
    with pytest.raises(NotPlain, match=r"scaler\.extra is a tensor of shape \(2,\)"):
        capture(state, rank=0, world_size=1)


def test_a_checkpoint_of_before_any_of_this_still_fits(mesh: DeviceMesh) -> None:
    """Older Checkpoints name neither the kinds of optimizer and schedule nor digests of trackers."""
    store = MemoryStore()
    saved = alone(mesh, 3)
    train_step(saved)
    manifest = read_manifest(save_alone(saved, store), store)
    shared = {key: value for key, value in manifest.shared_state.items() if key != "scheduler_kind"}
    optimizer = shared["optimizer"]
    assert isinstance(optimizer, dict)
    assert optimizer.pop("kind") == "AdamW"
    old = manifest.model_copy(update={"shared_state": shared, "rank_states": ({"rank": 0, "world_size": 1},)})
    match = compare(alone(mesh, 5), old)
    assert match.is_exact
    assert match.groups.order == (0, 1)
    assert not match.left_out
    assert differing_trackers(old) == {}

"""The trace tells each part of a training state from the others. Real: FSDP2 on gloo, one rank, AdamW."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.fakes.small_training import build_state, train_step
from workers.config import ModelConfig
from workers.names import named_parameters
from workers.state import TrainingState
from workers.step_trace import StepTrace, StepTracer
from workers.weights_digest import weights_digest


class Count:
    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]


def traced(state: TrainingState, step: int = 1) -> StepTrace:
    trace = StepTracer(1, rank=0).take(step, lambda: state)
    assert trace is not None
    return trace


@pytest.fixture
def state(mesh: DeviceMesh) -> TrainingState:
    state = build_state(mesh)
    state.trackers["count"] = Count()
    state.rank_trackers["count"] = Count()
    train_step(state)
    return state


def entry_of(state: TrainingState) -> dict[str, torch.Tensor]:
    entry: dict[str, torch.Tensor] = state.optimizer.state[dict(named_parameters(state.model))["wide"]]
    return entry


def change_weight(state: TrainingState) -> None:
    with torch.no_grad():
        dict(named_parameters(state.model))["wide"].add_(1e-6)


def change_moment(state: TrainingState) -> None:
    entry_of(state)["exp_avg"].mul_(0)


def change_counter(state: TrainingState) -> None:
    entry_of(state)["step"].add_(1)


def change_buffer(state: TrainingState) -> None:
    count = state.model.get_buffer("count")
    count.add_(1)


def change_schedule(state: TrainingState) -> None:
    state.scheduler.last_epoch += 1


def change_tracker(state: TrainingState) -> None:
    count = state.trackers["count"]
    assert isinstance(count, Count)
    count.value += 1


def change_own_tracker(state: TrainingState) -> None:
    count = state.rank_trackers["count"]
    assert isinstance(count, Count)
    count.value += 1


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (change_weight, "weights"),
        (change_moment, "optimizer"),
        (change_counter, "optimizer"),
        (change_buffer, "rest"),
        (change_schedule, "schedule"),
        (change_own_tracker, "own"),
        (change_tracker, "rest"),
        (lambda _: random.random(), "rng"),
        (lambda _: torch.rand(1), "rng"),
    ],
)
def test_what_changes_is_seen_in_its_own_digest_and_in_no_other(
    state: TrainingState, change: Callable[[TrainingState], object], part: str
) -> None:
    before = traced(state)
    assert traced(state) == before
    change(state)
    after = traced(state)
    names = ("weights", "optimizer", "schedule", "rest", "rng", "own")
    assert [name for name in names if getattr(after, name) != getattr(before, name)] == [part]


def test_its_weights_are_those_that_a_run_ends_with(state: TrainingState) -> None:
    assert traced(state).weights == weights_digest(state.model, rank=0)


def test_a_loop_may_have_evaluated_by_itself_in_another_dtype(mesh: DeviceMesh) -> None:
    state = build_state(mesh, config=ModelConfig(compute_dtype="bfloat16"))
    train_step(state)
    before, at_the_end = traced(state), weights_digest(state.model, rank=0)
    with torch.no_grad():
        state.model(torch.zeros(1, 4, dtype=torch.int64))
    assert weights_digest(state.model, rank=0) == at_the_end
    with torch.no_grad():
        state.model(torch.zeros(1, 4, dtype=torch.int64))
    assert traced(state) == before


def test_a_trace_changes_nothing(mesh: DeviceMesh) -> None:
    plain, looked_at = build_state(mesh), build_state(mesh)
    expected = [train_step(plain) for _ in range(4)]
    found = []
    for _ in range(4):
        found.append(train_step(looked_at))
        traced(looked_at)
    assert found == expected


def test_only_the_steps_asked_for_are_looked_at(state: TrainingState) -> None:
    def never() -> TrainingState:
        raise AssertionError("the state was looked at")

    assert StepTracer(None, rank=0).take(4, never) is None
    assert StepTracer(4, rank=0).take(3, never) is None
    assert StepTracer(4, rank=0).take(4, lambda: state) is not None

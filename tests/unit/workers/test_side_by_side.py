"""What was saved beside what was restored, from real optimizers, schedules and scalers; and what a difference says."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh

from storage.errors import ManifestMismatch
from tests.fakes.small_training import build_state, train_step
from workers.contract import CauseKind, FieldPair
from workers.failure_cause import classify
from workers.side_by_side import ResumeDiffers, Saved, differences, side_by_side, table
from workers.snapshot import capture
from workers.state import TrainingState


@pytest.fixture
def state(mesh: DeviceMesh) -> TrainingState:
    state = build_state(mesh)
    for _ in range(3):
        train_step(state)
    return state


def saved_of(state: TrainingState, *, is_built_in: bool = True) -> Saved:
    shared = capture(state, rank=0, world_size=1).shared_state
    assert shared is not None
    return Saved(step=state.progress.step, shared_state=copy.deepcopy(shared), is_built_in=is_built_in)


def found(saved: Saved, state: TrainingState, position: int | None = None) -> tuple[str, ...]:
    position = state.progress.position if position is None else position
    return differences(side_by_side(saved, state, position=position))


def test_equal_states_have_every_field_and_no_difference(state: TrainingState) -> None:
    pairs = side_by_side(saved_of(state), state, position=state.progress.position)
    assert differences(pairs) == ()
    names = {pair.name for pair in pairs}
    assert {"step", "epoch", "tokens", "sample_chain", "sample position", "scheduler.last_epoch"} <= names
    assert {"lr of group 0", "lr of group 1", "scheduled lr of group 0", "step of the schedule"} <= names


def _lr(state: TrainingState) -> None:
    state.optimizer.param_groups[1]["lr"] *= 1 + 1e-12


def _schedule(state: TrainingState) -> None:
    state.scheduler.last_epoch += 1


def _progress(name: str, value: Any) -> Any:
    return lambda state: setattr(state.progress, name, value)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (_lr, "lr of group 1"),
        (_schedule, "scheduler.last_epoch"),
        (_progress("step", 2), "step"),
        (_progress("epoch", 1), "epoch"),
        (_progress("tokens", 1), "tokens"),
        (_progress("sample_chain", "f" * 32), "sample_chain"),
    ],
)
def test_a_living_object_that_was_not_restored_is_named(state: TrainingState, change: Any, field: str) -> None:
    saved = saved_of(state)
    change(state)
    assert any(one.startswith(f"{field} (saved ") for one in found(saved, state))


def test_a_stream_elsewhere_is_named(state: TrainingState) -> None:
    position = state.progress.position
    assert found(saved_of(state), state, position + 1) == (
        f"sample position (saved {position}, restored {position + 1})",
    )


def _in_checkpoint(*path: Any, value: Any) -> Any:
    def change(shared: Any) -> None:
        for part in path[:-1]:
            shared = shared[part]
        shared[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (_in_checkpoint("progress", "step", value=9), "step"),
        (_in_checkpoint("scheduler", "last_epoch", value=9), "step of the schedule"),
        (_in_checkpoint("scheduler", "_last_lr", value=[1.0, 1.0]), "scheduled lr of group 0"),
    ],
)
def test_a_checkpoint_that_contradicts_itself_is_named_although_all_of_it_was_restored(
    state: TrainingState, change: Any, field: str
) -> None:
    saved = saved_of(state)
    change(saved.shared_state)
    progress: Any = saved.shared_state["progress"]
    scheduler: Any = saved.shared_state["scheduler"]
    state.progress.step = progress["step"]
    state.scheduler.load_state_dict(scheduler)
    assert any(one.startswith(f"{field} (saved ") for one in found(saved, state))


def test_a_schedule_of_the_loops_own_may_count_as_it_likes(state: TrainingState) -> None:
    state.scheduler.last_epoch = 40
    assert found(saved_of(state, is_built_in=False), state) == ()


def test_a_scaler_that_was_not_restored_is_named(state: TrainingState) -> None:
    state.scaler = GradScaler("cpu", init_scale=1024.0)
    state.scaler.scale(torch.ones(()))  # else it has no state yet
    saved = saved_of(state)
    assert found(saved, state) == ()
    state.scaler.update(512.0)
    assert found(saved, state) == ("scaler.scale (saved 1024.0, restored 512.0)",)
    state.scaler.update(1024.0)
    state.scaler.load_state_dict(state.scaler.state_dict() | {"_growth_tracker": 3})
    assert found(saved, state) == ("scaler.growth_tracker (saved 0, restored 3)",)


def test_the_table_marks_what_differs() -> None:
    pairs = (FieldPair(name="step", saved="4", restored="4"), FieldPair(name="epoch", saved="0", restored="1"))
    lines = table(pairs)
    assert lines[0].split() == ["field", "saved", "restored"]
    assert lines[1].split() == ["step", "4", "4"]
    assert lines[2].split() == ["epoch", "0", "1", "DIFFERS"]


def test_the_refusal_names_fields_is_a_mismatch_and_survives_pickling() -> None:
    error = ResumeDiffers(40, ("lr of group 0 (saved 0.1, restored 0.2)",))
    assert classify(error) is CauseKind.CHECKPOINT_MISMATCH
    assert isinstance(error, ManifestMismatch)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert "step 40" in str(again)
    assert "lr of group 0 (saved 0.1, restored 0.2)" in str(again)

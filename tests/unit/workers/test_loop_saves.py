"""What a loop without a coordinator saves at each boundary, with saves that end when the test says so."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from pydantic import JsonValue

from storage.config import CheckpointConfig
from storage.errors import StorageError
from workers.loop_saves import LoopSaves, Taking
from workers.save_trigger import EverySteps, SaveOver, StepFacts
from workers.state import Progress, TrainingState
from workers.unison import Ranks


class HeldSaves:
    """In the place of LoopCheckpoints: a save is over when `end` was called, or when it is waited for."""

    def __init__(self) -> None:
        self.saved: list[int] = []
        self.told: list[dict[str, Any]] = []
        self.failure: str | None = None
        self.step_under_way: int | None = None
        self.is_over = False

    def save(
        self, state: TrainingState, *, loss: float | None, metric: float | None, metadata: dict[str, JsonValue]
    ) -> None:
        assert self.step_under_way is None, "two saves at once"
        self.step_under_way = state.progress.step
        self.saved.append(state.progress.step)
        self.told.append({**metadata, "loss": loss, "metric": metric})

    def end(self) -> None:
        self.is_over = True

    def settle(self, timeout_s: float) -> SaveOver | None:
        assert timeout_s > 0
        step, self.step_under_way, self.is_over = self.step_under_way, None, False
        if step is None:
            return None
        return SaveOver(step=step, stall_s=0.1, write_s=1.0, raw_bytes=1, failure=self.failure)


class Loop:
    """Steps one by one; ``takings`` is what the state was asked for with."""

    def __init__(self, every_steps: int, base_step: int = 0, ranks: Ranks | None = None, **settings: Any) -> None:
        self.held, self.takings = HeldSaves(), list[Taking]()
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters())
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
        self._state = TrainingState(model=model, optimizer=optimizer, scheduler=schedule)
        self.saves = LoopSaves(
            self.held,  # type: ignore[arg-type]
            ranks or Ranks(1.0),
            EverySteps(every_steps),
            self._take,
            config=CheckpointConfig(**settings),
        )
        self.saves.begin(base_step, 100)

    def _take(self, taking: Taking) -> TrainingState:
        self.takings.append(taking)
        self._state.progress = Progress(step=taking.step)
        return self._state

    def step(self, step: int, *, stop: bool = False, metric: float | None = None) -> bool:
        return self.saves.boundary(
            step, StepFacts(step=step, step_s=1.0, loss=2.0 / step, metric=metric), told_to_stop=stop
        )


def test_the_step_that_training_begins_with_is_not_saved_again() -> None:
    loop = Loop(5, base_step=10)
    assert not loop.saves.boundary(10, None, told_to_stop=False)
    assert loop.held.saved == []


def test_a_cadence_that_is_met_while_a_save_is_under_way_is_made_up_for_once() -> None:
    loop = Loop(2)
    for step in range(1, 8):
        loop.step(step)
    assert loop.held.saved == [2]
    loop.held.end()
    loop.step(8)
    assert loop.held.saved == [2, 8]
    assert loop.saves.saved_step == 2


def test_loss_and_metric_go_with_the_step_they_were_measured_at_alone() -> None:
    loop = Loop(1)
    loop.step(1, metric=0.5)
    loop.held.end()
    loop.step(2)
    assert loop.held.told == [
        {"reason": "every 1 steps", "loss": 2.0, "metric": 0.5},
        {"reason": "every 1 steps", "loss": 1.0, "metric": None},
    ]


def test_a_stop_waits_for_the_save_under_way_and_commits_its_own_step() -> None:
    loop = Loop(2)
    loop.step(2)
    assert loop.step(3, stop=True)
    assert loop.held.saved == [2, 3]
    assert loop.takings[-1] == Taking(step=3, is_last=True)
    assert loop.saves.saved_step == 3


def test_a_stop_at_a_step_that_is_committed_saves_nothing_more() -> None:
    loop = Loop(2)
    loop.step(2)
    assert loop.step(2, stop=True)
    assert loop.held.saved == [2]


def test_a_save_that_fails_is_said_and_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(2)
    loop.held.failure = "StoreUnavailable: gone"
    with caplog.at_level(logging.WARNING):
        for step in range(1, 6):
            loop.step(step)
            loop.held.end()
    assert loop.held.saved == [2, 4]
    assert loop.saves.saved_step == 0
    assert "step 2 was not saved: StoreUnavailable: gone" in caplog.text


def test_so_many_failures_in_a_row_end_the_training() -> None:
    loop = Loop(1, max_failed_saves=2)
    loop.held.failure = "gone"
    loop.step(1)
    loop.held.end()
    loop.step(2)
    loop.held.end()
    with pytest.raises(StorageError, match="2 saves in a row failed"):
        loop.step(3)


def test_a_last_step_that_fails_is_an_error_that_says_where_it_goes_on() -> None:
    loop = Loop(2)
    loop.step(2)
    loop.held.end()
    loop.step(3)
    loop.held.failure = "gone"
    with pytest.raises(StorageError, match=r"step 4.*gone.*goes on from step 2"):
        loop.saves.finish(4, None, told_to_stop=lambda: False)


def test_who_is_told_to_stop_while_the_last_step_is_saved_stops() -> None:
    loop = Loop(2)
    loop.step(1)
    assert loop.saves.finish(2, None, told_to_stop=lambda: loop.held.saved == [2])
    assert not Loop(2).saves.finish(2, None, told_to_stop=lambda: False)

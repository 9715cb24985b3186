"""Waiting for a store that is away: repeated calls, waits that do not count an outage, and what ends them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from orchestrator.decisions import Stop
from orchestrator.exit_codes import ExitCode
from orchestrator.recorder import Recorder
from orchestrator.signals import Committed, SaveDelayed, Signal, StepFinished
from orchestrator.store_waits import StoreWaits
from orchestrator.store_watch import StoreUser
from storage.config import CheckpointConfig
from storage.errors import ObjectMissing, StoreRefused, StoreUnavailable
from storage.keys import Attempt
from workers.contract import StepReport

ATTEMPT = Attempt(number=1, nonce="00000000")
DELAY = SaveDelayed(attempt=ATTEMPT, step=10, rank=0, reason="503", failing_for_s=0.0)
COMMITTED = Committed(attempt=ATTEMPT, step=10, stored_bytes=1, stall_s=0.0, upload_s=0.0, loss=None)
STOPPED = Stop(exit_code=ExitCode.STOPPED, reason="asked")


class Scene:
    """A clock that sleeps move on, a coordinator and a store that follow a script of times."""

    def __init__(self, *, back_at: float = float("inf"), settled_at: float = float("inf"), **config: Any) -> None:
        self.now = 0.0
        self.back_at, self.settled_at = back_at, settled_at
        self.signals: list[Signal] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.under_way: dict[int, tuple[int, ...]] = {}
        self.ordered: list[str] = []
        self.asked: Stop | None = None
        self.num_ticks = 0
        self.waits = StoreWaits(
            coordinator=self,
            recorder=Recorder(self, start_unix_s=0.0),
            config=CheckpointConfig(**config),
            tick=self._tick,
            asked_to_stop=lambda: self.asked,
            monotonic=lambda: self.now,
            wall_clock=lambda: self.now,
            sleep=self._sleep,
        )

    def named(self, name: str) -> list[dict[str, Any]]:
        return [fields for event, fields in self.events if event == name]

    def emit(self, event: str, **fields: Any) -> None:
        self.events.append((event, fields))

    def drain_signals(self) -> tuple[Signal, ...]:
        signals, self.signals = tuple(self.signals), []
        return signals

    def wait_settled(self, step: int | None, timeout_s: float) -> bool:
        assert step == 10
        if self.now >= self.settled_at:
            return True
        self.now += timeout_s
        return False

    def has_committed(self, step: int) -> bool:
        assert step == 10
        return self.now >= self.settled_at

    def pending(self) -> dict[int, tuple[int, ...]]:
        return self.under_way

    def submit_snapshot(self, reason: str) -> int:
        self.ordered.append(reason)
        return len(self.ordered)

    def check_store(self) -> None:
        if self.now < self.back_at:
            raise StoreUnavailable("list", "lease/", "refused")

    def plan(self) -> str:
        self.check_store()
        return "plan"

    def _tick(self) -> None:
        self.num_ticks += 1
        self.waits.take_signals()

    def _sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_call_is_made_until_the_store_is_back_while_the_books_are_kept() -> None:
    scene = Scene(back_at=60.0)
    assert scene.waits.call(StoreUser.PLAN, scene.plan) == "plan"
    assert 60.0 <= scene.now <= 65.0
    assert scene.num_ticks > 100
    assert [event for event, _ in scene.events].count("store_away") == 1
    (back,) = scene.named("store_back")
    assert back["away_s"] == scene.now


def test_a_call_is_given_up_after_the_longest_outage_with_what_failed() -> None:
    scene = Scene(max_outage_s=30.0)
    stop = scene.waits.call(StoreUser.PLAN, scene.plan)
    assert isinstance(stop, Stop)
    assert stop.exit_code is ExitCode.STORAGE_OUTAGE
    assert "list lease/ failed: refused" in stop.reason
    assert 30.0 < scene.now < 31.0
    assert scene.named("work_at_risk"), "what is lost is said at the end"


def test_a_person_ends_the_wait_at_once() -> None:
    scene = Scene()
    scene.asked = STOPPED
    assert scene.waits.call(StoreUser.PLAN, scene.plan) is STOPPED
    assert scene.now == 0.0


@pytest.mark.parametrize("error", [ObjectMissing("k"), StoreRefused("list", "k", "denied")])
def test_an_answer_that_waiting_cannot_change_is_raised(error: Exception) -> None:
    scene = Scene()

    def refuse() -> None:
        raise error

    with pytest.raises(type(error)):
        scene.waits.call(StoreUser.PLAN, refuse, outlasts_refusals=False)
    assert not scene.waits.is_away


@pytest.mark.parametrize(("settled_at", "ended_at"), [(500.0, 500.0), (float("inf"), 410.0)])
def test_a_wait_for_a_save_counts_only_the_time_in_which_the_store_answers(settled_at: float, ended_at: float) -> None:
    scene = Scene(back_at=400.0, settled_at=settled_at)
    scene.signals = [DELAY]
    scene.waits.take_signals()
    limit_s = 1000.0 if settled_at == 500.0 else 10.0
    assert keep_failing(scene, until=400.0, act=lambda: scene.waits.wait_settled(10, limit_s)) is None
    assert ended_at <= scene.now < ended_at + 2.0


def test_a_wait_without_an_outage_has_its_limit_and_a_stop_waits_for_the_save() -> None:
    scene = Scene()
    scene.asked = STOPPED
    assert scene.waits.wait_settled(10, 5.0) is None
    assert scene.now == 5.0


def test_a_wait_in_an_outage_is_ended_by_a_person_or_the_policy() -> None:
    scene = Scene(max_outage_s=30.0)
    scene.signals = [DELAY]
    scene.waits.take_signals()
    stop = keep_failing(scene, until=1e9, act=lambda: scene.waits.wait_settled(10, 5.0))
    assert stop is not None
    assert stop.exit_code is ExitCode.STORAGE_OUTAGE
    scene = Scene()
    scene.signals, scene.asked = [DELAY], STOPPED
    scene.waits.take_signals()
    assert scene.waits.wait_settled(10, 600.0) is STOPPED


def test_failed_saves_in_a_row_are_a_verdict_that_stays() -> None:
    scene = Scene(max_failed_saves=1)
    assert scene.waits.verdict() is None
    scene.waits._watch._failed_in_row = 1
    stop = scene.waits.verdict()
    assert stop is not None
    scene.signals = [COMMITTED]
    scene.waits.take_signals()
    assert scene.waits.verdict() is stop


def test_trouble_that_nobody_speaks_of_any_more_is_looked_into_by_another_save() -> None:
    scene = Scene()
    scene.signals = [DELAY]
    for scene.now in range(0, 200, 5):
        scene.waits.take_signals()
    assert len(scene.ordered) == 2
    scene.under_way = {10: (0,), 20: (0,)}
    for scene.now in range(200, 400, 5):
        scene.waits.take_signals()
    assert len(scene.ordered) == 2, "two saves are under way: they will tell"
    scene.under_way = {}
    scene.signals = [COMMITTED]
    for scene.now in range(400, 600, 5):
        scene.waits.take_signals()
    assert len(scene.ordered) == 2


def test_the_last_save_of_a_run_that_an_outage_ends_gets_one_more_try() -> None:
    stop = Stop(exit_code=ExitCode.STORAGE_OUTAGE, reason="away for long")
    scene = Scene()
    assert scene.waits.last_try(10, 60.0, stop) is stop
    assert scene.now == 10.0
    scene = Scene(settled_at=0.0)
    assert "committed after all" in scene.waits.last_try(10, 60.0, stop).reason


def test_a_stop_whose_last_save_is_not_committed_says_what_is_lost() -> None:
    scene = Scene()
    report = StepReport(step=10, loss=1.0, grad_norm=1.0, lr=0.1, tokens=1, position=1, sample_chain="c", step_s=1.0,
                        finished_at_s=0.0)  # fmt: skip
    scene.waits.begin_attempt(4)
    scene.signals = [StepFinished(attempt=ATTEMPT, report=report)]
    ended = scene.waits.last_try(10, 60.0, STOPPED)
    assert scene.now == 60.0
    assert ended.exit_code is ExitCode.STOPPED
    assert "asked; the last save, of step 10, was not committed; newest checkpoint: step 4, 6 steps" in ended.reason
    scene = Scene(settled_at=30.0)
    assert scene.waits.last_try(10, 60.0, STOPPED) is STOPPED


def test_a_stop_waits_no_longer_once_the_store_turns_out_to_be_away() -> None:
    scene = Scene()
    ended = keep_failing(scene, until=1e9, act=lambda: scene.waits.last_try(10, 60.0, STOPPED))
    assert 10.0 <= scene.now <= 11.0
    assert isinstance(ended, Stop)
    assert "the store has been away for" in ended.reason


def keep_failing(scene: Scene, *, until: float, act: Callable[[], Stop | None]) -> Stop | None:
    """A Keeper that says every so often that the store still fails it."""
    drain = scene.drain_signals

    def speak() -> tuple[Signal, ...]:
        return (*drain(), *((DELAY,) if scene.now < until else ()))

    scene.drain_signals = speak  # type: ignore[method-assign]  # a script for this scene alone
    return act()

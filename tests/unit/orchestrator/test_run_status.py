"""The status line: what is known of a Run at each time, and nothing that is not."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.progress import Progress

from orchestrator.event_fields import Event
from orchestrator.event_lines import event_line
from orchestrator.progress import _status_column
from orchestrator.run_status import RunStatus


def training(steps: int, step_s: float = 1.0) -> list[Event]:
    made: list[Event] = [{"event": "step", "step": step, "step_s": step_s} for step in range(1, steps + 1)]
    return [{"event": "attempt_started", "world_size": 4, "restored_step": 0}, *made]


@pytest.mark.parametrize(
    ("restored", "shown"),
    [
        ({"restored_from": "object-storage"}, "committed 20"),
        ({"restored_from": "local-disk", "durable_step": 20}, "committed 20"),
        ({"restored_from": "peer-memory", "durable_step": 15}, "committed 15"),
        ({"restored_from": "peer-memory", "durable_step": 0}, "no checkpoint yet"),
        ({"restored_from": "none", "restored_step": 0}, "no checkpoint yet"),
        ({"restored_from": "peer-memory"}, "1 worker"),
    ],
)
def test_a_resumed_run_is_said_to_have_the_checkpoint_that_it_has(restored: Event, shown: str) -> None:
    status = RunStatus()
    status.add({"event": "attempt_started", "restored_step": 20, "world_size": 1, **restored})
    assert f" · {shown} · " in status.line()
    assert ("no checkpoint" in status.line()) is (shown == "no checkpoint yet")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], "no checkpoint was committed, so the same command begins anew"),
        (
            [{"event": "committed", "step": 2}],
            "newest checkpoint: step 2; step 3 will be trained again; the same command goes on from there",
        ),
        (
            [{"event": "committed", "step": 1}, {"event": "save_failed", "step": 3}],
            "newest checkpoint: step 1; steps 2 to 3 will be trained again; the same command goes on from there",
        ),
        ([{"event": "committed", "step": 3}], "newest checkpoint: step 3; the same command goes on from there"),
        (
            [{"event": "committed", "step": 3}, {"event": "quarantined", "step": 3}],
            "the same command goes on from the newest checkpoint, if there is one",
        ),
    ],
)
def test_of_a_run_whose_driver_was_killed_it_is_said_from_where_it_goes_on(more: list[Event], said: str) -> None:
    status = RunStatus()
    for event in (*training(3), *more):
        status.add(event)
    assert status.last_words() == said


@pytest.mark.parametrize(
    ("found", "shown"),
    [
        ({}, "starting"),
        ({"reached_step": 0, "durable_step": 0}, "step 0/1500 · no checkpoint yet · starting"),
        ({"reached_step": 86, "durable_step": 80}, "resuming: step 86/1500 reached · committed 80 · starting"),
        ({"reached_step": 86, "durable_step": 0}, "resuming: step 86/1500 reached · no checkpoint yet · starting"),
    ],
)
def test_what_a_driver_found_of_the_run_is_said_before_its_first_attempt_and_nothing_else(
    found: Event, shown: str
) -> None:
    status = RunStatus(total_steps=1500)
    assert status.line() == "starting"
    status.add({"event": "driver_started", "nonce": "0", "pid": 1, **found})
    assert status.line() == shown
    status.add({"event": "waiting", "have": 0, "need": 1, "missing": "1 more worker(s)"})
    assert status.line() == shown.replace("starting", "waiting for nodes")


def test_a_driver_that_takes_over_in_the_same_view_has_no_workers_yet() -> None:
    status = RunStatus(total_steps=100)
    for event in training(steps=3):
        status.add(event)
    status.add({"event": "driver_started", "reached_step": 3, "durable_step": 2})
    assert status.line() == "resuming: step 3/100 reached · committed 2 · starting"
    status.add({"event": "attempt_started", "world_size": 4, "restored_step": 2, "durable_step": 2})
    assert status.line() == "step 2/100 · 4 workers · committed 2 · forming"


@pytest.mark.parametrize(("step_s", "quiet_s", "said_s"), [(0.5, 5.0, 9.0), (2.0, 10.0, 10.6)])
def test_no_step_for_clearly_longer_than_usual_is_said_until_one_comes(
    step_s: float, quiet_s: float, said_s: float
) -> None:
    now = [100.0]
    status = RunStatus(monotonic=lambda: now[0])
    for event in training(4, step_s):
        status.add(event)
    now[0] = 100.0 + quiet_s
    assert status.silence() is None
    now[0] = 100.0 + said_s
    assert status.silence() == f"no step for {said_s:.0f} s"
    silent: Event = {"event": "worker_silent", "workers": ["w1", "w2", "w3"], "num_workers": 3, "silent_s": 5.1}
    status.add({**silent, "workers": ["w1"], "num_workers": 1})
    assert status.silence() == f"no step for {said_s:.0f} s, no answer from w1"
    status.add(silent)
    assert (status.silence() or "").endswith("no answer from w1, w2 and 1 more")
    assert event_line(silent) is None, "a fault will say it where it becomes one"
    status.add({"event": "step", "step": 5, "step_s": said_s})
    assert status.silence() is None


@pytest.mark.parametrize(
    "event",
    [
        {"event": "fault", "cause": "hang"},
        {"event": "checkpointing", "step": 4},
        {"event": "attempt_ended", "reason": "left"},
        {"event": "attempt_started", "world_size": 3, "restored_step": 4},
        {"event": "run_finished", "status": "stopped"},
    ],
)
def test_a_world_that_is_at_something_else_owes_no_step(event: Event) -> None:
    now = [100.0]
    status = RunStatus(monotonic=lambda: now[0])
    silent: Event = {"event": "worker_silent", "workers": ["w1"], "num_workers": 1, "silent_s": 5.1}
    is_over = event["event"] not in ("checkpointing", "run_finished")
    for earlier in (*training(4), *([silent] if is_over else []), event):
        status.add(earlier)
    now[0] = 200.0
    assert status.silence() is None


def test_the_live_line_says_that_no_step_comes_without_any_event() -> None:
    now = [100.0]
    status = RunStatus(monotonic=lambda: now[0])
    for event in training(4):
        status.add(event)
    column = _status_column(status)
    progress = Progress(column, console=Console(file=io.StringIO()))
    progress.add_task(status.line())
    (task,) = progress.tasks
    assert str(column(task)).endswith(" · training")
    now[0] = 109.0
    assert str(column(task)).endswith(" · training · no step for 9 s")


def test_the_speed_is_not_computed_across_a_rollback() -> None:
    status = RunStatus()
    status.add({"event": "step", "step": 5, "tokens": 500, "step_s": 1.0})
    status.add({"event": "attempt_started", "restored_step": 2, "world_size": 1})
    status.add({"event": "step", "step": 3, "tokens": 300, "step_s": 1.0})
    assert status.tokens_per_s is None
    status.add({"event": "step", "step": 4, "tokens": 400, "step_s": 1.0})
    assert status.tokens_per_s == 100.0


def test_work_at_risk_is_what_memory_does_not_hold_either() -> None:
    status = RunStatus()
    status.add({"event": "attempt_started", "world_size": 2, "restored_step": 0})
    status.add({"event": "step", "step": 7, "world_size": 2, "safe_step": 6, "memory_step": 7})
    assert "no checkpoint yet · 6 in memory · 1 step at risk" in status.line()
    status.add({"event": "step", "step": 8, "world_size": 2, "safe_step": 8})
    assert "at risk" not in status.line()


def test_a_world_smaller_than_wanted_shows_both_numbers() -> None:
    status = RunStatus()
    status.add({"event": "attempt_started", "world_size": 2, "wanted_workers": 4})
    assert "2 of 4 workers" in status.line()
    status.add({"event": "decision", "decision": "scale", "workers": 2, "reason": "asked for"})
    assert " 2 workers" in status.line()
    status.add({"event": "attempt_started", "world_size": 1, "wanted_workers": 1})
    assert "1 worker " in status.line()

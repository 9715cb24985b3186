"""When a Run saved and why, folded from events written by hand, and how the report and the live lines say it."""

from __future__ import annotations

import io

import pytest

from orchestrator.event_lines import event_line
from orchestrator.progress import open_progress
from orchestrator.report_text import report_text
from orchestrator.save_summary import SaveFold, SavesSummary, is_routine, policy_of
from orchestrator.summary import Event, summarize

HAZARD = "hazard: 12 min since commit, MTBF 41 min, cost 3.1 s"


def steps(attempt: int, first: int, last: int, t_s: float, step_s: float = 2.0) -> list[Event]:
    return [
        {"event": "step", "attempt": attempt, "step": step, "step_s": step_s, "loss": 1.0, "tokens": step,
         "finished_s": t_s + (step - first + 1) * step_s}
        for step in range(first, last + 1)
    ]  # fmt: skip


def bound(attempt: int, step: int, reason: str, kind: str = "snapshot") -> Event:
    return {"event": "save_bound", "attempt": attempt, "step": step, "kind": kind, "reason": reason}


def committed(attempt: int, step: int, size: int = 1000) -> Event:
    return {"event": "committed", "attempt": attempt, "step": step, "stored_bytes": size, "stall_s": 0.5}


def begun(attempt: int, restored: int) -> Event:
    return {"event": "attempt_started", "attempt": attempt, "restored_step": restored, "world_size": 2, "cause": "x"}


def run_log() -> list[Event]:
    held: Event = {"event": "save_weighed", "step": 20, "opinions": [], "held_back": "2 saves are still under way"}
    return [
        {"event": "run_started", "run_id": "r", "steps": 60, "is_new": True, "t_s": 0.0},
        begun(1, 0),
        *steps(1, 1, 8, 0.0),
        bound(1, 10, HAZARD),
        *steps(1, 9, 19, 16.0),
        held,
        {**held, "held_back": None},
        bound(1, 20, "cadence"),
        {"event": "save_skipped", "attempt": 1, "step": 20, "reason": "two earlier saves are not settled yet"},
        committed(1, 10),
        *steps(1, 20, 22, 38.0),
        bound(1, 24, HAZARD),
        *steps(1, 23, 30, 44.0),
        {"event": "threshold_moved", "old": 0.65, "new": 0.69, "why": "the newest save stored 1.2 GB"},
        bound(1, 30, "instability: score 0.71 above 0.65"),
        bound(1, 32, "2 new worker(s) ready", "part"),
        begun(2, 24),
        *steps(2, 25, 50, 70.0),
        bound(2, 50, HAZARD),
        bound(2, 52, "asked for"),
        *steps(2, 51, 52, 122.0),
        committed(2, 50, 3000),
        bound(2, 55, "2 new worker(s) ready", "leave"),
        bound(2, 60, "cadence"),
    ]  # fmt: skip


def saves_of(events: list[Event]) -> SavesSummary:
    fold = SaveFold()
    for event in events:
        fold.add(event)
    return fold.result()


def test_saves_are_counted_by_policy_and_measured_from_one_to_the_next() -> None:
    assert saves_of(run_log()) == SavesSummary(
        ordered=7,
        committed=2,
        by_policy={"hazard": 3, "cadence": 1, "instability": 1, "leave": 1, "order": 1},
        # 10, 24 and 30 of Attempt 1, 50 and 52 of Attempt 2: the skipped, the leaving and the last one do not count
        spacing={"mean_steps": 22 / 3, "densest_steps": 2, "sparsest_steps": 14, "mean_s": 44 / 3, "densest_s": 4.0,
                 "sparsest_s": 28.0},
        stall_s=1.0,
        stall_share=1.0 / (2.0 * 58),
        stored_bytes=4000,
        held_back=1,
        skipped=1,
        threshold_moves=1,
        threshold=0.69,
    )  # fmt: skip


def test_the_report_says_it_in_six_lines() -> None:
    text = report_text(summarize(run_log()), url="/out")
    assert text.partition("Saves\n")[2].partition("\n\n")[0].splitlines() == [
        "  ordered      7: 3 hazard, 1 cadence, 1 instability, 1 leave, 1 order",
        "  committed    2",
        "  apart        7.333 steps, 14.7 s in the mean; 2 to 14 steps, 4.00 s to 28.0 s",
        "  cost         1.00 s of training, 0.86% of it; 4.0 kB stored",
        "  left out     held back at 1 weighing, 1 skipped: two earlier ones were under way",
        "  threshold    moved 1 time, now 0.69",
    ]


def test_a_run_that_saved_nothing_has_no_part_about_saves() -> None:
    assert "Saves" not in report_text(summarize(run_log()[:3]), url="/out")


def test_the_summary_of_an_older_version_still_gives_a_report() -> None:
    summary = summarize(run_log())
    del summary["saves"]["committed"]
    assert "Saves\n  ordered      7: 3 hazard" in report_text(summary, url="/out")
    assert "  committed    2\n" not in report_text(summary, url="/out")
    del summary["saves"]  # type: ignore[misc] # as it is read from summary.json
    assert "Saves" not in report_text(summary, url="/out")


@pytest.mark.parametrize(
    ("reason", "kind", "policy"),
    [
        (HAZARD, "snapshot", "hazard"),
        ("memory-pressure: 2 ranks", "snapshot", "memory-pressure"),
        ("cadence", "snapshot", "cadence"),
        ("asked for", "snapshot", "order"),
        ("after a preemption notice: what was in memory", "snapshot", "order"),
        ("", "snapshot", "order"),
        ("3 new worker(s) ready", "leave", "leave"),
        ("notice for node ab", "leave_bounded", "leave-bounded"),
    ],
)
def test_the_policy_is_the_word_before_the_colon(reason: str, kind: str, policy: str) -> None:
    assert policy_of(reason, kind) == policy


def test_a_fixed_cadence_is_routine_and_nothing_else() -> None:
    assert is_routine("cadence")
    assert is_routine("time: 30 s since the last save, checkpoint.every_s 30")
    assert not is_routine(HAZARD)


def test_a_save_that_is_not_the_plain_cadence_is_said_with_its_reason_once_a_minute_for_each_policy() -> None:
    stream = io.StringIO()
    view = open_progress(total_steps=1000, stream=stream)
    for step in range(11, 130):
        view.on_event({"event": "step", "step": step, "loss": 5.0, "finished_s": 100.0 + step})
        view.on_event(bound(1, step + 2, HAZARD))
        view.on_event(bound(1, step + 2, "cadence"))
        if step == 40:
            view.on_event(bound(1, step + 2, "instability: score 0.71 above 0.65"))
    said = [line for line in stream.getvalue().splitlines() if "save" in line]
    assert said == [
        f"save at step 13: {HAZARD}",
        "save at step 42: instability: score 0.71 above 0.65",
        f"save at step 73: {HAZARD}",
    ]


def test_what_is_saved_on_leaving_is_always_said() -> None:
    stream = io.StringIO()
    view = open_progress(total_steps=1000, stream=stream)
    for step in (7, 9):
        view.on_event(bound(1, step, "2 new worker(s) ready", "leave"))
    view.on_event(bound(1, 11, "notice for node ab", "leave_bounded"))
    view.on_event(bound(1, 12, "notice for node ab", "part"))
    assert stream.getvalue().splitlines() == [
        "leaving at step 7 with a save: 2 new worker(s) ready",
        "leaving at step 9 with a save: 2 new worker(s) ready",
        "leaving at step 11 with a save in its bounded form: notice for node ab",
        "leaving at step 12, which memory holds: notice for node ab",
    ]


def test_a_moved_threshold_and_a_large_save_are_one_line_each() -> None:
    moved: Event = {"event": "threshold_moved", "old": 0.65, "new": 0.6912, "why": "the newest save stored 1.2 GB"}
    line = "the threshold of instability moved, 0.65 -> 0.691: the newest save stored 1.2 GB"
    assert event_line(moved) == line
    large: Event = {"event": "save_share", "share": 0.21, "why": "the moments are kept in fp32"}
    assert event_line(large) == "a save is large for this machine's memory: the moments are kept in fp32"
    assert event_line({"event": "save_share", "share": 0.1, "why": None}) is None

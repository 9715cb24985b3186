"""The final report and the progress lines, as text."""

from __future__ import annotations

import io
import math

import pytest

from orchestrator.event_lines import event_line
from orchestrator.progress import open_progress
from orchestrator.report_text import duration, report_text, size, sparkline
from orchestrator.run_status import RunStatus
from orchestrator.summary import Event, summarize


def run_log() -> list[Event]:
    def step(attempt: int, number: int, t_s: float, world: int) -> Event:
        return {"event": "step", "t_s": t_s, "attempt": attempt, "step": number, "loss": 8.0 - number, "step_s": 1.0,
                "tokens": number * 2048, "sample_chain": "c", "world_size": world}  # fmt: skip

    return [
        {"event": "run_started", "t_s": 0.0, "run_id": "first-run", "steps": 6},
        {"event": "attempt_started", "t_s": 4.0, "attempt": 1, "cause": "start", "world_size": 4, "restored_step": 0,
         "restored_from": "none"},
        *[step(1, number, 5.0 + number, 4) for number in (1, 2, 3)],
        {"event": "committed", "t_s": 7.5, "attempt": 1, "step": 2, "bytes": 61_300_000, "stall_s": 0.1,
         "upload_s": 0.4},
        {"event": "fault", "t_s": 8.5, "attempt": 1, "cause": "node-lost", "nodes": [], "workers": [], "detail": "n2"},
        {"event": "attempt_started", "t_s": 8.6, "attempt": 2, "cause": "node-lost", "world_size": 3,
         "restored_step": 2, "restored_from": "object-storage", "detected_s": 8.5},
        *[step(2, number, 8.0 + number, 3) for number in (3, 4, 5, 6)],
        {"event": "run_finished", "t_s": 15.0, "status": "finished", "exit_reason": "all 6 steps are done",
         "exit_code": 0, "weights_digest": "ab"},
    ]  # fmt: skip


def test_the_report_says_what_happened_what_it_cost_and_where_things_are() -> None:
    text = report_text(summarize(run_log()), url="/out/first-run")
    assert "Run first-run: finished after 6 steps" in text
    assert "loss 7.000 -> 2.000, 12,288 tokens seen" in text
    assert "4 from step 1, 3 from step 3" in text
    row = next(line for line in text.splitlines() if "a machine died" in line)
    assert row.split("  ")[-1].strip() == "2.50 s"
    assert "step 2, object-storage" in row
    assert "1 step" in row
    assert "1 committed, the newest of step 2 (61.3 MB)" in text
    assert "raysume checkpoints verify /out/first-run" in text


def test_the_costs_add_up_to_the_whole_time_of_all_drivers() -> None:
    text = report_text(summarize(run_log()), url="/out")
    block = text.partition("Where 15.0 s went\n")[2].partition("\n\n")[0].splitlines()
    shares = [float(line.split()[-1].rstrip("%")) for line in block]
    assert "starting, stopping, between drivers" in block[-1]
    assert sum(shares) == pytest.approx(100, abs=0.5)
    nothing: Event = {
        "event": "run_finished",
        "t_s": 12.6,
        "status": "config-error",
        "exit_reason": "x",
        "exit_code": 10,
    }
    assert "Where 12.6 s went\n  starting, stopping, between drivers      12.6 s  100.0%\n\n" in report_text(
        summarize([nothing]), url="/out"
    )


def test_checkpoints_that_are_gone_or_out_of_use_are_counted_apart() -> None:
    events = [*run_log()]
    events[6:6] = [{**events[5], "step": step} for step in (3, 4)]
    summary = summarize(events)
    assert "  checkpoints  3 committed, 1 in use, the newest of step 3 " in report_text(summary, url="/o", in_use={3})
    assert "  checkpoints  3 committed, 0 in use\n" in report_text(summary, url="/o", in_use=())
    assert "  checkpoints  3 committed, the newest of step 4 " in report_text(summary, url="/o", in_use={2, 3, 4})


def test_a_run_that_never_trained_still_has_a_report() -> None:
    text = report_text(summarize([]), url="/out")
    assert "after 0 steps" in text
    assert "none was committed" in text


@pytest.mark.parametrize(
    ("values", "bars"),
    [
        ([3.0, 2.0, 1.0], "█▅▁"),
        ([1.0, 1.0], "▁▁"),
        ([1.0, math.nan, 2.0], "▁!█"),
        ([math.inf], "!"),
        ([], ""),
    ],
)
def test_a_curve_is_one_row_of_bars(values: list[float], bars: str) -> None:
    assert sparkline(values) == bars


def test_a_long_curve_is_averaged_down_to_its_width() -> None:
    assert sparkline([float(value) for value in range(100)], width=8) == "▁▂▃▄▅▆▇█"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.844, "0.84 s"), (12.34, "12.3 s"), (185, "3 min 5 s"), (7800, "2 h 10 min"), (273600, "3 d 4 h")],
)
def test_durations_are_written_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("num_bytes", "text"), [(512, "512 B"), (61_300_000, "61.3 MB"), (2e15, "2.0 PB")])
def test_sizes_are_written_for_people(num_bytes: float, text: str) -> None:
    assert size(num_bytes) == text


def test_plain_progress_writes_a_line_every_ten_steps_and_for_events_of_note() -> None:
    stream = io.StringIO()
    view = open_progress(total_steps=30, stream=stream)
    view.on_event({"event": "attempt_started", "attempt": 1, "cause": "start", "world_size": 2, "restored_step": 0,
                   "restored_from": "none"})  # fmt: skip
    for step in range(1, 31):
        view.on_event(
            {"event": "step", "step": step, "loss": 5.0, "tokens": step * 100, "step_s": 0.5, "world_size": 2}
        )
    view.close()
    view.note("after the end")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "attempt 1 (start): 2 workers, from step 0 (none)"
    assert [line.split(" ")[1] for line in lines[1:]] == ["1/30", "10/30", "20/30", "30/30"]
    assert (
        lines[2]
        == "step 10/30 · loss 5.000 · 200 tokens/s · 2 workers · no checkpoint yet · 10 steps at risk · training"
    )


def test_one_of_something_is_not_said_to_be_several() -> None:
    start: Event = {"event": "attempt_started", "attempt": 2, "cause": "hang", "world_size": 1, "restored_step": 4,
                    "restored_from": "object-storage", "lost_steps": 1}  # fmt: skip
    assert event_line(start) == "attempt 2 (hang): 1 worker, from step 4 (object-storage), 1 step run again"
    assert event_line({"event": "request", "wish": "scale", "workers": 1}) == "asked by someone: scale to 1 worker"


def test_a_long_reason_is_said_in_full_by_the_fault_and_not_again_at_the_end() -> None:
    reason = "rank 0, step 3: ValueError: no label\nin row 17\nof shard X"
    assert event_line({"event": "fault", "cause": "user-error", "detail": reason}) == f"fault: user-error: {reason}"
    end: Event = {"event": "run_finished", "status": "user-error", "exit_reason": reason}
    assert event_line(end) == "run user-error: rank 0, step 3: ValueError: no label"


def test_a_view_that_is_not_shown_writes_nothing() -> None:
    stream = io.StringIO()
    view = open_progress(is_shown=False, stream=stream)
    view.note("x")
    view.on_event({"event": "fault", "cause": "hang", "detail": "d"})
    assert stream.getvalue() == ""


def test_where_a_state_came_from_and_how_exact_it_is_is_a_line() -> None:
    event = {"event": "restored", "step": 40, "tiers": {"local-disk": 3_000_000, "object-storage": 500}, "bound": None}
    assert event_line(event) == "restored step 40: 3.0 MB from local-disk and 500 B from object-storage, bit for bit"
    line = event_line(event | {"tiers": {}, "bound": 0.005})
    assert line == "restored step 40: nothing read, rounded within 0.005 of the next update"


def test_a_wait_for_data_is_said_and_stays_the_phase_until_the_next_step() -> None:
    status, event = RunStatus(), {"event": "data_awaited", "attempt": 1, "ranks": [0, 3]}
    assert event_line(event) == "the training data does not come: ranks [0, 3] wait for its store"
    status.add(event)
    assert status.line().endswith("waiting for data")
    status.add({"event": "step", "step": 5, "tokens": 500, "step_s": 1.0})
    assert status.line().endswith("training")


@pytest.mark.parametrize("phase", ["checkpointing", "evaluating"])
def test_a_long_save_or_evaluation_is_said_and_stays_the_phase_until_the_next_step(phase: str) -> None:
    status, event = RunStatus(), {"event": phase, "attempt": 1, "ranks": [1], "step": 8}
    assert event_line(event) == f"{phase} at step 8 takes long: ranks [1] are at it"
    status.add(event)
    assert status.line().endswith(phase)
    status.add({"event": "step", "step": 9, "tokens": 500, "step_s": 1.0})
    assert status.line().endswith("training")


def test_an_evaluation_without_a_best_value_yet_is_still_a_line() -> None:
    assert event_line({"event": "eval", "step": 3, "loss": 2.0, "best": None}) == "eval at step 3: loss 2.000, best ?"


def test_an_outage_is_seen_in_the_progress_line_and_its_failed_saves_are_not_said_one_by_one() -> None:
    stream = io.StringIO()
    view = open_progress(total_steps=100, stream=stream)
    view.on_event({"event": "attempt_started", "attempt": 1, "cause": "start", "world_size": 1, "restored_step": 0,
                   "restored_from": "none"})  # fmt: skip
    view.on_event({"event": "save_bound", "step": 5})
    for step in range(1, 8):
        view.on_event({"event": "step", "step": step, "loss": 5.0, "finished_s": 100.0 + step})
    view.on_event({"event": "committed", "step": 5})
    view.on_event({"event": "store_away", "reason": "put shards/x failed: 503", "away_s": 2.0})
    for step in range(8, 11):
        view.on_event({"event": "step", "step": step, "loss": 5.0, "finished_s": 100.0 + step})
    view.on_event({"event": "save_failed", "step": 10, "reason": "a newer one waits"})
    view.on_event({"event": "save_skipped", "step": 10, "reason": "two earlier saves are not settled yet"})
    view.on_event({"event": "work_at_risk", "away_s": 5.2, "at_risk_steps": 5, "at_risk_s": 4.8, "durable_step": 5})
    view.on_event({"event": "store_back", "away_s": 6.0, "saves_failed": 1, "saves_skipped": 1, "durable_step": 10})
    view.on_event({"event": "save_failed", "step": 15, "reason": "disk full", "next_try_in_s": 60.0})
    view.on_event({"event": "save_skipped", "step": 20, "reason": "two earlier saves are not settled yet"})
    assert stream.getvalue().splitlines()[2:] == [
        "the store is away, training goes on: put shards/x failed: 503",
        "step 10/100 · loss 5.000 · 1 worker · committed 5 · 5 steps (5 s) at risk · STORE AWAY (5 s) · training",
        "the store has been away for 5 s: 5 steps (5 s) at risk since step 5",
        "the store is back after 6 s: the newest checkpoint is of step 10; saves meanwhile: 1 failed, 1 skipped",
        "save of step 15 failed: disk full; the next save is tried in 60 s at the earliest",
        "save of step 20 skipped: two earlier saves are not settled yet",
    ]


def test_a_slow_last_save_is_said_to_be_waited_for() -> None:
    status = RunStatus(phase="training")
    ended: Event = {"event": "attempt_ended", "last_step": 200, "reason": "finished"}
    status.add(ended)
    assert status.line().endswith("saving")
    assert event_line(ended) == "step 200 is trained; waiting until its checkpoint is committed"
    assert event_line({**ended, "reason": "left"}) is None


def test_saves_that_are_skipped_all_the_time_are_said_once_a_minute() -> None:
    stream = io.StringIO()
    view = open_progress(total_steps=200, stream=stream)
    for step in range(1, 151):
        view.on_event({"event": "step", "step": step, "loss": 5.0, "finished_s": 100.0 + step})
        view.on_event({"event": "save_skipped", "step": step, "reason": "two earlier saves are not settled yet"})
    said = [line for line in stream.getvalue().splitlines() if "skipped" in line]
    assert [line.split()[3] for line in said] == ["1", "61", "121"]


def test_the_report_has_a_part_about_the_store_only_when_there_is_something_to_say() -> None:
    assert "The store" not in report_text(summarize(run_log()), url="/out")
    events = [*run_log()[:-1],
              {"event": "store_away", "t_s": 9.0, "reason": "503", "away_s": 1.0},
              {"event": "save_failed", "t_s": 10.0, "attempt": 2, "step": 4, "reason": "r"},
              {"event": "store_back", "t_s": 12.0, "away_s": 4.0, "at_risk_steps": 3, "at_risk_s": 3.5},
              run_log()[-1]]  # fmt: skip
    text = report_text(summarize(events), url="/out")
    assert "away         once, 4.00 s in all, 4.00 s at the longest" in text
    assert "at risk      3 steps, 3.50 s at the most" in text
    assert "saves        1 failed" in text


def test_what_becomes_of_the_memory_tier_is_said() -> None:
    assert event_line({"event": "memory_tier", "mode": "off", "reason": "no room"}) == "memory tier: off: no room"
    passed_over = event_line({"event": "memory_passed_over", "step": 40, "reason": "no Keeper answered"})
    assert passed_over == "nothing in memory to go on from, step 40 is read instead: no Keeper answered"
    assert "node abc has no replica" in (event_line({"event": "memory_degraded", "node": "abc", "reason": "x"}) or "")


def test_what_people_ask_for_and_what_is_decided_on_it_is_said() -> None:
    asked: Event = {"event": "request", "wish": "scale", "workers": 3, "made_by": "me@here"}
    assert event_line(asked) == "asked by me@here: scale to 3 workers"
    assert event_line({"event": "request", "wish": "save", "workers": None, "made_by": ""}) == "asked by someone: save"
    assert event_line({"event": "decision", "decision": "keep", "reason": "it does not pay"}) == "it does not pay"
    assert event_line({"event": "decision", "decision": "leave", "reason": "routine"}) is None
    blocked: Event = {"event": "node_blocked", "node": "a" * 56, "reason": "3 worker failures"}
    assert event_line(blocked) == "node aaaaaaaaaaaa is not used any more: 3 worker failures"

"""`raysume explain` on event files written by hand: the sentences that matter; no broken file makes it raise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator.cli import app
from orchestrator.event_fields import Event
from orchestrator.event_tail import events_in
from orchestrator.explain import AtRisk, explain
from orchestrator.explain_text import explanation_text
from storage.keys import EVENTS
from storage.open_store import open_store

runner = CliRunner()

HAZARD = "12 min since commit, MTBF 41 min, cost 3.1 s"


def steps(attempt: int, first: int, last: int, t_s: float, safe: int | None = None) -> list[Event]:
    """Two seconds a step; memory holds what is ``safe`` steps behind."""
    held = {} if safe is None else {"memory_step": first}
    return [
        {"event": "step", "attempt": attempt, "step": step, "step_s": 2.0, "t_s": t_s + 2.0 * (step - first + 1) + 1,
         "finished_s": t_s + 2.0 * (step - first + 1), **held, **({} if safe is None else {"safe_step": step - safe})}
        for step in range(first, last + 1)
    ]  # fmt: skip


def weighed(attempt: int, step: int, t_s: float, hazard_s: float | None, **more: object) -> Event:
    opinions = [
        {"policy": "hazard", "due_in_s": hazard_s, "why": HAZARD, "is_pressing": False},
        {"policy": "memory-pressure", "due_in_s": None, "why": "no rank is pressed", "is_pressing": False},
        {"policy": "bounds", "due_in_s": 95.0, "why": "policy.max_interval_s is 3600", "is_pressing": True},
    ]
    return {"event": "save_weighed", "attempt": attempt, "step": step, "t_s": t_s, "opinions": opinions, "wish": None,
            "held_back": None, **more}  # fmt: skip


def bound(attempt: int, step: int, reason: str, kind: str = "snapshot") -> Event:
    return {"event": "save_bound", "attempt": attempt, "step": step, "kind": kind, "reason": reason, "t_s": 0.0}


def committed(attempt: int, step: int, t_s: float) -> Event:
    return {"event": "committed", "attempt": attempt, "step": step, "t_s": t_s, "stored_bytes": 61_300_000,
            "stall_s": 0.1, "encode_s": 0.3, "upload_s": 0.4, "commit_s": 0.05, "write_s": 1.2}  # fmt: skip


def begun(attempt: int, t_s: float, cause: str, restored: int, source: str) -> Event:
    return {"event": "attempt_started", "attempt": attempt, "t_s": t_s, "cause": cause, "restored_step": restored,
            "restored_from": source, "world_size": 2}  # fmt: skip


def run_log() -> list[Event]:
    wish = {"policy": "hazard", "reason": f"hazard: {HAZARD}"}
    return [
        {"event": "run_started", "run_id": "first-run", "steps": 100, "is_new": True, "t_s": 0.0},
        begun(1, 0.0, "start", 0, "none"),
        *steps(1, 1, 10, 0.0),
        weighed(1, 10, 20.5, -1.0, wish=wish),
        bound(1, 12, f"hazard: {HAZARD}"),
        *steps(1, 11, 20, 20.0),
        committed(1, 12, 26.0),
        weighed(1, 20, 40.5, 9.0),
        *steps(1, 21, 30, 40.0, safe=1),
        weighed(1, 30, 60.5, -2.0, held_back="2 saves are still under way"),
        bound(1, 34, "cadence"),
        {"event": "save_slow", "attempt": 1, "step": 34, "seconds": 31.04, "usual_s": 3.1, "cause": "the upload"},
        *steps(1, 31, 36, 60.0),
        {"event": "fault", "attempt": 1, "cause": "node-lost", "nodes": [], "workers": [], "detail": "n2"},
        {"event": "attempt_ended", "attempt": 1, "last_step": 36, "reason": "broken"},
        begun(2, 80.0, "node-lost", 30, "peer-memory"),
        *steps(2, 31, 40, 80.0),
        bound(2, 42, "asked for"),
        {"event": "save_skipped", "attempt": 2, "step": 42, "reason": "two earlier saves are not settled yet"},
        *steps(2, 41, 44, 100.0),
        bound(2, 44, "cadence"),
        {"event": "save_failed", "attempt": 2, "step": 44, "reason": "rank 1 found no free buffer for it"},
        bound(2, 46, "2 new worker(s) ready", "part"),
        *steps(2, 45, 50, 108.0),
        bound(2, 52, "cadence"),
    ]  # fmt: skip


def told(step: int, events: list[Event] | None = None) -> list[str]:
    return explanation_text(explain(run_log() if events is None else events, step)).splitlines()


TABLE = [
    "               policy           due                      why",
    "               hazard           now                      12 min since commit, MTBF 41 min, cost 3.1 s",
    "               memory-pressure  does not ask             no rank is pressed",
    "               bounds           in 1 min 35 s, pressing  policy.max_interval_s is 3600",
]


NOT_WEIGHED = (
    "what the save policies thought was not written down yet in this attempt: that happens when one of them asks "
    "for a save, and otherwise every policy.evaluate_every_steps steps"
)


def test_an_attempts_first_steps_say_why_nothing_was_weighed_yet_and_when_that_came() -> None:
    assert told(5)[3] == f"  weighed      {NOT_WEIGHED}; the first time was at step 10"
    answer = explain(run_log(), 5).answers[0]
    assert (answer.weighing, answer.first_weighed) == (None, 10)


def test_under_a_fixed_cadence_no_empty_table_is_shown() -> None:
    events = [{**event, "opinions": []} if event["event"] == "save_weighed" else event for event in run_log()]
    lines = told(22, events)
    assert lines[3:5] == [
        "  weighed      no save policy was on: "
        "saves came by the fixed cadence (checkpoint.every_steps, every_s) or were asked for",
        "  saves        the last save before was at step 12, the next one at step 34",
    ]
    assert lines[5].startswith("  covered by")


def test_a_committed_save_names_its_order_what_all_thought_and_how_long_each_part_took() -> None:
    assert told(12) == [
        "Run first-run, step 12: in one attempt",
        "",
        "Attempt 1 (start), steps 1 to 36: saved and committed",
        "  ordered      hazard: 12 min since commit, MTBF 41 min, cost 3.1 s",
        "  stored       61.3 MB",
        "  took         stall 0.10 s, encode 0.30 s, upload 0.40 s, commit 0.05 s, from snapshot to commit 1.20 s",
        "  weighed      at step 10",
        *TABLE,
    ]


def test_a_save_is_explained_by_the_weighing_that_ordered_it_not_by_a_later_one() -> None:
    events = run_log()
    events.insert(events.index(bound(1, 12, f"hazard: {HAZARD}")) + 2, weighed(1, 11, 22.5, 900.0))
    weighing = explain(events, 12).answers[0].weighing
    assert weighing is not None
    assert (weighing.step, weighing.wish_policy, weighing.landed_step) == (10, "hazard", 12)


def test_a_step_without_a_save_says_who_would_have_asked_and_what_a_fault_would_have_cost() -> None:
    assert told(22) == [
        "Run first-run, step 22: in one attempt",
        "",
        "Attempt 1 (start), steps 1 to 36: no save at step 22",
        "  weighed      at step 20",
        TABLE[0],
        TABLE[1].replace("now      ", "in 9.00 s"),
        *TABLE[2:],
        "  next to ask  hazard, 9.00 s after the weighing, at step 25",
        "  covered by   no commit yet",
        "  at a fault   of one node 1 step (2.00 s) lost: memory held step 21",
        "               of all memory 10 steps (20.0 s) lost: step 12 was committed",
    ]


def test_memory_that_is_behind_the_newest_commit_saves_nothing() -> None:
    events = [*run_log()[:2], *steps(1, 1, 10, 0.0, safe=1), committed(1, 10, 21.0), *steps(1, 11, 20, 30.0, safe=15)]
    assert told(20, events)[-1] == (
        "  at a fault   10 steps (20.0 s) lost: step 10 was committed, and memory held nothing newer"
    )


def test_a_step_on_the_way_to_a_save_names_the_save_that_was_ordered_already() -> None:
    assert told(11)[-3:] == [
        "  ordered then hazard: 12 min since commit, MTBF 41 min, cost 3.1 s; it bound step 12",
        "  covered by   the commit of step 12 (attempt 1), 1 step later",
        "  at a fault   11 steps (22.0 s) lost: nothing was committed",
    ]


def test_a_step_that_was_made_again_is_told_of_each_attempt() -> None:
    lines = told(34)
    assert lines[0] == "Run first-run, step 34: in 2 attempts, each told below"
    assert lines[2:7] == [
        "Attempt 1 (start), steps 1 to 36: a save was taken, and cut off before its commit",
        "  ordered      cadence",
        "  cut off      the attempt ended: broken (node-lost)",
        "  note         slow, 31.0 s, usual are 3.1 s: the upload",
        "  weighed      at step 30",
    ]
    assert lines[11:] == [
        "  held back    2 saves are still under way",
        "  covered by   no commit: attempt 2 went on from step 30 and made it again",
        "  at a fault   of one node 5 steps (10.0 s) lost: memory held step 29",
        "               of all memory 22 steps (44.0 s) lost: step 12 was committed",
        "",
        "Attempt 2 (node-lost), steps 31 to 50 so far: no save at step 34",
        f"  weighed      {NOT_WEIGHED}",
        "  saves        the next one at step 44",
        "  covered by   no commit yet",
        "  at a fault   22 steps (44.0 s) lost: step 12 was committed",
    ]


@pytest.mark.parametrize(
    ("step", "lines"),
    [
        (
            42,
            [
                "a save was due, and skipped",
                "ordered      asked for",
                "skipped      two earlier saves are not settled yet",
            ],
        ),
        (44, ["a save was taken, and given up", "failed       rank 1 found no free buffer for it"]),
        (46, ["kept in memory alone, no commit follows", "ordered      2 new worker(s) ready (part)"]),
        (52, ["a save is ordered, and not committed yet", "ordered      cadence"]),
    ],
)
def test_what_became_of_a_save_is_said(step: int, lines: list[str]) -> None:
    text = "\n".join(told(step))
    assert [line for line in lines if line not in text] == []


def test_an_order_whose_step_was_never_reached_is_not_called_a_save() -> None:
    events = [event for event in run_log() if event["event"] != "step" or event["step"] != 36]
    events = [{**event, "last_step": 33} if event["event"] == "attempt_ended" else event for event in events]
    events = [
        event for event in events if event["event"] != "step" or event["attempt"] == 2 or int(str(event["step"])) < 34
    ]
    lines = told(34, events)
    assert lines[2] == "Attempt 1 (start), steps 1 to 33: a save was ordered, and the attempt ended before the step"
    assert "  never taken  the attempt ended: broken (node-lost)" in lines
    assert "  covered by   no commit: attempt 2 went on from step 30 and is to make it" in lines


def test_a_commit_of_a_later_attempt_covers_a_step_that_memory_carried_over() -> None:
    events = [*run_log(), committed(2, 52, 130.0)]
    assert explain(events, 22).answers[0].cover.commit_step == 52
    assert explain(events, 22).answers[0].cover.commit_attempt == 2
    assert explain(events, 32).answers[0].cover.rerun_attempt == 2


def test_a_commit_that_was_written_after_the_step_did_not_help_at_a_fault_there() -> None:
    before, after = explain(run_log(), 12).answers[0], explain(run_log(), 13).answers[0]
    assert before.at_risk is not None
    assert before.at_risk.durable_step is None, "step 12 was finished at 24 s, its commit written at 26 s"
    assert after.at_risk == AtRisk(
        memory_step=None, durable_step=12, steps_if_one_is_lost=1, s_if_one_is_lost=2.0, steps_if_all_is_lost=1,
        s_if_all_is_lost=2.0,
    )  # fmt: skip


def test_a_checkpoint_that_was_taken_out_of_use_says_so() -> None:
    bad: Event = {"event": "quarantined", "attempt": 2, "step": 12, "key": "commits/x", "reason": "a shard is gone"}
    assert "  note         taken out of use later: a shard is gone" in told(12, [*run_log(), bad])


def quarantined(attempt: int, step: int, t_s: float) -> Event:
    return {"event": "quarantined", "attempt": attempt, "step": step, "t_s": t_s, "key": "x", "reason": "a bad frame"}


def test_a_commit_that_was_out_of_use_before_the_restore_is_no_base_and_covers_nothing() -> None:
    events = [
        run_log()[0],
        begun(1, 0.0, "start", 0, "none"),
        *steps(1, 1, 8, 0.0),
        committed(1, 4, 9.0),
        committed(1, 8, 17.0),
        begun(2, 30.0, "driver-restart", 8, "object-storage"),
        {"event": "attempt_ended", "attempt": 2, "last_step": 8, "reason": "broken"},
        quarantined(2, 8, 31.0),
        begun(3, 40.0, "corrupt-checkpoint", 4, "object-storage"),
        *steps(3, 5, 10, 40.0),
    ]
    assert told(8, events)[-1] == "  at a fault   4 steps (8.00 s) lost: step 4 was committed"
    assert told(9, events)[-1] == "  at a fault   5 steps (10.0 s) lost: step 4 was committed"
    assert explain(events, 6).answers[0].cover.rerun_attempt == 3, "the Commit of step 8 covers step 6 no more"
    events += [committed(3, 8, 49.0), *steps(3, 11, 11, 52.0)]
    assert told(11, events)[-1] == "  at a fault   3 steps (6.00 s) lost: step 8 was committed"


def test_a_commit_that_goes_out_of_use_while_training_goes_on_is_no_base_from_then_on() -> None:
    events = [
        run_log()[0],
        begun(1, 0.0, "start", 0, "none"),
        *steps(1, 1, 8, 0.0),
        committed(1, 4, 9.0),
        committed(1, 8, 17.0),
        begun(2, 30.0, "node-lost", 8, "peer-memory"),
        *steps(2, 9, 10, 30.0),
        quarantined(2, 8, 32.5),
    ]
    assert told(9, events)[-1] == "  at a fault   1 step (2.00 s) lost: step 8 was committed"
    assert told(10, events)[-1] == "  at a fault   6 steps (12.0 s) lost: step 4 was committed"
    events[5] = begun(2, 30.0, "driver-restart", 8, "object-storage")
    assert told(10, events)[-1] == "  at a fault   6 steps (12.0 s) lost: step 4 was committed"


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (0, "steps are counted from 1; what a run begins with is not saved"),
        (53, "the newest step that was made is 50 of 100"),
        (101, "the run has 100 steps"),
    ],
)
def test_a_step_that_was_never_made_has_a_reason_and_no_answer(step: int, reason: str) -> None:
    explanation = explain(run_log(), step)
    assert explanation.why_nothing == reason
    assert explanation.answers == ()


def test_what_is_before_a_run_that_goes_on_from_another_one_is_not_its_own() -> None:
    events = [run_log()[0], begun(1, 0.0, "start", 40, "object-storage"), *steps(1, 41, 44, 0.0)]
    expected = "its events begin after step 40, from which it went on (object-storage)"
    assert explain(events, 40).why_nothing == expected
    assert told(42, events)[-1] == "  at a fault   2 steps (4.00 s) lost: step 40 was committed"


def test_an_older_run_at_the_same_place_is_forgotten() -> None:
    events = [*run_log(), {**run_log()[0], "run_id": "second"}, begun(1, 0.0, "start", 0, "none"), *steps(1, 1, 3, 0.0)]
    assert explain(events, 12).why_nothing == "the newest step that was made is 3 of 100"


def test_no_beginning_of_an_event_file_makes_it_raise() -> None:
    data = b"".join(json.dumps(event).encode() + b"\n" for event in run_log())
    for end in range(0, len(data), 97):
        events = events_in(data[:end])
        for step in (1, 12, 22, 34, 44, 52, 101):
            explanation = explain(events, step)
            assert bool(explanation.answers) == (explanation.why_nothing is None)
            if explanation.answers:
                assert explanation_text(explanation)


def test_no_field_of_another_kind_or_absent_makes_it_raise() -> None:
    fields = sorted({field for event in run_log() for field in event} - {"event"})
    values: list[object] = [None, "x", float("nan"), [1, None], {"a": 1}, -3]
    for field in fields:
        for value in values:
            events = [{**event, field: value} if field in event else event for event in run_log()]
            for step in (12, 22, 34, 44):
                explanation = explain(events, step)
                if explanation.answers:
                    assert explanation_text(explanation)


def write_run(root: Path, events: list[Event]) -> None:
    (root / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events) + '{"event": "st')


def test_the_command_prints_the_sentences_and_with_json_the_facts(tmp_path: Path) -> None:
    write_run(tmp_path, run_log())
    said = runner.invoke(app, ["explain", str(tmp_path), "22"])
    assert said.exit_code == 0, said.output
    assert said.stdout.splitlines() == told(22)
    facts = json.loads(runner.invoke(app, ["explain", str(tmp_path), "12", "--json"]).stdout)
    assert facts["step"] == 12
    (answer,) = facts["answers"]
    assert answer["save"]["policy"] == "hazard"
    assert answer["save"]["took"]["upload_s"] == 0.4
    assert [thought["due_in_s"] for thought in answer["weighing"]["thoughts"]] == [-1.0, None, 95.0]


def test_a_run_on_a_store_that_is_no_directory_is_explained_as_well() -> None:
    open_store("memory://explained").put(EVENTS, b"".join(json.dumps(event).encode() + b"\n" for event in run_log()))
    said = runner.invoke(app, ["explain", "memory://explained", "34"])
    assert said.stdout.splitlines() == told(34)


def test_a_step_that_is_not_there_and_a_place_that_is_no_run_end_with_20(tmp_path: Path) -> None:
    nothing = runner.invoke(app, ["explain", str(tmp_path), "1"])
    assert nothing.exit_code == 20
    assert "holds no events.jsonl; is it the root of a run (run.url)?" in nothing.stderr
    write_run(tmp_path, run_log())
    beyond = runner.invoke(app, ["explain", str(tmp_path), "101", "--json"])
    assert beyond.exit_code == 20
    text = f"{tmp_path} has nothing to say of step 101: the run has 100 steps"
    assert json.loads(beyond.stdout) == {"error": text, "exit_code": 20}
    assert runner.invoke(app, ["explain", str(tmp_path), "0"]).exit_code == 2


def test_a_place_that_no_store_knows_is_refused() -> None:
    assert runner.invoke(app, ["explain", "nowhere://bucket/run", "3"]).exit_code == 10

"""Since when the trouble before an Attempt lasted: which injected fault explains it, and what a planned leave costs."""

from __future__ import annotations

import pytest

from orchestrator.report_text import report_text
from orchestrator.summary import AttemptSummary, Event, back_after_s, summarize


def line(event: str, t_s: float, **fields: object) -> Event:
    return {"event": event, "t_s": t_s, **fields}


def chaos(verb: str, t_s: float, node: str = "n2") -> Event:
    return line("chaos", t_s, verb=verb, node_id=node, pid=1, planned_step=1, at_step=1, detail=None)


def begun(number: int, t_s: float, cause: str, restored: int, detected_s: float | None = None) -> Event:
    return line("attempt_started", t_s, attempt=number, cause=cause, world_size=2, restored_step=restored,
                restored_from="own-memory", detected_s=detected_s)  # fmt: skip


def steps(number: int, first: int, last: int, began_s: float) -> list[Event]:
    """One step a second; the line of each is written half a second after its end."""
    return [
        line("step", began_s + step - first + 1.5, attempt=number, step=step, step_s=1.0, loss=1.0, world_size=2,
             finished_s=began_s + step - first + 1)
        for step in range(first, last + 1)
    ]  # fmt: skip


def trained() -> list[Event]:
    """Ten steps from 5 s to 15 s, under the first driver."""
    return [
        line("run_started", 0.0, run_id="r", steps=99),
        line("driver_started", 0.0, nonce="0", pid=1),
        line("worker_ready", 1.0, worker="w1", node_id="n1", pid=11),
        line("worker_ready", 1.0, worker="w2", node_id="n2", pid=12),
        begun(1, 4.0, "start", 0),
        *steps(1, 1, 10, 5.0),
    ]


def last_attempt(events: list[Event]) -> AttemptSummary:
    return summarize(events)["attempts"][-1]


def test_a_notice_that_ended_the_driver_explains_no_attempt_of_the_next_one() -> None:
    events = [
        *trained(),
        chaos("drain-node", 14.5, "n1"),
        line("run_finished", 17.0, status="below-minimum", exit_reason="x", exit_code=16),
        line("driver_started", 200.0, nonce="1", pid=2),
        begun(2, 215.0, "driver-restart", 10),
        *steps(2, 11, 12, 216.0),
        line("fault", 219.0, attempt=2, cause="node-lost", nodes=["n1"], workers=[], detected_s=218.9),
        begun(3, 219.5, "node-lost", 12, 218.9),
    ]
    second, third = summarize(events)["attempts"][1:]
    assert (second["fault_s"], second["detected_s"], third["fault_s"]) == (200.0, 200.0, 218.9)
    assert summarize(events)["goodput"]["recovery_s"] == 16.0


def test_a_fault_that_ended_the_driver_is_counted_and_is_not_found_by_the_next_one() -> None:
    events = [
        *trained(),
        line("fault", 15.2, attempt=1, cause="user-error", nodes=[], workers=["w1"], detected_s=15.1),
        line("run_finished", 16.0, status="user-error", exit_reason="x", exit_code=11),
        line("driver_started", 200.0, nonce="1", pid=2),
        begun(2, 215.0, "driver-restart", 10),
    ]
    assert (last_attempt(events)["fault_s"], last_attempt(events)["detected_s"]) == (200.0, 200.0)
    assert summarize(events)["failures"] == 1


@pytest.mark.parametrize(
    ("verb", "cause", "is_explained"),
    [
        ("kill-worker", "worker-lost", True),
        ("stop-worker", "hang", True),
        ("drain-node", "node-lost", True),
        ("raise-in-worker", "user-error", True),
        ("oom-worker", "out-of-memory", True),
        ("kill-worker", "corrupt-checkpoint", False),
        ("kill-node", "bad-step", False),
        ("drain-node", "hang", False),
        ("kill-worker", "user-error", False),
        ("raise-in-worker", "node-lost", False),
        ("kill-worker", "driver-restart", False),
    ],
)
def test_an_injected_fault_explains_only_what_its_verb_can_cause(verb: str, cause: str, is_explained: bool) -> None:
    events = [
        *trained(),
        chaos(verb, 15.1),
        line("fault", 16.0, attempt=1, cause=cause, nodes=["n2"], workers=[], detected_s=16.0),
        begun(2, 16.5, cause, 10, 16.0),
    ]
    assert last_attempt(events)["fault_s"] == (15.1 if is_explained else 16.0)


def test_a_world_that_left_in_time_was_told_by_a_notice_and_by_nothing_else() -> None:
    notice = [begun(2, 16.5, "preemption", 10, 16.0)]
    assert last_attempt([*trained(), chaos("kill-node", 8.0, "spare"), *notice])["fault_s"] == 16.0
    both = [*trained(), chaos("kill-node", 8.0, "spare"), chaos("drain-node", 15.9), *notice]
    assert last_attempt(both)["fault_s"] == 15.9


def test_a_planned_leave_costs_from_the_last_step_of_the_world_that_left() -> None:
    events = [
        *trained(),
        line("attempt_ended", 15.5, attempt=1, last_step=10, reason="left"),
        begun(2, 15.6, "join", 10, 7.0),
        *steps(2, 11, 20, 17.0),
        line("run_finished", 27.0, status="finished", exit_reason="done", exit_code=0),
    ]
    summary = summarize(events)
    joined, goodput = summary["attempts"][-1], summary["goodput"]
    assert (joined["fault_s"], joined.get("halted_s"), back_after_s(joined)) == (7.0, 15.0, 3.0)
    assert goodput["recovery_s"] == 2.0
    assert goodput["startup_s"] + goodput["recovery_s"] + goodput["productive_s"] == 27.0
    assert next(row for row in report_text(summary, url="/o").splitlines() if "joined" in row).endswith("  3.00 s")


def test_a_notice_that_the_world_trained_through_costs_nothing_until_its_last_step() -> None:
    events = [*trained(), chaos("drain-node", 9.0), begun(2, 15.6, "preemption", 10, 9.5), *steps(2, 11, 11, 17.0)]
    assert (last_attempt(events)["fault_s"], back_after_s(last_attempt(events))) == (9.0, 3.0)
    killed = [
        *trained(),
        chaos("kill-driver", 15.2),
        line("driver_started", 30.0),
        begun(2, 31.0, "driver-restart", 10),
    ]
    killed += steps(2, 11, 11, 32.0)
    assert back_after_s(last_attempt(killed)) == 33.0 - 15.2


def test_a_summary_of_an_older_version_says_back_after_as_it_did() -> None:
    old = last_attempt([*trained(), begun(2, 15.6, "join", 10, 7.0), *steps(2, 11, 11, 17.0)])
    del old["halted_s"]
    assert back_after_s(old) == 18.0 - 7.0

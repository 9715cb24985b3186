"""The fold from events to the summary, on event logs written by hand."""

from __future__ import annotations

import random

import pytest

from orchestrator.summary import Event, RunSummary, summarize


def line(event: str, t_s: float, **fields: object) -> Event:
    return {"event": event, "t_s": t_s, "time_utc": "2026-01-01T00:00:00Z", "run": "r", "rank": None, **fields}


def attempt(number: int, t_s: float, cause: str, size: int, restored: int, source: str, **more: object) -> Event:
    return line("attempt_started", t_s, attempt=number, cause=cause, world_size=size, restored_step=restored,
                restored_from=source, **more)  # fmt: skip


def steps(number: int, first: int, last: int, t_s: float, size: int, *, shift: float = 0.0) -> list[Event]:
    """One step a second; the step ``first`` is finished at ``t_s``."""
    return [
        line("step", t_s + step - first, attempt=number, step=step, loss=10.0 - step + shift, tokens=step * 100,
             sample_chain=f"chain-{step}", step_s=1.0, world_size=size)
        for step in range(first, last + 1)
    ]  # fmt: skip


START = [
    line("run_started", 0.0, run_id="r-1", steps=8, url="/out", start_unix_s=1000.0),
    line("driver_started", 0.0, nonce="00000000", pid=1),
    line("worker_ready", 4.0, worker="w1", node_id="n1", pid=11),
    line("worker_ready", 4.0, worker="w2", node_id="n2", pid=12),
]
FINISHED = {"status": "finished", "exit_reason": "all 8 steps are done", "exit_code": 0, "weights_digest": "ab" * 16}


def killed_node_run() -> list[Event]:
    return [
        *START,
        attempt(1, 4.5, "start", 2, 0, "none"),
        line("regrouped", 5.0, attempt=1, world_size=2),
        *steps(1, 1, 5, 7.0, 2),
        line("committed", 9.2, attempt=1, step=3, bytes=600, stall_s=0.25, upload_s=0.5, loss=7.0),
        line("eval", 10.5, attempt=1, step=4, loss=6.5, best=6.5, best_step=4),
        line("chaos", 11.2, verb="kill-node", node_id="n2", pid=12, planned_step=5, at_step=5, detail=None),
        line("fault", 11.7, attempt=1, cause="node-lost", nodes=["n2"], workers=["w2"], detail="n2", detected_s=11.7),
        line("attempt_ended", 11.8, attempt=1, last_step=5, reason="node-lost"),
        attempt(2, 12.0, "node-lost", 1, 3, "object-storage", detected_s=11.7),
        line("regrouped", 12.4, attempt=2, world_size=1),
        *steps(2, 4, 8, 14.2, 1, shift=0.5),
        line("committed", 18.6, attempt=2, step=8, bytes=640, stall_s=0.5, upload_s=0.75, loss=2.5),
        line("run_finished", 20.0, **FINISHED),
    ]  # fmt: skip


def test_a_killed_node_gives_exactly_this_summary() -> None:
    assert summarize(killed_node_run()) == RunSummary(
        run_id="r-1",
        status="finished",
        exit_reason="all 8 steps are done",
        exit_code=0,
        steps=8,
        tokens=800,
        loss_first=9.0,
        loss_last=2.5,
        world_sizes=[{"step": 1, "size": 2}, {"step": 4, "size": 1}],
        attempts=[
            {"attempt": 1, "cause": "start", "world_size": 2, "wanted_workers": 2, "fault_s": None, "halted_s": None,
             "detected_s": None, "regrouped_s": 5.0, "first_step_s": 7.0, "lost_steps": 0, "restored_step": 0,
             "restored_from": "none"},
            {"attempt": 2, "cause": "node-lost", "world_size": 1, "wanted_workers": 1, "fault_s": 11.2,
             "halted_s": 11.2, "detected_s": 11.7, "regrouped_s": 12.4, "first_step_s": 14.2, "lost_steps": 2,
             "restored_step": 3, "restored_from": "object-storage"},
        ],
        commits=[
            {"step": 3, "bytes": 600, "stall_s": 0.25, "upload_s": 0.5},
            {"step": 8, "bytes": 640, "stall_s": 0.5, "upload_s": 0.75},
        ],
        weights_digest="ab" * 16,
        sample_digest="chain-8",
        goodput={"total_s": 20.0, "productive_s": 8.0, "lost_work_s": 2.0, "recovery_s": 14.2 - 1.0 - 11.2,
                 "startup_s": 6.0, "save_stall_s": 0.75},
        preemptions=0,
        failures=1,
        evals=[],
        losses=[{"step": step, "loss": 10.0 - step + (0.5 if step > 3 else 0.0)} for step in range(1, 9)],
        skipped_windows=[],
            blocked_nodes={},
        storage={"saves_skipped": 0, "saves_failed": 0, "saves_retried": 0, "saves_slow": 0, "upload_retries": 0,
                 "outages": 0, "outage_s": 0.0, "longest_outage_s": 0.0, "max_at_risk_steps": 0, "max_at_risk_s": 0.0},
        memory={"mode": "off", "safe_step": None, "snapshots": 0, "stall_s": 0.0, "passed_over": 0, "degraded": 0},
        saves={"ordered": 0, "committed": 2, "by_policy": {}, "stall_s": 0.75, "stall_share": 0.075,
               "stored_bytes": 1240,
               "held_back": 0, "skipped": 0, "threshold_moves": 0, "threshold": None,
               "spacing": {"mean_steps": None, "densest_steps": None, "sparsest_steps": None, "mean_s": None,
                           "densest_s": None, "sparsest_s": None}},
        verified={"mode": "", "newest_step": None, "by": None, "verified": 0, "failed": [], "unverified_s": None},
    )  # fmt: skip


def test_the_tier_that_was_really_read_stands_in_the_summary_once_it_is_known() -> None:
    events = [*START, attempt(1, 4.5, "start", 2, 0, "none"), *steps(1, 1, 5, 7.0, 2)]
    events.append(attempt(2, 12.0, "node-lost", 1, 5, "own-memory"))
    assert summarize(events)["attempts"][-1]["restored_from"] == "own-memory"
    late = line("restored", 12.1, attempt=1, step=0, tiers={"object-storage": 5})
    read = line("restored", 12.2, attempt=2, step=5, tiers={"own-memory": 500, "peer-memory": 20, "local-disk": 0})
    assert summarize([*events, late, read])["attempts"][-1]["restored_from"] == "peer-memory"


def test_the_memory_tier_is_summed_up() -> None:
    def kept(number: int, step: int, taken: int, safe: int) -> Event:
        return line("step", float(step), attempt=number, step=step, loss=1.0, tokens=1, step_s=1.0, world_size=1,
                    memory_step=taken, safe_step=safe, memory_stall_s=0.25)  # fmt: skip

    events = [
        *START,
        line("memory_tier", 4.0, mode="replicated", reason="it fits"),
        attempt(1, 4.5, "start", 2, 0, "none"),
        kept(1, 1, 1, -1), kept(1, 2, 1, 1), kept(1, 3, 3, 1), kept(1, 4, 3, 3),
        line("memory_degraded", 5.0, node="n1", reason="no route"),
        attempt(2, 9.0, "node-lost", 1, 3, "peer-memory"),
        line("memory_passed_over", 9.5, attempt=3, step=0, reason="no Keeper answered"),
    ]  # fmt: skip
    whole = {"mode": "replicated", "snapshots": 2, "stall_s": 0.5, "passed_over": 1, "degraded": 1}
    assert summarize(events)["memory"] == {**whole, "safe_step": None}
    assert summarize([*events, kept(2, 4, 4, 4)])["memory"]["safe_step"] == 4


def test_outages_and_missed_saves_are_counted_over_all_drivers_one_without_an_end_as_long_as_it_was_seen() -> None:
    events = [
        *START,
        line("save_delayed", 5.0, attempt=1, step=10, rank=0, reason="503", failing_for_s=1.0),
        line("save_delayed", 5.1, attempt=1, step=10, rank=1, reason="503", failing_for_s=1.1),
        line("store_away", 5.2, reason="503", away_s=1.0),
        line("save_failed", 7.0, attempt=1, step=10, reason="a newer one waits"),
        line("save_skipped", 8.0, attempt=1, step=20, reason="two"),
        line("work_at_risk", 15.0, away_s=11.0, at_risk_steps=40, at_risk_s=12.5, durable_step=5),
        line("store_back", 17.0, away_s=13.0, saves_failed=1, saves_skipped=1, at_risk_steps=44, at_risk_s=14.5),
        line("save_slow", 18.0, attempt=1, step=30, seconds=20.0, usual_s=2.0, cause="uploading"),
        line("committed", 19.0, attempt=1, step=30, bytes=1, stall_s=0.0, upload_s=20.0, upload_retries=4),
        line("committed", 20.0, attempt=1, step=40, bytes=1, stall_s=0.0, upload_s=2.0, upload_retries=3),
        line("store_away", 30.0, reason="timeout", away_s=2.0),
        line("work_at_risk", 40.0, away_s=12.0, at_risk_steps=30, at_risk_s=11.0, durable_step=30),
    ]
    assert summarize(events)["storage"] == {
        "saves_skipped": 1, "saves_failed": 1, "saves_retried": 1, "saves_slow": 1, "upload_retries": 7, "outages": 2,
        "outage_s": 25.0, "longest_outage_s": 13.0, "max_at_risk_steps": 44, "max_at_risk_s": 14.5,
    }  # fmt: skip


@pytest.mark.parametrize("seen_s", [5.0, 6.5, 7.5])
def test_the_regrouping_never_ends_after_the_first_step_began(seen_s: float) -> None:
    group = line("regrouped", seen_s, attempt=1, world_size=2)
    first, second = steps(1, 1, 2, 7.0, 2)
    for events in ([group, first, second], [first, group, second], [first, second, group]):
        (only,) = summarize([*START, attempt(1, 4.5, "start", 2, 0, "none"), *events])["attempts"]
        assert only["regrouped_s"] == min(seen_s, 6.0)


def test_each_attempt_has_its_own_bound_on_the_regrouping() -> None:
    events = [*START, attempt(1, 4.5, "start", 2, 0, "none"), *steps(1, 1, 2, 7.0, 2),
              attempt(2, 9.0, "join", 3, 2, "own-memory"),
              line("regrouped", 10.0, attempt=2, world_size=3)]  # fmt: skip
    assert summarize(events)["attempts"][1]["regrouped_s"] == 10.0


def test_no_events_give_an_empty_summary() -> None:
    summary = summarize([])
    assert (summary["steps"], summary["loss_last"], summary["status"]) == (0, None, "running")


def test_an_evaluation_of_a_lost_step_is_forgotten_and_one_that_stands_is_kept() -> None:
    log = [
        *START,
        attempt(1, 4.5, "start", 2, 0, "none"),
        line("eval", 5.0, attempt=1, step=2, loss=8.5, best=8.5, best_step=2),
        line("eval", 6.0, attempt=1, step=4, loss=6.5, best=6.5, best_step=4),
        attempt(2, 7.0, "hang", 2, 3, "object-storage", detected_s=6.9),
        line("eval", 9.0, attempt=2, step=6, loss=5.5, best=5.5, best_step=6),
    ]
    assert summarize(log)["evals"] == [{"step": 2, "loss": 8.5}, {"step": 6, "loss": 5.5}]


def test_late_lines_of_an_older_attempt_change_nothing() -> None:
    log = killed_node_run()
    late = [*steps(1, 6, 6, 12.1, 2), line("regrouped", 12.2, attempt=1, world_size=2)]
    where = log.index(next(event for event in log if event["event"] == "attempt_started" and event["attempt"] == 2)) + 1
    assert summarize([*log[:where], *late, *log[where:]]) == summarize(log)


def test_without_an_injected_fault_the_time_of_detection_is_the_fault() -> None:
    log = [event for event in killed_node_run() if event["event"] != "chaos"]
    assert summarize(log)["attempts"][1]["fault_s"] == 11.7


def test_a_kill_on_a_node_that_was_not_at_fault_explains_nothing() -> None:
    log = killed_node_run()
    stray = line("chaos", 8.0, verb="kill-worker", node_id="n9", pid=99, planned_step=2, at_step=2, detail=None)
    assert summarize([*log[:8], stray, *log[8:]])["attempts"][1]["fault_s"] == 11.2


def test_a_fault_injected_after_detection_belongs_to_the_next_attempt() -> None:
    log = killed_node_run()[:-1]
    log += [
        line("chaos", 18.8, verb="stop-worker", node_id="n1", pid=11, planned_step=8, at_step=8, detail=None),
        line("fault", 19.0, attempt=2, cause="node-lost", nodes=["n1"], workers=[], detail="", detected_s=18.7),
        attempt(3, 19.1, "node-lost", 1, 8, "object-storage", detected_s=18.7),
        line("fault", 19.9, attempt=3, cause="hang", nodes=[], workers=["w1"], detail="", detected_s=19.8),
        attempt(4, 20.0, "hang", 1, 8, "object-storage", detected_s=19.8),
    ]
    third, fourth = summarize(log)["attempts"][2:]
    assert (third["fault_s"], fourth["fault_s"]) == (18.7, 18.8)


def test_a_drain_counts_from_its_notice_and_its_deadline_kill_is_no_new_fault() -> None:
    log = [
        *START,
        attempt(1, 4.5, "start", 2, 0, "none"),
        *steps(1, 1, 4, 7.0, 2),
        line("chaos", 10.1, verb="drain-node", node_id="n2", pid=None, planned_step=4, at_step=4, detail="20 s"),
        line("attempt_ended", 11.0, attempt=1, last_step=4, reason="preemption"),
        attempt(2, 11.1, "preemption", 1, 4, "object-storage", detected_s=10.6),
        *steps(2, 5, 6, 13.0, 1),
        line("chaos", 30.1, verb="drain-deadline", node_id="n2", pid=12, planned_step=4, at_step=20, detail=None),
        line("fault", 35.0, attempt=2, cause="worker-lost", nodes=[], workers=["w1"], detail="", detected_s=35.0),
        attempt(3, 35.1, "worker-lost", 1, 6, "object-storage", detected_s=35.0),
    ]
    summary = summarize(log)
    assert (summary["attempts"][1]["fault_s"], summary["attempts"][1]["lost_steps"]) == (10.1, 0)
    assert summary["attempts"][2]["fault_s"] == 35.0
    assert (summary["preemptions"], summary["failures"]) == (1, 1)


def test_a_join_is_neither_failure_nor_preemption_and_loses_nothing() -> None:
    log = [
        *START,
        attempt(1, 4.5, "start", 1, 0, "none"),
        *steps(1, 1, 4, 7.0, 1),
        line("attempt_ended", 10.5, attempt=1, last_step=4, reason="join"),
        attempt(2, 10.6, "join", 2, 4, "own-memory", detected_s=10.2),
        *steps(2, 5, 8, 12.0, 2),
        line("run_finished", 16.0, **FINISHED),
    ]
    summary = summarize(log)
    assert (summary["preemptions"], summary["failures"]) == (0, 0)
    assert summary["attempts"][1]["lost_steps"] == 0
    assert summary["world_sizes"] == [{"step": 1, "size": 1}, {"step": 5, "size": 2}]


def test_a_killed_driver_counts_from_the_kill_to_the_first_step_under_the_new_one() -> None:
    log = [
        *START,
        attempt(1, 4.5, "start", 2, 0, "none"),
        *steps(1, 1, 5, 7.0, 2),
        line("chaos", 11.5, verb="kill-driver", node_id=None, pid=1, planned_step=5, at_step=5, detail=None),
        line("driver_started", 13.0, nonce="11111111", pid=2),
        attempt(2, 16.0, "driver-restart", 2, 3, "object-storage"),
        *steps(2, 4, 8, 18.0, 2),
        line("run_finished", 23.0, **FINISHED),
    ]
    second = summarize(log)["attempts"][1]
    assert (second["fault_s"], second["detected_s"], second["lost_steps"]) == (11.5, 13.0, 2)
    assert summarize(log)["goodput"]["recovery_s"] == 18.0 - 1.0 - 11.5
    assert summarize(log)["failures"] == 1


def test_a_driver_that_was_stopped_and_submitted_again_is_no_failure() -> None:
    log = [
        *START,
        attempt(1, 4.5, "start", 2, 0, "none"),
        *steps(1, 1, 5, 7.0, 2),
        line("run_finished", 12.0, status="stopped", exit_reason="Ctrl-C", exit_code=14, weights_digest=None),
        line("driver_started", 33.0, nonce="11111111", pid=2),
        attempt(2, 36.0, "driver-restart", 2, 5, "object-storage"),
    ]
    assert (summarize(log)["failures"], summarize(log)["preemptions"]) == (0, 0)


def test_a_run_that_goes_on_after_a_stop_is_running_again() -> None:
    log = [
        *START,
        line("run_finished", 5.0, status="stopped", exit_reason="Ctrl-C", exit_code=14, weights_digest=None),
        line("driver_started", 50.0, nonce="11111111", pid=2),
    ]
    assert summarize(log)["status"] == "running"
    assert summarize(log[:-1])["exit_code"] == 14


def test_a_step_lost_twice_is_counted_twice_and_older_losses_are_not_counted_again() -> None:
    log = [
        *START,
        attempt(1, 4.5, "start", 2, 0, "none"),
        *steps(1, 1, 6, 7.0, 2),
        attempt(2, 14.0, "node-lost", 1, 3, "object-storage", detected_s=13.5),
        *steps(2, 4, 4, 16.0, 1),
        attempt(3, 18.0, "worker-lost", 1, 3, "object-storage", detected_s=17.5),
    ]
    assert [entry["lost_steps"] for entry in summarize(log)["attempts"]] == [0, 3, 1]
    assert summarize(log)["steps"] == 3


def test_a_fault_that_ends_the_run_is_counted() -> None:
    log = [
        *START,
        attempt(1, 4.5, "start", 2, 0, "none"),
        line("fault", 9.0, attempt=1, cause="user-error", nodes=[], workers=[], detail="KeyError", detected_s=9.0),
        line("run_finished", 9.5, status="failed", exit_reason="KeyError", exit_code=11, weights_digest=None),
    ]
    assert (summarize(log)["failures"], summarize(log)["exit_code"]) == (1, 11)


def test_unknown_events_and_fields_are_ignored() -> None:
    log = killed_node_run()
    noise = [line("something_new", 1.0, attempt=1, step=3, loss="odd"), line("committed_later", 2.0)]
    mixed = [*log, *noise]
    random.Random(0).shuffle(noise)
    assert summarize(mixed) == summarize(log)


def test_lines_of_an_older_run_under_the_same_url_do_not_count() -> None:
    old = [
        {"event": "run_started", "is_new": True, "t_s": 0.0, "run_id": "r", "steps": 2},
        {"event": "attempt_started", "attempt": 1, "t_s": 1.0, "world_size": 3, "restored_step": 0, "cause": "start"},
        {"event": "step", "attempt": 1, "step": 1, "t_s": 2.0, "loss": 9.0, "tokens": 8, "step_s": 1.0},
        {"event": "committed", "attempt": 1, "step": 1, "t_s": 2.0, "bytes": 5, "stall_s": 0.1, "upload_s": 0.1},
    ]
    new = [{**event, "world_size": 2, "loss": 4.0} if event["event"] != "committed" else event for event in old]
    summary = summarize([*old, *new])
    assert summary == summarize(new)
    assert (len(summary["commits"]), summary["loss_first"]) == (1, 4.0)


def test_a_change_that_a_person_asked_for_is_no_failure_and_blocked_nodes_are_named() -> None:
    summary = summarize(
        [
            line("run_started", 0.0, run_id="r"),
            attempt(1, 1.0, "start", 2, 0, "none", wanted_workers=2),
            *steps(1, 1, 1, 3.0, 2),
            line("node_blocked", 3.5, node="n1", reason="3 worker failures"),
            line("node_blocked", 3.6, node="n2", reason="3 worker failures"),
            line("decision", 3.7, decision="keep", reason="workers wait as spares"),
            line("decision", 3.8, decision="keep", node="n2", reason="node n2 is used again"),
            line("attempt_ended", 4.0, attempt=1, last_step=1, reason="left"),
            attempt(2, 4.1, "scale", 2, 1, "own-memory", wanted_workers=3),
            *steps(2, 2, 2, 6.0, 2),
        ]
    )
    assert (summary["failures"], summary["preemptions"]) == (0, 0)
    assert [one["wanted_workers"] for one in summary["attempts"]] == [2, 3]
    assert summary["blocked_nodes"] == {"n1": "3 worker failures"}

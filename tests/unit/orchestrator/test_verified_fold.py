"""Which Checkpoints are verified, told from events."""

from __future__ import annotations

from typing import Any

from orchestrator.event_lines import event_line
from orchestrator.run_status import RunStatus
from orchestrator.summary import summarize
from orchestrator.verified_fold import VerifiedFold


def fold_of(*events: dict[str, Any]) -> VerifiedFold:
    fold = VerifiedFold()
    for event in ({"event": "verifying", "by": "load"}, *events):
        fold.add(event)
    return fold


def at(t_s: float, event: str, step: int, **fields: Any) -> dict[str, Any]:
    return {"event": event, "t_s": t_s, "step": step, **fields}


def test_unverified_counts_from_the_first_commit_after_the_newest_verified_one() -> None:
    fold = fold_of(
        at(10, "committed", 5),
        at(20, "committed", 10),
        at(30, "committed", 15),
        at(40, "committed", 20),
        at(50, "verified", 10, by="load"),
        at(90, "step", 25),
    )
    assert fold.unverified_s == 60.0
    assert fold.words() == "verified 10, unverified for 60 s"
    assert fold.result() == {
        "mode": "load",
        "newest_step": 10,
        "by": "load",
        "verified": 1,
        "failed": [],
        "unverified_s": 60.0,
    }


def test_young_ones_are_not_spoken_of_and_nothing_is_where_it_is_off() -> None:
    assert fold_of(at(10, "committed", 5), at(69, "step", 6)).words() is None
    assert fold_of(at(10, "committed", 5), at(70, "step", 6)).words() == "unverified for 60 s"
    assert fold_of({"event": "verifying", "by": "off"}, at(10, "committed", 5), at(99, "step", 6)).words() is None


def test_months_of_commits_take_no_more_memory_than_a_day() -> None:
    fold = fold_of()
    for step in range(1, 2001):
        fold.add(at(step, "committed", step))
        if step % 2 == 0:  # the others are deleted before anyone looks at them
            fold.add(at(step, "verified", step, by="load"))
    assert (fold.newest_step, fold.result()["verified"], fold.unverified_s) == (2000, 1000, None)
    assert len(fold._verified) <= 256
    assert len(fold._waiting_since_s) <= 256
    fold.add(at(2001, "quarantined", 2000))
    assert fold.newest_step == 1998


def test_without_a_verifier_nothing_is_kept_and_one_that_never_comes_keeps_the_oldest() -> None:
    off, never = fold_of({"event": "verifying", "by": "off"}), fold_of()
    for step in range(1, 1001):
        off.add(at(step, "committed", step))
        never.add(at(step, "committed", step))
    assert off._waiting_since_s == {}
    assert (len(never._waiting_since_s), never.unverified_s) == (256, 999.0)


def test_one_that_failed_is_neither_verified_nor_waiting() -> None:
    fold = fold_of(at(10, "committed", 5), at(20, "verify_failed", 5), at(20, "quarantined", 5), at(99, "step", 9))
    assert fold.result()["failed"] == [5]
    assert fold.unverified_s is None
    later = fold_of(at(10, "committed", 5), at(20, "verified", 5, by="load"), at(30, "quarantined", 5))
    assert later.newest_step is None


def test_what_was_rolled_back_does_not_count() -> None:
    fold = fold_of(
        at(10, "committed", 5),
        at(11, "verified", 5, by="digests"),
        at(20, "committed", 10),
        at(21, "verified", 10, by="load"),
        {"event": "attempt_started", "t_s": 30, "restored_step": 5},
    )
    assert (fold.newest_step, fold.result()["by"]) == (5, "digests")


def test_the_summary_and_the_status_line_have_it() -> None:
    events = [
        {"event": "verifying", "t_s": 0.0, "by": "load"},
        at(10, "committed", 5),
        at(20, "verified", 5, by="load"),
    ]
    assert summarize(events)["verified"]["newest_step"] == 5
    status = RunStatus(total_steps=10)
    for event in events:
        status.add(event)
    assert "committed 5 · verified 5" in status.line()


def test_a_bad_checkpoint_is_said_loudly() -> None:
    line = event_line({"event": "verify_failed", "step": 5, "key": "shards/x", "reason": "hash mismatch"})
    assert line == "CHECKPOINT OF STEP 5 IS BAD: shards/x: hash mismatch"
    assert event_line({"event": "verify_stopped", "reason": "lost"}) is not None

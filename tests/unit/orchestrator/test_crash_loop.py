"""A step that fails in the same way again and again ends the Run; machines that fail here and there do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.config import FailureConfig
from orchestrator.crash_loop import MAX_KNOWN, Failure, Repeat, count_again, forget_passed, step_doubt
from orchestrator.decisions import Regroup, Stop
from orchestrator.exit_codes import ExitCode
from orchestrator.failure_policy import AttemptFacts, Counters, Fault, FaultKind, classify, decide_after_fault
from orchestrator.journal import Journal
from storage.keys import Attempt
from storage.memory_store import MemoryStore
from workers.contract import CauseKind, FailureCause, Outcome, OutcomeKind

ATTEMPT = Attempt(number=1, nonce="00000000")
LOST = Fault(kind=FaultKind.WORKER_LOST, detail="lost worker w1", step=7, step_doubt=1)


def decide(fault: Fault, counters: Counters, config: FailureConfig | None = None) -> tuple[Regroup | Stop, Counters]:
    return decide_after_fault(fault, counters, config or FailureConfig(), steps_finished=2, steps_kept=0)


def survivor(last_step: int) -> Outcome:
    cause = FailureCause(
        kind=CauseKind.COLLECTIVE, error_type="DistError", message="reset", traceback="", rank=0, step=last_step + 1
    )
    return Outcome(attempt=ATTEMPT, worker_id="w0", rank=0, kind=OutcomeKind.FAILED, last_step=last_step, cause=cause)


@pytest.mark.parametrize("kind", [FaultKind.WORKER_LOST, FaultKind.HANG, FaultKind.COLLECTIVE])
def test_members_that_fail_at_one_step_three_times_end_the_run_with_the_reason(kind: FaultKind) -> None:
    fault, counters = replace(LOST, kind=kind), Counters()
    for _ in range(2):
        decision, counters = decide(fault, counters)
        assert isinstance(decision, Regroup)
    decision, _ = decide(fault, counters)
    assert isinstance(decision, Stop)
    assert decision.exit_code is ExitCode.FAILURE_BUDGET
    for part in ("crash loop", "step 7", "max_same_step_failures", "lost worker w1"):
        assert part in decision.reason


def test_other_faults_in_between_do_not_hide_a_loop() -> None:
    counters = Counters()
    for fault in (LOST, Fault(kind=FaultKind.PREEMPTION, detail="x", step=5), LOST, replace(LOST, kind=FaultKind.HANG)):
        decision, counters = decide(fault, counters)
        assert isinstance(decision, Regroup)
    decision, _ = decide(LOST, counters)
    assert isinstance(decision, Stop)


def test_a_step_that_was_finished_meanwhile_is_no_loop() -> None:
    counters = Counters()
    for number in range(1, 10):
        for step in (7, 20 * number):
            decision, counters = decide(replace(LOST, step=step), counters)
            assert isinstance(decision, Regroup)


def test_a_lost_node_says_nothing_of_the_step() -> None:
    counters = Counters()
    for _ in range(10):
        decision, counters = decide(replace(LOST, kind=FaultKind.NODE_LOST), counters)
        assert isinstance(decision, Regroup)


def test_the_limit_can_be_raised_and_lifted() -> None:
    for limit, tolerated in ((2, 1), (5, 4), (None, 20)):
        counters = Counters()
        for _ in range(tolerated):
            decision, counters = decide(LOST, counters, FailureConfig(max_same_step_failures=limit))
            assert isinstance(decision, Regroup)
        if limit is not None:
            decision, _ = decide(LOST, counters, FailureConfig(max_same_step_failures=limit))
            assert isinstance(decision, Stop)


def test_a_loop_is_seen_over_restarts_of_the_driver() -> None:
    store = MemoryStore("journal")
    decision: Regroup | Stop | None = None
    for nonce in ("0000aaaa", "0000bbbb", "0000cccc"):
        journal = Journal(store, nonce, lambda: "2026-01-01T00:00:00Z")
        journal.load()
        decision, counters = decide(LOST, journal.counters())
        journal.append_counters("decision", counters)
    assert isinstance(decision, Stop)


def test_a_journal_of_an_older_release_is_still_read() -> None:
    store = MemoryStore("journal")
    writer = Journal(store, "0000aaaa", lambda: "2026-01-01T00:00:00Z")
    writer.append("decision", counters={"user_errors": 2, "last_user_error": "7:ValueError:x", "repeats": [{"way": 1}]})
    reader = Journal(store, "0000bbbb", lambda: "2026-01-01T00:00:00Z")
    reader.load()
    assert reader.counters() == Counters(user_errors=2)


def test_an_error_whose_message_only_differs_in_its_numbers_is_the_same() -> None:
    counters = Counters()
    decision: Regroup | Stop | None = None
    for size in ("2.50 GiB at 0x7f01", "1.75 GiB at 0x8e02"):
        cause = FailureCause(
            kind=CauseKind.USER, error_type="KernelError", message=f"wanted {size}", traceback="", rank=1, step=9
        )
        outcome = replace(survivor(8), cause=cause)
        fault = classify(AttemptFacts(outcomes=(outcome,)))
        decision, counters = decide(fault, counters, FailureConfig(max_user_errors=-1))
    assert isinstance(decision, Stop)
    assert decision.exit_code is ExitCode.USER_ERROR


def test_the_step_of_a_lost_worker_is_the_one_after_the_last_that_was_heard_of() -> None:
    facts = AttemptFacts(outcomes=(survivor(6),), lost_workers=("w1",), reached_step=6, step_s=0.01)
    assert (classify(facts).step, classify(facts).step_doubt) == (7, 1)
    alone = replace(facts, outcomes=())
    assert (classify(alone).step, classify(alone).step_doubt) == (7, 200)
    assert classify(replace(alone, reached_step=None)).step is None, "no step was under way"


def test_a_lone_worker_that_dies_at_one_step_is_a_loop_though_its_last_reports_are_lost() -> None:
    counters = Counters()
    decision: Regroup | Stop | None = None
    for heard in (38, 35, 40):
        fault = classify(AttemptFacts(lost_workers=("w0",), reached_step=heard, step_s=0.1))
        decision, counters = decide(fault, counters)
    assert isinstance(decision, Stop)


def test_what_is_known_stays_bounded_and_the_first_step_seen_names_the_loop() -> None:
    repeats: tuple[Repeat, ...] = ()
    for number in range(3 * MAX_KNOWN):
        repeats, _ = count_again(repeats, Failure.of("hang", 10 * number))
    assert len(repeats) == MAX_KNOWN
    repeats, count = count_again(repeats, Failure.of("hang", repeats[-1].step + 1, doubt=1))
    assert (count, repeats[-1].step) == (2, 10 * (3 * MAX_KNOWN - 1))


def test_lasting_failures_are_kept_though_their_step_was_passed() -> None:
    repeats, _ = count_again((), Failure.of("user-error", 7), is_lasting=True)
    repeats, _ = count_again(repeats, Failure.of("hang", 8))
    assert [repeat.way for repeat in forget_passed(repeats, 50)] == ["user-error"]


def test_a_witness_knows_the_step_better_than_reports_do() -> None:
    assert step_doubt(0.01, has_witness=True) == 1
    assert step_doubt(None, has_witness=False) == 1
    assert step_doubt(5.0, has_witness=False) == 1
    assert step_doubt(0.5, has_witness=False) == 4

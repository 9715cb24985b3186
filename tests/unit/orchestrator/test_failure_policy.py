"""Classification and budgets: pure values in, pure values out."""

from __future__ import annotations

from orchestrator.config import FailureConfig
from orchestrator.decisions import Regroup, Stop
from orchestrator.exit_codes import ExitCode
from orchestrator.failure_policy import (
    MAX_CORRUPT_ATTEMPTS,
    MAX_FRUITLESS_ATTEMPTS,
    AttemptFacts,
    Counters,
    Fault,
    FaultKind,
    classify,
    decide_after_fault,
)
from storage.keys import Attempt
from workers.contract import CauseKind, FailureCause, Outcome, OutcomeKind

ATTEMPT = Attempt(number=1, nonce="00000000")


def failed(rank: int, kind: CauseKind, error_type: str = "RuntimeError", message: str = "x", step: int = 7) -> Outcome:
    cause = FailureCause(kind=kind, error_type=error_type, message=message, traceback="", rank=rank, step=step)
    return Outcome(
        attempt=ATTEMPT, worker_id=f"w{rank}", rank=rank, kind=OutcomeKind.FAILED, last_step=step, cause=cause
    )


def test_the_error_of_one_rank_is_the_reason_and_its_peers_echoes_are_not() -> None:
    facts = AttemptFacts(
        outcomes=(
            failed(0, CauseKind.COLLECTIVE, message="Connection closed by peer"),
            failed(1, CauseKind.USER, "ValueError", "404 shard X"),
        )
    )
    fault = classify(facts)
    assert fault.kind is FaultKind.USER_ERROR
    assert "rank 1" in fault.detail
    assert "404 shard X" in fault.detail


def test_collective_errors_around_a_lost_node_are_infrastructure() -> None:
    facts = AttemptFacts(outcomes=(failed(0, CauseKind.COLLECTIVE),), lost_workers=("w1",), lost_nodes=("node1" * 8,))
    assert classify(facts).kind is FaultKind.NODE_LOST


def test_a_lost_node_that_had_a_notice_is_a_preemption() -> None:
    facts = AttemptFacts(lost_workers=("w1",), lost_nodes=("n1",), draining_nodes=frozenset({"n1"}))
    assert classify(facts).kind is FaultKind.PREEMPTION


def test_three_node_losses_leave_the_budget_of_user_errors_untouched_and_the_second_user_error_ends_the_run() -> None:
    config = FailureConfig(max_user_errors=1)
    counters = Counters()
    for _ in range(3):
        fault = Fault(kind=FaultKind.PREEMPTION, detail="reclaimed")
        decision, counters = decide_after_fault(fault, counters, config, steps_finished=5, steps_kept=0)
        assert isinstance(decision, Regroup)
    assert (counters.preemptions, counters.user_errors) == (3, 0)
    first = classify(AttemptFacts(outcomes=(failed(1, CauseKind.USER, "ValueError", "bad", step=30),)))
    decision, counters = decide_after_fault(first, counters, config, steps_finished=5, steps_kept=0)
    assert isinstance(decision, Regroup)
    second = classify(AttemptFacts(outcomes=(failed(1, CauseKind.USER, "ValueError", "bad", step=44),)))
    decision, counters = decide_after_fault(second, counters, config, steps_finished=5, steps_kept=0)
    assert isinstance(decision, Stop)
    assert decision.exit_code is ExitCode.USER_ERROR
    assert "ValueError" in decision.reason


def test_the_same_error_at_the_same_step_twice_breaks_the_loop_whatever_the_budget() -> None:
    config = FailureConfig(max_user_errors=-1)
    fault = classify(AttemptFacts(outcomes=(failed(1, CauseKind.USER, "ValueError", "bad", step=30),)))
    decision, counters = decide_after_fault(fault, Counters(), config, steps_finished=3, steps_kept=0)
    assert isinstance(decision, Regroup)
    decision, _ = decide_after_fault(fault, counters, config, steps_finished=3, steps_kept=0)
    assert isinstance(decision, Stop)
    assert "twice" in decision.reason


def test_a_mismatching_checkpoint_is_a_config_error_and_a_corrupt_one_costs_no_budget() -> None:
    config = FailureConfig(max_infrastructure=0)
    mismatch = classify(AttemptFacts(outcomes=(failed(0, CauseKind.CHECKPOINT_MISMATCH, step=0),)))
    decision, _ = decide_after_fault(mismatch, Counters(), config, steps_finished=0, steps_kept=0)
    assert isinstance(decision, Stop)
    assert decision.exit_code is ExitCode.CONFIG_ERROR
    corrupt = classify(AttemptFacts(outcomes=(failed(0, CauseKind.CORRUPT_CHECKPOINT, step=0),)))
    decision, counters = decide_after_fault(corrupt, Counters(), config, steps_finished=0, steps_kept=0)
    assert isinstance(decision, Regroup)
    assert (counters.infrastructure, counters.user_errors) == (0, 0)
    for _ in range(MAX_CORRUPT_ATTEMPTS):
        decision, counters = decide_after_fault(corrupt, counters, config, steps_finished=0, steps_kept=0)
    assert isinstance(decision, Stop)
    assert decision.exit_code is ExitCode.STORAGE_OUTAGE


def test_attempts_that_finish_no_step_are_bounded_even_without_a_budget() -> None:
    counters = Counters()
    fault = Fault(kind=FaultKind.WORKER_LOST, detail="lost worker")
    for _ in range(MAX_FRUITLESS_ATTEMPTS - 1):
        decision, counters = decide_after_fault(fault, counters, FailureConfig(), steps_finished=0, steps_kept=0)
        assert isinstance(decision, Regroup)
    decision, _ = decide_after_fault(fault, counters, FailureConfig(), steps_finished=0, steps_kept=0)
    assert isinstance(decision, Stop)
    assert decision.exit_code is ExitCode.FAILURE_BUDGET


def test_the_infrastructure_budget_is_kept_apart_and_counts() -> None:
    config = FailureConfig(max_infrastructure=1, max_user_errors=0)
    fault = Fault(kind=FaultKind.NODE_LOST, detail="lost node")
    decision, counters = decide_after_fault(fault, Counters(), config, steps_finished=1, steps_kept=0)
    assert isinstance(decision, Regroup)
    decision, counters = decide_after_fault(fault, counters, config, steps_finished=1, steps_kept=0)
    assert isinstance(decision, Stop)
    assert decision.exit_code is ExitCode.FAILURE_BUDGET
    assert counters.user_errors == 0


def test_storage_trouble_is_bounded_by_what_is_committed_not_by_steps_that_are_lost_again() -> None:
    fault = Fault(kind=FaultKind.STORAGE, detail="no Keeper")
    counters = Counters()
    for _ in range(MAX_FRUITLESS_ATTEMPTS - 1):
        decision, counters = decide_after_fault(fault, counters, FailureConfig(), steps_finished=9, steps_kept=0)
        assert isinstance(decision, Regroup)
    _, kept = decide_after_fault(fault, counters, FailureConfig(), steps_finished=9, steps_kept=1)
    assert kept.fruitless == 0
    decision, _ = decide_after_fault(fault, counters, FailureConfig(), steps_finished=9, steps_kept=0)
    assert isinstance(decision, Stop)
    assert decision.exit_code is ExitCode.STORAGE_OUTAGE


def test_ranks_that_cannot_load_in_an_outage_use_up_no_budget_at_all() -> None:
    config = FailureConfig(max_infrastructure=0, max_user_errors=0)
    fault = classify(AttemptFacts(outcomes=(failed(0, CauseKind.STORAGE, "StoreUnavailable", "get failed", step=0),)))
    counters = Counters(fruitless=2)
    for _ in range(3 * MAX_FRUITLESS_ATTEMPTS):
        decision, counters = decide_after_fault(fault, counters, config, steps_finished=0, steps_kept=0)
        assert isinstance(decision, Regroup)
    assert (counters.fruitless, counters.infrastructure, counters.user_errors) == (2, 0, 0)

"""Classification and budgets: pure values in, pure values out."""

from __future__ import annotations

from dataclasses import replace

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


def test_an_error_of_a_restore_names_the_step_that_was_restored() -> None:
    outcome = failed(0, CauseKind.CORRUPT_CHECKPOINT, "CorruptCheckpoint", step=30)
    assert outcome.cause is not None
    restoring = replace(outcome, cause=replace(outcome.cause, is_restoring=True))
    assert classify(AttemptFacts(outcomes=(restoring,))).detail.startswith("rank 0, while restoring step 30: Corrupt")


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


def test_what_cannot_be_had_as_configured_is_a_config_error_at_once() -> None:
    config = FailureConfig(max_user_errors=-1)
    refused = classify(AttemptFacts(outcomes=(failed(1, CauseKind.CONFIGURATION, "NotReproducible", "fused"),)))
    decision, _ = decide_after_fault(refused, Counters(), config, steps_finished=0, steps_kept=0)
    assert isinstance(decision, Stop)
    assert decision.exit_code is ExitCode.CONFIG_ERROR
    assert "fused" in decision.reason


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


def test_replicas_that_disagree_at_every_save_end_the_run_although_steps_are_finished() -> None:
    fault = classify(AttemptFacts(unlike_replicas="replicas disagree at step 100", reached_step=103))
    counters = Counters()
    for _ in range(MAX_FRUITLESS_ATTEMPTS - 1):
        decision, counters = decide_after_fault(fault, counters, FailureConfig(), steps_finished=100, steps_kept=0)
        assert isinstance(decision, Regroup)
    _, kept = decide_after_fault(fault, counters, FailureConfig(), steps_finished=100, steps_kept=1)
    assert kept.fruitless == 0, "a Commit in between is progress"
    decision, _ = decide_after_fault(fault, counters, FailureConfig(), steps_finished=100, steps_kept=0)
    assert isinstance(decision, Stop)
    assert decision.exit_code is ExitCode.FAILURE_BUDGET
    assert "8 attempts in a row ended without a Commit" in decision.reason


def test_ranks_that_cannot_load_in_an_outage_use_up_no_budget_at_all() -> None:
    config = FailureConfig(max_infrastructure=0, max_user_errors=0)
    fault = classify(AttemptFacts(outcomes=(failed(0, CauseKind.STORAGE, "StoreUnavailable", "get failed", step=0),)))
    counters = Counters(fruitless=2)
    for _ in range(3 * MAX_FRUITLESS_ATTEMPTS):
        decision, counters = decide_after_fault(fault, counters, config, steps_finished=0, steps_kept=0)
        assert isinstance(decision, Regroup)
    assert (counters.fruitless, counters.infrastructure, counters.user_errors) == (2, 0, 0)


def test_memory_that_runs_out_is_its_own_cause_and_not_hidden_by_the_echoes_or_errors_it_sets_off() -> None:
    starved = failed(1, CauseKind.OUT_OF_MEMORY, "MemoryError", "no 2 GiB", step=41)
    fault = classify(AttemptFacts(outcomes=(failed(0, CauseKind.COLLECTIVE), failed(2, CauseKind.USER), starved)))
    assert fault.kind is FaultKind.OUT_OF_MEMORY
    assert fault.detail == "rank 1, step 41: MemoryError: no 2 GiB"
    assert fault.root == starved.cause


def test_a_device_that_fails_is_a_lost_worker_and_no_error_of_the_training_code() -> None:
    echo = failed(0, CauseKind.COLLECTIVE)
    failing = failed(1, CauseKind.ACCELERATOR, "AcceleratorError", "CUDA error: uncorrectable ECC error encountered")
    spoiled = failed(2, CauseKind.BAD_STEP, "StepNotFinite")
    fault = classify(AttemptFacts(outcomes=(echo, failing, spoiled), lost_workers=("w1",)))
    assert fault.kind is FaultKind.WORKER_LOST
    assert fault.detail.startswith("rank 1, step 7: AcceleratorError: CUDA error: uncorrectable ECC error")
    lost = AttemptFacts(outcomes=(failing,), lost_nodes=("n2",), draining_nodes=frozenset({"n2"}))
    assert classify(lost).kind is FaultKind.PREEMPTION, "its links may have broken with the node"
    counters, config = Counters(), FailureConfig(max_node_failures=None)
    for _ in range(MAX_FRUITLESS_ATTEMPTS - 1):
        decision, counters = decide_after_fault(fault, counters, config, steps_finished=0, steps_kept=0)
        assert isinstance(decision, Regroup), "it is the machine, not the step"
    assert (counters.infrastructure, counters.user_errors) == (MAX_FRUITLESS_ATTEMPTS - 1, 0)


def test_a_worker_that_rays_memory_monitor_killed_ran_out_of_memory() -> None:
    fault = classify(AttemptFacts(lost_workers=("w1",), starved_workers=("w1",)))
    assert (fault.kind, "w1" in fault.detail) == (FaultKind.OUT_OF_MEMORY, True)
    assert classify(AttemptFacts(lost_nodes=("n1",), starved_workers=("w1",))).kind is FaultKind.NODE_LOST


def test_out_of_memory_costs_no_user_error_but_the_same_step_twice_ends_the_run_with_advice() -> None:
    config = FailureConfig(max_user_errors=0, max_infrastructure=9)

    def after(step: int, counters: Counters) -> tuple[Regroup | Stop, Counters]:
        fault = classify(AttemptFacts(outcomes=(failed(0, CauseKind.OUT_OF_MEMORY, "MemoryError", step=step),)))
        return decide_after_fault(fault, counters, config, steps_finished=3, steps_kept=0)

    first, counters = after(41, Counters())
    assert isinstance(first, Regroup)
    assert (first.cause, counters.infrastructure, counters.user_errors) == ("out-of-memory", 1, 0)
    elsewhere, counters = after(50, counters)
    assert isinstance(elsewhere, Regroup)
    again, counters = after(50, counters)
    assert isinstance(again, Stop)
    assert again.exit_code is ExitCode.USER_ERROR
    assert "out of memory at the same step twice: rank 0, step 50" in again.reason
    assert "data.micro_batch" in again.reason


def test_memory_that_cannot_be_read_charges_no_budget_unless_a_member_is_gone() -> None:
    outcomes = (failed(1, CauseKind.MEMORY, "MemoryUnreadable"), failed(0, CauseKind.COLLECTIVE))
    fault = classify(AttemptFacts(outcomes=outcomes))
    assert fault.kind is FaultKind.MEMORY
    config = FailureConfig(max_infrastructure=0)
    decision, counters = decide_after_fault(fault, Counters(), config, steps_finished=0, steps_kept=0)
    assert decision == Regroup(cause="memory-unreadable", reason=fault.detail)
    assert (counters.infrastructure, counters.storage_errors, counters.fruitless) == (0, 0, 1)
    assert classify(AttemptFacts(outcomes=outcomes, lost_nodes=("n1",))).kind is FaultKind.NODE_LOST
    last = Counters(fruitless=MAX_FRUITLESS_ATTEMPTS - 1)
    decision, _ = decide_after_fault(fault, last, FailureConfig(), steps_finished=0, steps_kept=0)
    assert isinstance(decision, Stop)

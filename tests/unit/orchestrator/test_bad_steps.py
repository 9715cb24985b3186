"""Steps that may not stand: what is skipped, when the Run stops, and what of it outlives the driver."""

from __future__ import annotations

import pytest

from orchestrator.attempt_run import Broken
from orchestrator.bad_steps import bad_step_entry, bad_steps
from orchestrator.config import FailureConfig
from orchestrator.decisions import Regroup, Stop
from orchestrator.exit_codes import ExitCode
from orchestrator.failure_policy import AttemptFacts, Counters, Fault, FaultKind, classify, decide_after_fault
from orchestrator.journal import Journal
from orchestrator.summary import summarize
from storage.keys import Attempt, StepKey
from storage.memory_store import MemoryStore
from workers.contract import CauseKind, FailureCause, Outcome, OutcomeKind, SkippedWindow

ATTEMPT = Attempt(number=3, nonce="0badcafe")


def outcome(rank: int, kind: CauseKind, step: int, *, error_type: str = "StepNotFinite", place: int = 40) -> Outcome:
    windows = (SkippedWindow(place=place, samples=8, step=step),) if kind is CauseKind.BAD_STEP else ()
    cause = FailureCause(
        kind=kind, error_type=error_type, message="loss nan", traceback="", rank=rank, step=step, windows=windows
    )
    return Outcome(
        attempt=ATTEMPT, worker_id=f"w{rank}", rank=rank, kind=OutcomeKind.FAILED, last_step=step, cause=cause
    )


def facts(step: int, *, error_type: str = "StepNotFinite", place: int = 40) -> AttemptFacts:
    echo = outcome(0, CauseKind.COLLECTIVE, step + 1)
    return AttemptFacts(outcomes=(echo, outcome(1, CauseKind.BAD_STEP, step, error_type=error_type, place=place)))


def decide(counters: Counters, config: FailureConfig, broken: AttemptFacts) -> tuple[Regroup | Stop, Counters]:
    return decide_after_fault(classify(broken), counters, config, steps_finished=3, steps_kept=0)


def test_a_bad_step_goes_back_and_skips_its_samples_without_costing_a_budget() -> None:
    config = FailureConfig(max_user_errors=0, max_infrastructure=0)
    fault = classify(facts(6))
    assert (fault.kind, fault.step) == (FaultKind.BAD_STEP, 6), "the echo of a rank that was cut off hides nothing"
    decision, counters = decide(Counters(), config, facts(6))
    assert isinstance(decision, Regroup)
    assert decision.cause == "bad-step"
    assert counters.skipped == (SkippedWindow(place=40, samples=8, step=6),)
    assert (counters.user_errors, counters.infrastructure) == (0, 0)


def test_a_step_that_is_bad_with_other_samples_too_stops_the_run() -> None:
    _, counters = decide(Counters(), FailureConfig(), facts(6))
    decision, counters = decide(counters, FailureConfig(), facts(6, place=48))
    assert isinstance(decision, Stop)
    assert decision.exit_code is ExitCode.USER_ERROR
    assert "step 6 went wrong again" in decision.reason
    assert len(counters.skipped) == 1


def test_windows_are_not_skipped_without_end() -> None:
    config, counters = FailureConfig(max_skipped_windows=2), Counters()
    for step in (6, 9):
        decision, counters = decide(counters, config, facts(step, place=8 * step))
        assert isinstance(decision, Regroup)
    decision, _ = decide(counters, config, facts(12, place=96))
    assert isinstance(decision, Stop)
    assert "max_skipped_windows" in decision.reason


@pytest.mark.parametrize(("error_type", "expected"), [("StepNotFinite", Stop), ("LossSpike", Regroup)])
def test_the_run_may_stop_at_nan_instead_and_a_later_submission_may_go_on(error_type: str, expected: type) -> None:
    decision, counters = decide(Counters(), FailureConfig(nan="stop"), facts(6, error_type=error_type))
    assert isinstance(decision, expected)
    if expected is Stop:
        decision, _ = decide(counters, FailureConfig(), facts(6))
        assert isinstance(decision, Regroup)


def test_what_is_skipped_and_what_memory_must_not_give_back_outlive_the_driver() -> None:
    store = MemoryStore("journal")
    writer = Journal(store, "0000aaaa", lambda: "2026-01-01T00:00:00Z")
    end = Broken(fault=Fault(kind=FaultKind.BAD_STEP, detail="x"), facts=facts(6), detected_at_s=0.0)
    _, counters = decide(Counters(), FailureConfig(), facts(6))
    writer.append_counters("decision", counters, **bad_step_entry(end))
    writer.append("decision", **bad_step_entry(Broken(fault=end.fault, facts=AttemptFacts(), detected_at_s=0.0)))
    reader = Journal(store, "0000bbbb", lambda: "2026-01-01T00:00:00Z")
    reader.load()
    assert reader.counters() == counters
    assert bad_steps(reader.entries) == {StepKey(step=6, attempt=ATTEMPT)}


def test_the_summary_lists_what_was_skipped() -> None:
    events = [
        {"event": "run_started", "run_id": "r", "t_s": 0.0},
        {"event": "window_skipped", "step": 6, "place": 40, "samples": 8, "t_s": 1.0},
    ]
    assert summarize(events)["skipped_windows"] == [{"step": 6, "place": 40, "samples": 8}]

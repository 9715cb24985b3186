"""What is known of an outage and of the work at risk, and what the policy makes of it: values in, values out."""

from __future__ import annotations

import pytest

from orchestrator.decisions import Keep, Stop
from orchestrator.exit_codes import ExitCode
from orchestrator.signals import Committed, SaveBound, SaveDelayed, SaveFailed, SaveSkipped, StepFinished
from orchestrator.storage_policy import decide_on_storage
from orchestrator.store_watch import StoreFacts, StoreUser, StoreWatch
from storage.config import CheckpointConfig
from storage.keys import Attempt
from workers.contract import BoundOrder, OrderKind, StepReport

ATTEMPT = Attempt(number=1, nonce="00000000")
QUIET = StoreFacts(
    away_s=None, reason="", failed_in_row=0, last_failure="", durable_step=30, at_risk_steps=7, at_risk_s=9.0
)


def finished(step: int) -> StepFinished:
    report = StepReport(step=step, loss=1.0, grad_norm=1.0, lr=0.1, tokens=1, position=1, sample_chain="c", step_s=1.0,
                        finished_at_s=0.0)  # fmt: skip
    return StepFinished(attempt=ATTEMPT, report=report)


def bound(step: int) -> SaveBound:
    order = BoundOrder(number=0, kind=OrderKind.SNAPSHOT, step=step)
    return SaveBound(attempt=ATTEMPT, bound=order, reason="cadence")


def committed(step: int) -> Committed:
    return Committed(attempt=ATTEMPT, step=step, stored_bytes=1, stall_s=0.0, upload_s=0.0, loss=None)


def delayed(step: int, failing_for_s: float) -> SaveDelayed:
    return SaveDelayed(attempt=ATTEMPT, step=step, rank=1, reason="put shards/x: 503", failing_for_s=failing_for_s)


def failed(step: int) -> SaveFailed:
    return SaveFailed(attempt=ATTEMPT, step=step, reason="rank 1: a newer one waits")


def test_work_at_risk_grows_from_the_moment_the_newest_checkpoint_holds() -> None:
    watch = StoreWatch()
    watch.begin_attempt(100, 50.0)
    watch.note(bound(105), 54.0)
    for step in range(101, 111):
        watch.note(finished(step), 50.0 + step - 100)
    facts = watch.facts(60.0)
    assert (facts.durable_step, facts.at_risk_steps, facts.at_risk_s) == (100, 10, 10.0)
    watch.note(committed(105), 61.0)
    facts = watch.facts(62.0)
    assert (facts.durable_step, facts.at_risk_steps, facts.at_risk_s) == (105, 5, 8.0)
    watch.begin_attempt(105, 70.0)
    facts = watch.facts(75.0)
    assert (facts.at_risk_steps, facts.at_risk_s) == (0, 0.0), "nothing is at risk before a step is done"


def test_what_an_attempt_takes_over_from_memory_stays_at_risk() -> None:
    watch = StoreWatch()
    watch.begin_attempt(100, 50.0)
    watch.note(finished(112), 60.0)
    watch.begin_attempt(112, 70.0, 100)
    facts = watch.facts(75.0)
    assert (facts.durable_step, facts.at_risk_steps, facts.at_risk_s) == (100, 12, 25.0)
    watch.note(committed(112), 80.0)
    assert watch.facts(81.0).at_risk_steps == 0
    fresh = StoreWatch()
    fresh.begin_attempt(40, 5.0, 30)
    facts = fresh.facts(9.0)
    assert (facts.durable_step, facts.at_risk_steps, facts.at_risk_s) == (30, 10, 4.0)


def test_saves_missed_before_an_outage_was_noticed_count_for_it() -> None:
    watch = StoreWatch()
    watch.begin_attempt(0, 0.0)
    for now in (70.0, 85.0, 90.0):
        watch.note(SaveSkipped(attempt=ATTEMPT, step=int(now)), now)
    watch.note(delayed(80, 20.0), 100.0)
    watch.note(SaveSkipped(attempt=ATTEMPT, step=100), 101.0)
    watch.note(committed(120), 110.0)
    back = watch.take_news(110.0)[-1]
    assert (back.event, back.fields["away_s"], back.fields["saves_skipped"]) == ("store_back", 30.0, 3)


def test_an_outage_is_said_once_at_its_beginning_now_and_then_and_once_at_its_end() -> None:
    watch = StoreWatch()
    watch.begin_attempt(0, 0.0)
    said: list[tuple[str, float]] = []
    for now in range(100, 140):
        watch.note(finished(now), float(now))
        watch.note(delayed(110, now - 98.0), float(now))
        if now % 10 == 5:
            watch.note(failed(now), float(now))
            watch.note(SaveSkipped(attempt=ATTEMPT, step=now), float(now))
        said += [(news.event, news.fields["away_s"]) for news in watch.take_news(float(now))]
    watch.note(committed(139), 140.0)
    (back,) = watch.take_news(140.0)
    assert said == [("store_away", 2.0), ("work_at_risk", 12.0), ("work_at_risk", 22.0), ("work_at_risk", 32.0)]
    assert back.event == "store_back"
    assert back.fields == {"away_s": 42.0, "saves_failed": 4, "saves_skipped": 4, "durable_step": 139,
                           "at_risk_steps": 139, "at_risk_s": 140.0}  # fmt: skip
    assert watch.facts(141.0).away_s is None
    assert watch.take_news(200.0) == []


def test_an_outage_lasts_until_all_who_need_the_store_are_served() -> None:
    watch = StoreWatch()
    watch.failed(StoreUser.PLAN, "list commits/: refused", 10.0)
    watch.failed(StoreUser.JOURNAL, "put journal/1: refused", 12.0)
    watch.answered(StoreUser.PLAN, 13.0)
    assert watch.is_away
    assert watch.facts(15.0).away_s == 3.0
    watch.answered(StoreUser.JOURNAL, 16.0)
    assert [news.event for news in watch.take_news(16.0)] == ["store_away", "store_back"]


@pytest.mark.parametrize(
    ("reason", "is_away"),
    [
        ("rank 0: superseded by step 12 while the store was away: StoreUnavailable: store: put k failed: 503", True),
        ("rank 0: StoreRefused: store: put k failed: access denied", True),
        ("rank 0: found no free buffer for it", False),
    ],
)
def test_a_save_that_failed_for_the_store_is_a_sign_of_an_outage_and_another_is_not(reason: str, is_away: bool) -> None:
    watch = StoreWatch()
    watch.note(SaveFailed(attempt=ATTEMPT, step=10, reason=reason), 5.0)
    assert watch.is_away is is_away
    if is_away:
        assert reason in watch.facts(6.0).reason


def test_only_a_commit_of_what_could_not_be_saved_or_later_ends_the_outage_and_late_word_begins_no_other() -> None:
    watch = StoreWatch()
    reason = "rank 0: superseded by step 50 while the store was away: StoreUnavailable: store: put k failed: 503"
    watch.note(delayed(20, 1.0), 10.0)
    watch.note(delayed(30, 2.0), 11.0)
    watch.note(committed(20), 12.0)
    assert watch.is_away
    watch.note(SaveFailed(attempt=ATTEMPT, step=30, reason=reason), 13.0)
    watch.note(committed(50), 14.0)
    watch.note(delayed(30, 2.0), 14.5)
    assert [news.event for news in watch.take_news(15.0)] == ["store_away", "store_back"]
    assert not watch.is_away


def test_failed_saves_count_in_a_row_over_attempts_and_a_commit_ends_the_row() -> None:
    watch = StoreWatch()
    for step in (10, 20):
        watch.note(failed(step), float(step))
    watch.begin_attempt(0, 25.0)
    watch.note(failed(30), 30.0)
    assert watch.facts(30.0).failed_in_row == 3
    watch.note(committed(40), 40.0)
    watch.note(failed(50), 50.0)
    facts = watch.facts(50.0)
    assert (facts.failed_in_row, facts.last_failure) == (1, "save of step 50, rank 1: a newer one waits")


def test_in_a_long_silence_saves_are_asked_for_after_twice_the_time_up_to_five_minutes() -> None:
    watch = StoreWatch()
    watch.note(SaveFailed(attempt=ATTEMPT, step=10, reason="rank 0: StoreRefused: put k failed: denied"), 0.0)
    asked = [now_s for now_s in range(1400) if watch.wants_save(float(now_s))]
    assert asked == [60, 180, 420, 720, 1020, 1320]
    watch.note(committed(20), 1400.0)
    watch.note(delayed(30, 1.0), 1401.0)
    assert [now_s for now_s in range(1402, 1500) if watch.wants_save(float(now_s))] == [1461]


@pytest.mark.parametrize(("away_s", "ends"), [(None, False), (29.9, False), (30.0, False), (30.1, True)])
def test_only_an_outage_longer_than_the_limit_ends_the_run(away_s: float | None, ends: bool) -> None:
    config = CheckpointConfig(max_outage_s=30.0)
    decision = decide_on_storage(_with(away_s=away_s, reason="put k: 503"), config, now_unix_s=1_000_000_000.0)
    assert isinstance(decision, Stop if ends else Keep)


def test_the_reason_names_what_failed_since_when_what_is_lost_and_what_to_do() -> None:
    facts = _with(away_s=40.0, reason="save of step 60, rank 1: store: put shards/step-60/1 failed: refused")
    decision = decide_on_storage(facts, CheckpointConfig(max_outage_s=30.0), now_unix_s=1_000_000_040.0)
    assert isinstance(decision, Stop)
    assert decision.exit_code is ExitCode.STORAGE_OUTAGE
    for part in ("40 s", "2001-09-09T01:46:40.000Z", "checkpoint.max_outage_s is 30", "rank 1", "put shards/step-60/1",
                 "step 30", "7 steps (9 s)", "run the same command again"):  # fmt: skip
        assert part in decision.reason


@pytest.mark.parametrize(("limit", "in_row", "ends"), [(None, 99, False), (2, 1, False), (2, 2, True)])
def test_as_many_failed_saves_in_a_row_as_allowed_end_the_run(limit: int | None, in_row: int, ends: bool) -> None:
    facts = _with(failed_in_row=in_row, last_failure="save of step 50, rank 0: put shards/k: 503")
    decision = decide_on_storage(facts, CheckpointConfig(max_failed_saves=limit), now_unix_s=0.0)
    assert isinstance(decision, Stop if ends else Keep)
    if isinstance(decision, Stop):
        assert "save of step 50, rank 0: put shards/k: 503" in decision.reason
        assert decision.exit_code is ExitCode.STORAGE_OUTAGE


def _with(
    *, away_s: float | None = None, reason: str = "", failed_in_row: int = 0, last_failure: str = ""
) -> StoreFacts:
    return StoreFacts(
        away_s=away_s,
        reason=reason,
        failed_in_row=failed_in_row,
        last_failure=last_failure,
        durable_step=QUIET.durable_step,
        at_risk_steps=QUIET.at_risk_steps,
        at_risk_s=QUIET.at_risk_s,
    )

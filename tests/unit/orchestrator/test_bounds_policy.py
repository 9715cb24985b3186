"""The bounds on losses on a fake clock: when a save must begin, and what is said where a limit cannot be held."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.bounds_policy import BoundsPolicy
from orchestrator.save_config import DeadlineConfig, SavePolicyConfig
from tests.fakes.save_facts import save_facts, save_times


def bounds(**settings: Any) -> BoundsPolicy:
    defaults: dict[str, Any] = {"min_interval_s": 0.0, "max_interval_s": 3600.0, "max_at_risk_s": 180.0}
    return BoundsPolicy(SavePolicyConfig(**(defaults | settings)))


def writing(write_s: float, **fields: Any) -> Any:
    return save_facts(saves=(save_times(write_s=write_s),), **fields)


def test_a_save_begins_early_enough_to_be_durable_before_too_much_is_at_risk() -> None:
    opinion = bounds().opinion(writing(20.0, now_s=170.0))
    assert opinion.due_at_s == pytest.approx(160.0)
    assert opinion.why == "2.8 min of work at risk, policy.max_at_risk_s is 180"
    assert opinion.is_pressing is False


def test_the_steps_until_an_order_lands_are_counted() -> None:
    assert bounds().opinion(writing(20.0, step_s=5.0)).due_at_s == pytest.approx(180.0 - 20.0 - 3 * 5.0)


def test_a_save_that_was_never_measured_takes_as_long_as_the_settings_say() -> None:
    policy = bounds(deadline=DeadlineConfig(first_save_s=40.0))
    assert policy.opinion(save_facts()).due_at_s == pytest.approx(140.0)


def test_where_memory_keeps_the_newest_step_only_the_longest_interval_speaks() -> None:
    fresh = writing(20.0, now_s=1000.0, newest_step=500, nearest_step=500, nearest_at_s=1000.0)
    opinion = bounds().opinion(fresh)
    assert opinion.due_at_s == pytest.approx(3600.0)
    assert "policy.max_interval_s is 3600" in opinion.why
    behind = writing(20.0, now_s=1000.0, newest_step=500, nearest_step=499, nearest_at_s=999.0)
    assert bounds().opinion(behind).due_at_s == pytest.approx(999.0 + 160.0)


def test_a_stand_still_puts_nothing_at_risk() -> None:
    compiling = writing(20.0, now_s=900.0, newest_step=0)
    assert bounds().opinion(compiling).due_at_s == pytest.approx(3600.0)


def test_the_longest_interval_counts_from_the_last_save_whatever_became_of_it() -> None:
    opinion = bounds(max_at_risk_s=None).opinion(writing(20.0, last_save_at_s=500.0, durable_at_s=100.0))
    assert opinion.due_at_s == pytest.approx(4100.0)


def test_a_save_under_way_covers_what_came_before_it() -> None:
    under_way = writing(20.0, last_save_at_s=160.0, unsettled=1, now_s=165.0)
    assert bounds().opinion(under_way).due_at_s == pytest.approx(160.0 + 160.0)
    failed = writing(20.0, last_save_at_s=160.0, unsettled=0, now_s=165.0)
    assert bounds().opinion(failed).due_at_s == pytest.approx(160.0 + 20.0)


def test_saves_do_not_come_more_often_than_they_can_be_written_and_the_limit_is_said_to_fail() -> None:
    opinion = bounds().opinion(writing(100.0))
    assert opinion.due_at_s == pytest.approx(100.0)
    assert "cannot be held: saves take 100 s to write and come each 100 s, so that up to 3.3 min" in opinion.why
    hopeless = bounds().opinion(writing(400.0))
    assert hopeless.due_at_s == pytest.approx(400.0)
    assert "up to 13 min are at risk" in hopeless.why


def test_one_slow_save_makes_the_next_begin_at_once_and_two_keep_them_apart() -> None:
    slow, quick = save_times(write_s=600.0), save_times(write_s=5.0)
    policy = bounds(min_interval_s=30.0)
    once = policy.opinion(save_facts(saves=(quick, quick, slow), last_save_at_s=1000.0, nearest_at_s=1000.0))
    assert once.due_at_s == pytest.approx(1030.0)
    after = policy.opinion(save_facts(saves=(slow, quick, quick), last_save_at_s=1000.0, nearest_at_s=1000.0))
    assert after.due_at_s == pytest.approx(1030.0)
    twice = policy.opinion(save_facts(saves=(quick, slow, slow), last_save_at_s=1000.0, nearest_at_s=1000.0))
    assert twice.due_at_s == pytest.approx(1600.0)


def test_a_write_of_half_the_limit_can_just_be_held() -> None:
    opinion = bounds().opinion(writing(90.0))
    assert opinion.due_at_s == pytest.approx(90.0)
    assert "cannot be held" not in opinion.why


def test_a_minimum_interval_that_breaks_the_limit_is_named() -> None:
    opinion = bounds(min_interval_s=30.0, max_at_risk_s=20.0).opinion(writing(1.0))
    assert opinion.due_at_s == pytest.approx(30.0)
    assert "cannot be held: policy.min_interval_s is 30, so that up to 31 s are at risk" in opinion.why


def test_a_longest_interval_below_what_a_save_takes_is_said_to_fail() -> None:
    opinion = bounds(max_interval_s=60.0, max_at_risk_s=None).opinion(writing(90.0))
    assert opinion.due_at_s == pytest.approx(90.0)
    assert "cannot be held: a save takes 90 s" in opinion.why


@pytest.mark.parametrize("write_s", [0.0, 1.0, 30.0, 60.0, 90.0])
def test_over_a_long_run_no_more_than_the_limit_is_ever_at_risk(write_s: float) -> None:
    policy, step_s = bounds(), 1.0
    now_s = nearest_at_s = last_save_at_s = worst_s = 0.0
    under_way: list[float] = []
    pending: float | None = None
    for step in range(1, 2000):
        now_s = step * step_s
        if under_way and under_way[0] + write_s <= now_s:
            nearest_at_s = under_way.pop(0)
        worst_s = max(worst_s, now_s - nearest_at_s)
        if pending is not None and pending <= now_s:
            last_save_at_s, pending = now_s, None
            under_way.append(now_s)
        facts = writing(
            write_s,
            now_s=now_s,
            newest_step=step,
            step_s=step_s,
            last_save_at_s=last_save_at_s,
            nearest_step=int(nearest_at_s),
            nearest_at_s=nearest_at_s,
            unsettled=len(under_way),
        )
        due_at_s = policy.opinion(facts).due_at_s
        assert due_at_s is not None
        if due_at_s <= now_s and pending is None and len(under_way) < 2:
            pending = now_s + 2 * step_s
    # Where a write takes half of the limit, what comes to it is the time an Order takes to land.
    assert worst_s <= 180.0 + (3 * step_s if write_s == 90.0 else 0.0)
    assert worst_s > 170.0

"""Which step carries out which Order."""

from __future__ import annotations

import pytest

from storage.keys import Attempt
from workers.contract import BoundOrder, Order, OrderKind
from workers.order_plan import OrderBinder, OrderPlan, standing_orders

ATTEMPT = Attempt(number=1, nonce="00000000")


def order(number: int, kind: OrderKind = OrderKind.SNAPSHOT, not_before_step: int = 0) -> Order:
    return Order(attempt=ATTEMPT, number=number, kind=kind, not_before_step=not_before_step, reason="test")


def bound(number: int, kind: OrderKind, step: int) -> BoundOrder:
    return BoundOrder(number=number, kind=kind, step=step)


def binder(total_steps: int = 100, every_steps: int | None = None) -> OrderBinder:
    return OrderBinder(total_steps=total_steps, every_steps=every_steps)


def test_an_order_is_bound_once_and_two_steps_ahead() -> None:
    binding = binder()
    assert binding.bind(10, order(1)).bound == bound(1, OrderKind.SNAPSHOT, 12)
    assert binding.bind(11, order(1)).bound is None
    assert binding.bind(12, order(2)).bound == bound(2, OrderKind.SNAPSHOT, 14)


def test_an_order_for_later_waits_and_a_newer_one_takes_its_place() -> None:
    binding = binder()
    late = order(1, not_before_step=20)
    assert binding.bind(10, late).bound is None
    assert binding.bind(17, late).bound is None
    assert binding.bind(17, order(2, OrderKind.LEAVE)).bound == bound(2, OrderKind.LEAVE, 19)
    assert binding.bind(18, late).bound is None


def test_an_order_for_later_is_bound_to_exactly_its_step() -> None:
    assert binder().bind(18, order(1, not_before_step=20)).bound == bound(1, OrderKind.SNAPSHOT, 20)


def test_a_leave_beats_the_cadence_and_nothing_follows_it() -> None:
    binding = binder(every_steps=5)
    assert binding.bind(8, order(1, OrderKind.LEAVE)).bound == bound(1, OrderKind.LEAVE, 10)
    assert binding.bind(13, order(2)).bound is None


def test_nothing_follows_an_order_to_part() -> None:
    binding = binder(every_steps=5)
    assert binding.bind(8, order(1, OrderKind.PART)).bound == bound(1, OrderKind.PART, 10)
    assert binding.bind(9, order(2, OrderKind.LEAVE)).bound is None
    assert binding.bind(13, None).bound is None


@pytest.mark.parametrize("kind", [OrderKind.PART, OrderKind.LEAVE])
def test_an_order_to_end_that_falls_on_the_last_step_is_the_last_save(kind: OrderKind) -> None:
    binding = binder(total_steps=20)
    assert binding.bind(18, order(1, kind)).bound == bound(1, OrderKind.SNAPSHOT, 20)
    assert binding.bind(19, order(2, kind)).bound is None


def test_a_bounded_save_that_falls_on_the_last_step_stays_bounded_on_every_rank() -> None:
    """It was ordered because nothing larger is committed before the node is gone."""
    binding, last = binder(total_steps=20), bound(1, OrderKind.LEAVE_BOUNDED, 20)
    assert binding.bind(18, order(1, OrderKind.LEAVE_BOUNDED)).bound == last
    plan = OrderPlan(total_steps=20)
    plan.learn(last)
    assert plan.due(20) == last


def test_the_cadence_falls_on_its_multiples_and_an_order_there_is_the_same_save() -> None:
    binding = binder(every_steps=5)
    assert [binding.bind(step, None).bound for step in (6, 7)] == [None, None]
    assert binding.bind(8, None).bound == bound(0, OrderKind.SNAPSHOT, 10)
    assert binding.bind(13, order(1)).bound == bound(1, OrderKind.SNAPSHOT, 15)


def test_saves_of_the_cadence_never_pile_up() -> None:
    binding = binder(every_steps=1)
    assert [binding.bind(step, None).bound is not None for step in (1, 2)] == [True, True]
    passed_over = binding.bind(3, None)
    assert (passed_over.bound, passed_over.skipped_step) == (None, 5)
    binding.settle([3])
    assert binding.bind(4, None).bound == bound(0, OrderKind.SNAPSHOT, 6)


def test_saves_that_never_end_keep_others_away_but_not_each_of_them() -> None:
    now_s = 0.0
    binding = OrderBinder(total_steps=400, every_steps=1, monotonic=lambda: now_s)
    bound_steps = []
    for step in range(1, 201):
        now_s = step / 2
        if binding.bind(step, None).bound is not None:
            bound_steps.append(step + 2)
    assert bound_steps == [3, 4, 124]
    now_s += 60.0
    assert [binding.bind(step, None).bound is not None for step in (201, 202)] == [True, False]
    binding.settle([*bound_steps, 203])
    assert [binding.bind(step, None).bound is not None for step in (203, 204, 205)] == [True, True, False]


def test_a_save_that_falls_due_seldom_is_passed_over_three_times_at_least() -> None:
    now_s = 0.0
    binding = OrderBinder(total_steps=400, every_steps=10, monotonic=lambda: now_s)
    due = [10, 20, 30, 40, 50, 60]
    bound_steps = []
    for step in due:
        now_s = step * 10.0
        if binding.bind(step - 2, None).bound is not None:
            bound_steps.append(step)
    assert bound_steps == [10, 20, 60]


def test_the_last_step_is_bound_even_when_saves_pile_up_and_nothing_after_it() -> None:
    binding = binder(total_steps=6, every_steps=1)
    for step in (1, 2, 3):
        binding.bind(step, None)
    assert binding.bind(4, None).bound == bound(0, OrderKind.SNAPSHOT, 6)
    assert binding.bind(5, order(1, OrderKind.LEAVE)).bound is None


@pytest.mark.parametrize(
    ("base_step", "total_steps", "every_steps", "steps"),
    [
        (0, 100, None, []),
        (0, 100, 1, [1, 2]),
        (0, 100, 2, [2]),
        (9, 100, 5, [10]),
        (10, 100, 5, []),
        (0, 1, None, [1]),
        (98, 100, None, [100]),
        (99, 100, 7, [100]),
        (100, 100, 1, []),
    ],
)
def test_the_first_steps_and_a_near_end_follow_a_rule_that_needs_no_word(
    base_step: int, total_steps: int, every_steps: int | None, steps: list[int]
) -> None:
    standing = standing_orders(base_step=base_step, total_steps=total_steps, every_steps=every_steps)
    assert [one.step for one in standing] == steps
    assert all(one.kind is OrderKind.SNAPSHOT for one in standing)


def test_standing_saves_count_as_under_way() -> None:
    standing = standing_orders(base_step=0, total_steps=100, every_steps=1)
    binding = OrderBinder(total_steps=100, every_steps=1, standing=standing)
    assert binding.bind(1, None).skipped_step == 3


def test_every_rank_carries_out_what_it_learned_once() -> None:
    plan = OrderPlan(total_steps=20)
    plan.learn(bound(4, OrderKind.SNAPSHOT, 9))
    plan.learn(bound(0, OrderKind.NONE, 0))
    assert [plan.due(step) for step in (8, 9, 9)] == [None, bound(4, OrderKind.SNAPSHOT, 9), None]


def test_the_last_step_saves_without_a_word_and_never_leaves() -> None:
    plan = OrderPlan(total_steps=20)
    assert plan.due(20) == bound(0, OrderKind.SNAPSHOT, 20)
    plan.learn(bound(7, OrderKind.LEAVE, 20))
    assert plan.due(20) == bound(7, OrderKind.SNAPSHOT, 20)
    plan.learn(bound(8, OrderKind.PART, 20))
    assert plan.due(20) == bound(8, OrderKind.SNAPSHOT, 20)

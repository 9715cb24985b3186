"""The save desk on numbers: no clock, no cluster; policies that a test states are the only doubles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from orchestrator.save_config import SavePolicyConfig
from orchestrator.save_desk import SaveDesk, ThresholdMove
from orchestrator.save_facts import Opinion, SaveFacts, SaveTimes
from orchestrator.save_policies import policies_of
from orchestrator.save_times import SaveCost
from storage.config import CheckpointConfig
from workers.contract import BoundOrder, EvalReport, OrderKind, StepReport


class Says:
    """Asks for a save from ``due_at_s`` on."""

    def __init__(self, name: str, due_at_s: float | None, *, is_pressing: bool = False) -> None:
        self.name = name
        self.due_at_s = due_at_s
        self.is_pressing = is_pressing

    def opinion(self, facts: SaveFacts) -> Opinion:  # noqa: ARG002 - the Protocol has it
        return Opinion(policy=self.name, due_at_s=self.due_at_s, why="says so", is_pressing=self.is_pressing)


class Dearer:
    """Moves the threshold by 0.02 with each save."""

    def offset(self, saves: Sequence[SaveTimes]) -> float:
        return 0.02 * len(saves)

    def explain(self, saves: Sequence[SaveTimes]) -> str:
        return f"{len(saves)} saves"


def desk(*policies: Says, total_steps: int = 10_000, min_interval_s: float = 30.0) -> SaveDesk:
    settings = SavePolicyConfig(min_interval_s=min_interval_s)
    made = SaveDesk(settings, CheckpointConfig(), total_steps=total_steps, policies=policies, threshold=Dearer())
    made.begin_attempt(0, 0.0)
    return made


def report(step: int, *, step_s: float = 1.0, safe_step: int = -1) -> StepReport:
    return StepReport(
        step=step,
        loss=1.0,
        grad_norm=1.0,
        lr=0.1,
        tokens=step,
        position=step,
        sample_chain="0" * 32,
        step_s=step_s,
        finished_at_s=1e9 + step,
        safe_step=safe_step,
    )


def order(step: int, number: int = 1) -> BoundOrder:
    return BoundOrder(number=number, kind=OrderKind.SNAPSHOT, step=step)


COST = SaveCost(stall_s=0.1, encode_s=0.2, upload_s=0.3, commit_s=0.4, stored_bytes=50, raw_bytes=100)


def test_a_wish_carries_the_policy_s_figures_and_is_not_repeated_until_it_is_bound() -> None:
    one = desk(Says("instability", 0.0))
    assert one.consult(100.0) is None, "nothing was trained yet"
    one.take_steps([report(1)], 100.0)
    assert one.consult(129.9 - 1) is None, "the minimum interval counts from the beginning of the first step"
    assert one.weighed is not None
    assert one.weighed.held_back == "the last save is 30 s old, policy.min_interval_s is 30"
    wish = one.consult(129.0)
    assert wish is not None
    assert (wish.policy, wish.reason) == ("instability", "instability: says so")
    assert one.consult(500.0) is None
    one.bound(order(4), 130.0)
    assert one.facts(130.0).last_instability_step == 4
    assert one.consult(159.9) is None
    assert one.consult(160.0) is not None


def test_a_pressing_policy_waits_for_no_minimum_interval_but_saves_never_pile_up() -> None:
    one = desk(Says("memory-pressure", 0.0, is_pressing=True))
    one.take_steps([report(1)], 1.0)
    for number, step in enumerate((3, 4), start=1):
        assert one.consult(1.0) is not None
        one.bound(order(step, number), 1.0)
    assert one.consult(50.0) is None
    assert one.weighed is not None
    assert one.weighed.held_back == "2 saves are still under way, the newest for 49 s"
    one.gave_up(3)
    assert one.consult(500.0) is not None


def test_saves_that_fail_in_a_row_are_tried_after_twice_the_time_up_to_a_cap_until_one_succeeds() -> None:
    one = desk(Says("hazard", 0.0, is_pressing=True))
    one.take_steps([report(1)], 1.0)
    now_s, waits = 100.0, []
    for step in range(3, 9):
        assert one.consult(now_s) is not None
        one.bound(order(step, step), now_s)
        waits.append(one.gave_up(step, failed_at_s=now_s + 10.0))
        now_s += 10.0 + (waits[-1] or 0.0)
        assert one.consult(now_s - 0.1) is None
    assert waits == [20.0, 50.0, 110.0, 230.0, 290.0, 290.0], "counted from when the last one was ordered"
    assert one.weighed is not None
    assert one.weighed.held_back == "6 saves in a row failed, the next one is tried in 100 ms"
    assert one.consult(now_s) is not None
    one.bound(order(9, 9), now_s)
    one.committed(9, COST, now_s + 1.0)
    assert one.consult(now_s + 31.0) is not None
    one.bound(order(10, 10), now_s + 31.0)
    assert one.gave_up(10, failed_at_s=now_s + 32.0) == 29.0, "the row began anew"


def test_a_save_that_a_newer_one_takes_the_place_of_and_another_world_hold_nothing_back() -> None:
    one = desk(Says("hazard", 0.0, is_pressing=True))
    one.take_steps([report(1)], 1.0)
    assert one.gave_up(1) is None
    assert one.consult(1.0) is not None
    one.gave_up(3, failed_at_s=2.0)
    one.begin_attempt(1, 3.0)
    one.take_steps([report(2)], 4.0)
    assert one.consult(4.0) is not None


def test_where_rank_0_keeps_a_cadence_nobody_says_when_the_next_try_is() -> None:
    one = SaveDesk(SavePolicyConfig(), CheckpointConfig(every_steps=10), total_steps=100)
    one.begin_attempt(0, 0.0)
    assert one.gave_up(10, failed_at_s=10.0) is None


def test_nothing_is_ordered_where_the_last_step_saves_anyway() -> None:
    one = desk(Says("hazard", 0.0), total_steps=10)
    one.take_steps([report(7)], 100.0)
    assert one.consult(500.0) is not None
    other = desk(Says("hazard", 0.0), total_steps=10)
    other.take_steps([report(8)], 100.0)
    assert other.consult(500.0) is None


def test_the_nearest_step_is_the_newer_of_memory_and_store_with_the_time_it_was_finished() -> None:
    one = desk()
    one.take_steps([report(step) for step in range(1, 11)], 10.0)
    one.take_steps([report(11, safe_step=9)], 11.0)
    facts = one.facts(11.0)
    assert (facts.nearest_step, facts.nearest_at_s, facts.durable_step) == (9, 9.0, 0)
    one.bound(order(10), 8.0)
    one.committed(10, COST, 12.0)
    facts = one.facts(12.0)
    assert (facts.nearest_step, facts.nearest_at_s) == (10, 10.0)
    assert (facts.durable_step, facts.durable_at_s) == (10, 10.0)


def test_a_clock_of_rank_0_that_jumps_moves_no_step_out_of_its_order() -> None:
    one = desk()
    one.take_steps([report(1)], 100.0)
    one.take_steps([report(2), replace(report(3), finished_at_s=1e9 + 5000.0)], 102.0)
    one.take_steps([replace(report(4), safe_step=2)], 103.0)
    assert one.facts(103.0).nearest_at_s == 100.0
    one.take_steps([replace(report(5), safe_step=3, finished_at_s=1e9)], 104.0)
    assert one.facts(104.0).nearest_at_s == 102.0
    one.take_steps([report(6), replace(report(7), finished_at_s=1e9 - 5000.0)], 105.0)
    one.take_steps([replace(report(8), safe_step=6)], 106.0)
    assert one.facts(106.0).nearest_at_s == 105.0


def test_a_first_step_that_compiles_for_minutes_says_nothing_of_the_pace() -> None:
    one = SaveDesk(SavePolicyConfig(), CheckpointConfig(), total_steps=10_000)
    one.begin_attempt(0, 0.0)
    one.take_steps([report(1, step_s=100.0)], 100.0)
    assert one.facts(100.0).step_s is None
    assert one.consult(100.0) is None, "100 s are at risk, of 180"
    one.take_steps([report(2)], 101.0)
    assert one.facts(101.0).step_s == 1.0
    one.begin_attempt(2, 200.0)
    one.take_steps([report(3, step_s=50.0)], 250.0)
    assert one.facts(250.0).step_s == 1.0, "the last World's, until this one has a pace of its own"
    one.take_steps([report(4, step_s=2.0)], 252.0)
    assert one.facts(252.0).step_s == 2.0


def test_a_save_s_times_are_whole_and_what_it_slowed_the_steps_beside_it() -> None:
    one = desk()
    one.take_steps([report(step, step_s=1.0) for step in range(1, 5)], 4.0)
    one.bound(order(5), 4.0)
    one.take_steps([report(5, step_s=7.0)], 5.0)
    for step in range(6, 10):
        one.take_steps([report(step, step_s=1.5)], float(step))
    one.take_steps([report(8, step_s=1.5), report(9, step_s=1.5)], 9.2)  # heard of before: the answer was lost
    times = one.committed(5, COST, 9.5)
    assert times == SaveTimes(
        step=5,
        stall_s=0.1,
        encode_s=0.2,
        upload_s=0.3,
        commit_s=0.4,
        write_s=4.5,
        stored_bytes=50,
        raw_bytes=100,
        slowdown_s=2.0,
    )
    assert one.facts(9.5).saves == (times,)
    one.bound(order(10, 2), 10.0)
    one.delayed()
    assert one.committed(10, COST, 900.0).slowdown_s is None
    assert one.facts(900.0).saves == (times,), "how long a store was away says nothing of the next save"


def test_an_attempt_forgets_what_lies_beyond_its_base_step_and_keeps_the_rest() -> None:
    one = desk()
    one.take_steps([report(step) for step in range(1, 21)], 20.0)
    one.take_evaluation(EvalReport(step=5, loss=2.0, best=2.0, best_step=5))
    one.take_evaluation(EvalReport(step=15, loss=1.0, best=1.0, best_step=15))
    one.bound(order(10), 9.0)
    one.committed(10, COST, 20.0)
    one.bound(order(20, 2), 19.0)
    before = one.facts(20.0)
    assert (before.best_step, before.saved_best_step, before.unsettled) == (15, 15, 1)
    one.begin_attempt(10, 100.0)
    after = one.facts(100.0)
    assert (after.newest_step, after.durable_step, after.durable_at_s) == (10, 10, 100.0)
    assert (after.best_step, after.saved_best_step, after.unsettled) == (5, 5, 0)
    assert after.saves == before.saves
    one.begin_attempt(14, 200.0)
    assert one.facts(200.0).durable_step == 10, "it goes on from memory: no newer Commit came of it"


def test_a_new_driver_that_goes_on_from_memory_knows_that_its_base_is_not_durable() -> None:
    settings = SavePolicyConfig()
    one = SaveDesk(settings, CheckpointConfig(), total_steps=10_000)
    one.begin_attempt(60, 0.0, durable_step=40)
    assert (one.facts(0.0).durable_step, one.facts(0.0).nearest_step) == (40, 60)
    one.take_steps([report(61)], 1.0)
    assert one.consult(29.0) is None
    wish = one.consult(30.0)
    assert wish is not None, "what memory carried over does not wait for a whole interval"
    assert wish.reason.startswith("hazard: no commit since step 40, ")
    one.begin_attempt(61, 100.0, durable_step=40)
    assert one.facts(100.0).durable_step == 40
    other = SaveDesk(settings, CheckpointConfig(), total_steps=10_000)
    other.begin_attempt(60, 0.0)
    assert other.facts(0.0).durable_step == 60


def test_every_wish_is_told_and_else_one_weighing_in_ten_steps_and_moves_of_the_threshold() -> None:
    one = desk(Says("instability", None))
    for step in range(1, 31):
        one.take_steps([report(step)], float(step))
        one.consult(float(step))
    assert [getattr(news, "step", None) for news in one.take_news()] == [10, 20, 30]
    one.committed(30, COST, 31.0)
    (move,) = one.take_news()
    assert move == ThresholdMove(step=30, old=0.0, new=0.02, why="1 saves")


def test_thousands_of_steps_and_saves_keep_little() -> None:
    one = desk(Says("hazard", 0.0))
    for step in range(1, 5001):
        one.take_steps([report(step)], float(step))
        one.take_evaluation(EvalReport(step=step, loss=-step, best=-step, best_step=step))
        if one.consult(float(step)) is not None:
            one.bound(order(step + 2, step), float(step))
        if step % 40 == 0:
            for under_way in tuple(one._under_way):
                one.committed(under_way, COST, float(step))
    sizes = [len(value) for value in vars(one).values() if hasattr(value, "__len__")]
    assert max(sizes) <= 64
    assert len(one._finished._steps) == 1000


@pytest.mark.parametrize(
    ("checkpoint", "named", "expected"),
    [
        ({"every_steps": 10}, None, []),
        ({"every_s": 60.0}, ("best-metric",), ["cadence", "best-metric"]),
        ({}, ("best-metric",), ["best-metric", "bounds"]),
        ({}, ("instability", "hazard"), ["instability", "hazard", "bounds"]),
        ({}, None, ["hazard", "memory-pressure", "bounds"]),
    ],
)
def test_a_fixed_cadence_takes_the_place_of_all_that_is_not_named(
    checkpoint: dict[str, float], named: tuple[str, ...] | None, expected: list[str]
) -> None:
    speaking = policies_of(
        SavePolicyConfig.model_validate({"policies": named}), CheckpointConfig.model_validate(checkpoint)
    )
    assert [policy.name for policy in speaking] == expected


def test_a_cadence_denser_than_the_minimum_interval_is_kept_all_the_same() -> None:
    one = SaveDesk(SavePolicyConfig(min_interval_s=30.0), CheckpointConfig(every_s=5.0), total_steps=100)
    one.begin_attempt(0, 0.0)
    one.take_steps([report(1)], 1.0)
    assert one.consult(4.9) is None
    wish = one.consult(5.0)
    assert wish is not None
    assert wish.reason == "cadence: 5 s since the last save, checkpoint.every_s is 5"


def pressed(step: int) -> StepReport:
    return replace(report(step), ranks_pressed=1, pressed_share=0.99)


def test_memory_that_runs_full_is_reported_to_its_policy() -> None:
    one = SaveDesk(SavePolicyConfig(), CheckpointConfig(), total_steps=1000)
    one.begin_attempt(0, 0.0)
    one.take_steps([report(step) for step in range(1, 10)], 9.0)
    one.bound(order(9), 9.0)
    one.committed(9, COST, 9.5)
    assert one.consult(9.5) is None
    one.take_steps([pressed(10)], 10.0)
    wish = one.consult(10.0)
    assert wish is not None, "policy.min_interval_s does not hold it back"
    assert wish.policy == "memory-pressure"
    assert wish.reason.startswith("memory-pressure: ")

"""The hazard policy on a fake clock: exact intervals, their limits, and what it says."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.hazard_policy import HazardPolicy, save_interval
from orchestrator.save_config import HazardConfig, SavePolicyConfig
from orchestrator.save_facts import SaveFacts
from tests.fakes.save_facts import cluster, save_facts, save_times

HOUR_S = 3600.0
WIDE: dict[str, Any] = {"min_interval_s": 0.0, "max_interval_s": 1e9}


def policy(mtbf_s: float = HOUR_S, **settings: Any) -> SavePolicyConfig:
    """Whose estimate is ``mtbf_s`` for one node without exposure and any number of faults of the least weight."""
    hazard = HazardConfig(prior_node_mtbf_s=mtbf_s, prior_weight=1e9, first_interval_s=settings.pop("first", None))
    return SavePolicyConfig(hazard=hazard, **(WIDE | settings))


def seen(cost_s: float = 30.0, **fields: Any) -> SaveFacts:
    """One fault, and one save that cost ``cost_s``."""
    facts: dict[str, Any] = {"cluster": cluster(faults=1), "saves": (save_times(stall_s=cost_s),)}
    return save_facts(**(facts | fields))


def test_a_cost_of_30_s_and_an_mtbf_of_an_hour_give_464_8_s() -> None:
    assert save_interval(seen(30.0), policy(HOUR_S)).seconds == pytest.approx(464.758, abs=0.001)


def test_the_slowdown_is_part_of_the_cost() -> None:
    facts = seen(saves=(save_times(stall_s=10.0, slowdown_s=20.0),))
    assert save_interval(facts, policy(HOUR_S)).seconds == pytest.approx(464.758, abs=0.001)


def test_an_mtbf_learned_from_faults_alone_gives_the_same() -> None:
    learned = SavePolicyConfig(hazard=HazardConfig(prior_weight=1e-9), **WIDE)
    facts = seen(30.0, cluster=cluster(num_nodes=4, faults=10, exposure_node_s=4 * 10 * HOUR_S))
    assert save_interval(facts, learned).seconds == pytest.approx(464.758, abs=0.001)


def test_faults_that_memory_survives_do_not_make_saves_come_more_often() -> None:
    learned = SavePolicyConfig(hazard=HazardConfig(prior_weight=1e-9), **WIDE)
    facts = seen(30.0, cluster=cluster(num_nodes=4, faults=50, survived=40, exposure_node_s=4 * 10 * HOUR_S))
    assert save_interval(facts, learned).seconds == pytest.approx(464.758, abs=0.001)


def test_an_mtbf_of_60_s_and_a_cost_of_30_s_give_60_s() -> None:
    assert save_interval(seen(30.0), policy(60.0)).seconds == pytest.approx(60.0)


def test_the_interval_is_never_below_the_cost_nor_below_what_a_save_takes_to_write() -> None:
    assert save_interval(seen(30.0), policy(1.0)).seconds == pytest.approx(30.0)
    slow = save_interval(seen(saves=(save_times(stall_s=1.0, write_s=600.0),)), policy(HOUR_S))
    assert slow.seconds == pytest.approx(600.0)
    assert "a save takes 10 min to write" in slow.why


def test_the_interval_is_clamped_to_its_limits_and_says_so() -> None:
    low = save_interval(seen(0.1), policy(HOUR_S, min_interval_s=50.0))
    high = save_interval(seen(30.0), policy(1e8, max_interval_s=3000.0))
    assert (low.seconds, high.seconds) == (50.0, 3000.0)
    assert "policy.min_interval_s 50" in low.why
    assert "policy.max_interval_s 3000" in high.why


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"cluster": cluster(faults=0)}, "no failure seen yet"),
        ({"cluster": cluster(faults=9, survived=9)}, "memory survived every failure yet"),
        ({"saves": ()}, "no save measured yet"),
        ({"saves": (save_times(stall_s=0.0),)}, "saves cost nothing"),
    ],
)
def test_without_a_failure_or_a_cost_the_first_interval_holds(fields: dict[str, Any], reason: str) -> None:
    interval = save_interval(seen(**fields), policy(HOUR_S))
    assert interval.seconds == 12 * 60.0
    assert reason in interval.why


@pytest.mark.parametrize("saves", [(), (save_times(stall_s=0.0),)])
def test_a_world_that_breaks_often_does_not_wait_for_the_first_interval(saves: tuple[Any, ...]) -> None:
    interval = save_interval(seen(saves=saves), policy(600.0))
    assert interval.seconds == pytest.approx(300.0)
    assert interval.why.endswith(": half of the MTBF, 10 min")
    healthy = save_interval(seen(saves=saves, cluster=cluster(faults=0)), policy(600.0))
    assert healthy.seconds == 12 * 60.0


def test_the_first_interval_is_longer_for_large_states_and_can_be_set() -> None:
    large = save_facts(cluster=cluster(state_bytes=100_000_000_001))
    edge = save_facts(cluster=cluster(state_bytes=100_000_000_000))
    assert save_interval(large, policy()).seconds == 45 * 60.0
    measured = save_facts(saves=(save_times(raw_bytes=100_000_000_001),))
    assert save_interval(measured, policy()).seconds == 45 * 60.0
    assert save_interval(edge, policy()).seconds == 12 * 60.0
    assert save_interval(large, policy(first=100.0)).seconds == 100.0
    assert save_interval(large, policy(first=100.0, max_interval_s=80.0)).seconds == 80.0


def test_a_bathtub_speaks_before_anything_broke_where_ages_are_known() -> None:
    settings = SavePolicyConfig(hazard=HazardConfig(model="bathtub", prior_node_mtbf_s=1e12), **WIDE)
    saves = (save_times(stall_s=30.0),)
    new = save_facts(saves=saves, cluster=cluster(node_ages_s=(0.0,)))
    unknown = save_facts(saves=saves, cluster=cluster())
    assert save_interval(new, settings).seconds == pytest.approx(math.sqrt(2 * 30 * 8000))
    assert save_interval(unknown, settings).seconds == 12 * 60.0


def test_why_tells_the_figures() -> None:
    facts = seen(3.1, now_s=12 * 60.0, durable_step=5)
    assert HazardPolicy(policy(41 * 60.0)).opinion(facts).why == "12 min since commit, MTBF 41 min, cost 3.1 s"


@pytest.mark.parametrize(
    ("durable", "words"),
    [
        ({"durable_step": 0, "durable_at_s": 0.0}, "12 min without a commit"),
        ({"durable_step": 0, "durable_at_s": -math.inf}, "no commit yet"),
        ({"durable_step": 4, "durable_at_s": -math.inf}, "no commit since step 4"),
    ],
)
def test_why_speaks_of_no_commit_that_is_not_there(durable: dict[str, Any], words: str) -> None:
    opinion = HazardPolicy(policy()).opinion(seen(now_s=12 * 60.0, **durable))
    assert opinion.why.startswith(f"{words}, MTBF ")
    assert opinion.due_at_s is not None
    assert math.isfinite(opinion.due_at_s)


def test_due_is_one_interval_after_the_beginning_of_the_attempt_or_the_last_save() -> None:
    hazard = HazardPolicy(policy(60.0))
    began = seen(last_save_at_s=1000.0, durable_at_s=1000.0)
    assert hazard.opinion(began).due_at_s == pytest.approx(1060.0)
    under_way = seen(last_save_at_s=1050.0, durable_at_s=1000.0, unsettled=1)
    assert hazard.opinion(under_way).due_at_s == pytest.approx(1110.0)
    assert hazard.opinion(under_way).is_pressing is False


def test_a_save_that_came_to_nothing_is_made_good_without_waiting_for_another_interval() -> None:
    hazard = HazardPolicy(policy(HOUR_S))
    failed = seen(last_save_at_s=464.0, durable_at_s=0.0)
    assert hazard.opinion(failed).due_at_s == pytest.approx(464.0 + 30.0)  # the cost is the least between two


def test_work_that_only_memory_carried_into_this_attempt_does_not_wait_a_whole_interval_again() -> None:
    hazard = HazardPolicy(policy(HOUR_S))
    carried = seen(last_save_at_s=300.0, durable_at_s=0.0)
    assert hazard.opinion(carried).due_at_s == pytest.approx(464.758, abs=0.001)


def test_every_attempt_that_lives_longer_than_interval_and_cost_has_a_commit() -> None:
    """Failures every 95 s, saves that cost 30 s: 60 s of training, a save, and something is kept."""
    settings, cost_s, life_s = policy(60.0), 30.0, 95.0
    for _attempt in range(5):
        commits, last_save_at_s, now_s = 0, 0.0, 0.0
        while now_s < life_s:
            facts = seen(cost_s, now_s=now_s, last_save_at_s=last_save_at_s, durable_at_s=last_save_at_s)
            due_at_s = HazardPolicy(settings).opinion(facts).due_at_s
            assert due_at_s is not None
            if due_at_s <= now_s:
                last_save_at_s = now_s
                now_s += cost_s
                commits += now_s <= life_s
            now_s += 1.0
        assert commits == 1


times = st.floats(min_value=0.0, max_value=1e9)


@given(
    costs=st.lists(st.tuples(times, st.none() | times, times), max_size=12),
    faults=st.integers(0, 10**6),
    exposure_node_s=st.floats(0.0, 1e15),
    num_nodes=st.integers(0, 100_000),
    ages=st.lists(st.floats(0.0, 1e12), max_size=5),
    prior=st.tuples(st.floats(1e-6, 1e12), st.floats(1e-9, 1e9)),
    bounds=st.tuples(st.floats(0.0, 1e6), st.floats(1e-3, 1e9)),
    model=st.sampled_from(["constant", "bathtub"]),
)
def test_the_interval_is_always_finite_and_within_its_bounds(
    costs: list[tuple[float, float | None, float]],
    faults: int,
    exposure_node_s: float,
    num_nodes: int,
    ages: list[float],
    prior: tuple[float, float],
    bounds: tuple[float, float],
    model: Any,
) -> None:
    low, high = min(bounds), max(bounds)
    hazard = HazardConfig(model=model, prior_node_mtbf_s=prior[0], prior_weight=prior[1])
    settings = SavePolicyConfig(hazard=hazard, min_interval_s=low, max_interval_s=high)
    saves = tuple(save_times(stall_s=stall_s, slowdown_s=slow, write_s=write_s) for stall_s, slow, write_s in costs)
    seen_of = cluster(num_nodes=num_nodes, faults=faults, exposure_node_s=exposure_node_s, node_ages_s=tuple(ages))
    interval = save_interval(save_facts(cluster=seen_of, saves=saves), settings)
    assert math.isfinite(interval.seconds)
    assert low <= interval.floor_s <= interval.seconds <= max(high, interval.floor_s)
    opinion = HazardPolicy(settings).opinion(save_facts(cluster=seen_of, saves=saves))
    assert opinion.due_at_s is not None
    assert math.isfinite(opinion.due_at_s)

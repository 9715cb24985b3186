"""Estimates of hazard and cost: exact answers on numbers."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from orchestrator.hazard import (
    bathtub_rate,
    node_rate,
    predicted_write_s,
    save_cost_s,
    time_in_words,
    usual_write_s,
    world_mtbf_s,
)
from orchestrator.save_config import BathtubConfig, HazardConfig
from tests.fakes.save_facts import cluster, save_times

PRIOR = HazardConfig(prior_node_mtbf_s=100_000.0, prior_weight=0.5)
BATHTUB = BathtubConfig(share=0.45, early_s=3600.0, late_s=2880.0, limit_s=86_400.0)
HOUR_S = 3600.0


@pytest.mark.parametrize(
    ("faults", "exposure_node_s", "node_mtbf_s"),
    [
        (0, 0.0, 100_000.0),  # the prior alone
        (0, 50_000.0, 200_000.0),  # (0.5 * 100 000 + 50 000) / 0.5
        (1, 50_000.0, 100_000.0 / 1.5),
        (10, 50_000.0, 100_000.0 / 10.5),
    ],
)
def test_the_rate_moves_from_the_prior_to_what_was_seen(
    faults: int, exposure_node_s: float, node_mtbf_s: float
) -> None:
    seen = cluster(faults=faults, exposure_node_s=exposure_node_s)
    assert 1.0 / node_rate(seen, PRIOR) == pytest.approx(node_mtbf_s)


def test_a_long_run_is_judged_by_its_own_faults_whatever_the_prior_was() -> None:
    seen = cluster(faults=1000, exposure_node_s=1000 * 7200.0)
    assert 1.0 / node_rate(seen, PRIOR) == pytest.approx(7200.0, rel=0.01)


def test_a_world_of_many_nodes_fails_as_many_times_as_often() -> None:
    assert world_mtbf_s(cluster(num_nodes=1), PRIOR) == pytest.approx(100_000.0)
    assert world_mtbf_s(cluster(num_nodes=50), PRIOR) == pytest.approx(2000.0)


def test_preemptions_with_a_notice_do_not_count_as_failures() -> None:
    assert node_rate(cluster(preemptions=20), PRIOR) == node_rate(cluster(), PRIOR)


def test_the_bathtub_has_the_rate_of_its_formula() -> None:
    # New: f(0) = A / tau1 = 0.45 / 3600; the late phase is e^-30 away, and nothing has failed yet.
    assert bathtub_rate(0.0, BATHTUB) == pytest.approx(1.25e-4)
    # One hour: f = 0.45 e^-1 / 3600, F = 0.45 (1 - e^-1); the late phase is e^-28.75 away.
    f, survival = 0.45 * 0.36787944 / 3600, 1 - 0.45 * 0.63212056
    assert bathtub_rate(HOUR_S, BATHTUB) == pytest.approx(f / survival, rel=1e-6)
    # At the limit: f = 0.45 (e^-24 / 3600 + 1 / 2880), F = 0.45 (1 - e^-24 + 1).
    assert bathtub_rate(24 * HOUR_S, BATHTUB) == pytest.approx(0.45 / 2880 / 0.1, rel=1e-6)


def test_the_bathtub_falls_in_the_early_phase_and_rises_in_the_late_one() -> None:
    rates = [bathtub_rate(hour * HOUR_S, BATHTUB) or 0.0 for hour in range(25)]
    assert all(earlier > later for earlier, later in pairwise(rates[:10]))
    assert all(earlier < later for earlier, later in pairwise(rates[16:]))


def test_a_node_that_outlives_the_bathtub_has_the_constant_rate() -> None:
    assert bathtub_rate(24.5 * HOUR_S, BATHTUB) is None
    assert bathtub_rate(25 * HOUR_S, BATHTUB) is None
    assert bathtub_rate(1e12, BATHTUB) is None
    config = HazardConfig(model="bathtub", prior_node_mtbf_s=5000.0)
    assert world_mtbf_s(cluster(node_ages_s=(1e12,)), config) == pytest.approx(5000.0)


def test_the_worlds_hazard_is_the_sum_over_its_nodes_ages() -> None:
    config = HazardConfig(model="bathtub", bathtub=BATHTUB, prior_node_mtbf_s=1e9)
    ages = (0.0, HOUR_S)
    expected = 1.0 / sum(bathtub_rate(age, BATHTUB) or math.nan for age in ages)
    assert world_mtbf_s(cluster(num_nodes=2, node_ages_s=ages), config) == pytest.approx(expected)


def test_nodes_of_unknown_age_and_those_in_the_flat_bottom_have_the_constant_rate() -> None:
    config = HazardConfig(model="bathtub", bathtub=BATHTUB, prior_node_mtbf_s=50_000.0)
    assert world_mtbf_s(cluster(num_nodes=4, node_ages_s=(12 * HOUR_S,)), config) == pytest.approx(12_500.0)


def test_a_cost_is_the_median_stall_and_slowdown_of_recent_saves() -> None:
    assert save_cost_s(()) is None
    saves = [save_times(stall_s=stall_s, slowdown_s=slow) for stall_s, slow in ((1, 2), (2, None), (90, 4))]
    assert save_cost_s(saves) == pytest.approx(2.0 + 3.0)
    assert save_cost_s([save_times(stall_s=2.0)]) == pytest.approx(2.0)
    old = [save_times(stall_s=100.0)] * 20
    assert save_cost_s([*old, *[save_times(stall_s=1.0)] * 9]) == pytest.approx(1.0)


def test_a_write_is_usually_the_median_and_predicted_as_the_slowest_of_the_latest() -> None:
    saves = [save_times(write_s=write_s) for write_s in (500.0, 10.0, 12.0, 30.0, 11.0)]
    assert usual_write_s(saves) == pytest.approx(12.0)
    assert usual_write_s(()) is None
    assert predicted_write_s(saves, first_s=7.0) == pytest.approx(30.0)
    assert predicted_write_s((), first_s=7.0) == pytest.approx(7.0)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0, "0 s"),
        (0.0314, "31 ms"),
        (3.14, "3.1 s"),
        (30.0, "30 s"),
        (464.8, "7.7 min"),
        (2460.0, "41 min"),
        (8640.0, "2.4 h"),
        (3.3e6, "38 d"),
    ],
)
def test_times_are_told_in_units_that_people_read(seconds: float, words: str) -> None:
    assert time_in_words(seconds) == words

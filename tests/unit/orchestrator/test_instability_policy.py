"""Both instability formulas against scores reckoned by hand, and what the policy asks for on a made-up training."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.instability_policy import (
    InstabilityPolicy,
    corrected_score,
    instability_score,
    published_score,
    reachable_threshold,
)
from orchestrator.save_config import InstabilityConfig
from orchestrator.save_facts import TrainingFacts
from orchestrator.training_signals import TrainingSignals
from tests.fakes.save_facts import save_facts
from tests.fakes.step_reports import step_report

PUBLISHED = InstabilityConfig(formula="published")
CORRECTED = InstabilityConfig(formula="corrected", curvature_gain=1.0, variance_gain=1.0)
SIGMOID_1, SIGMOID_2 = 0.7310585786300049, 0.8807970779778823


def training(**fields: Any) -> TrainingFacts:
    defaults: dict[str, Any] = {
        "step": 40,
        "loss_curvature": 0.08,
        "grad_variance": 3e-6,
        "peak_variance": 6e-6,
        "curvature_scale": 0.02,
        "variance_scale": 3e-6,
    }
    return TrainingFacts(**(defaults | fields))


@pytest.mark.parametrize(
    ("curvature", "variance", "expected"),
    [
        (0.0, 0.0, 0.7 * 0.5 + 0.3 * 0.5),
        (0.03, 0.0, 0.7 * SIGMOID_1 + 0.3 * 0.5),
        (-0.03, 0.0, 0.7 * SIGMOID_1 + 0.3 * 0.5),
        (0.03, 1e-5, 0.7 * SIGMOID_1 + 0.3 * (1 - SIGMOID_1)),
        (0.06, 1e-5, 0.7 * SIGMOID_2 + 0.3 * (1 - SIGMOID_1)),
        (0.03, 1.0, 0.7 * SIGMOID_1),
        (0.0, 1.0, 0.35),
        (30.0, 0.0, 0.85),
    ],
)
def test_the_published_score(curvature: float, variance: float, expected: float) -> None:
    assert published_score(curvature, variance, PUBLISHED) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("curvature_ratio", "variance_ratio", "expected"),
    [
        (0.0, 0.0, 0.0),
        (1.0, 0.0, 0.7 * (2 * SIGMOID_1 - 1)),
        (-1.0, 0.0, 0.7 * (2 * SIGMOID_1 - 1)),
        (0.0, 1.0, 0.3 * (2 * SIGMOID_1 - 1)),
        (2.0, 1.0, 0.7 * (2 * SIGMOID_2 - 1) + 0.3 * (2 * SIGMOID_1 - 1)),
        (1e3, 1e3, 1.0),
    ],
)
def test_the_corrected_score(curvature_ratio: float, variance_ratio: float, expected: float) -> None:
    assert corrected_score(curvature_ratio, variance_ratio, CORRECTED) == pytest.approx(expected, abs=1e-12)


def test_gains_and_weight_are_the_settings() -> None:
    config = InstabilityConfig(curvature_weight=0.4, curvature_gain=2.0, variance_gain=0.5)
    expected = 0.4 * (2 * SIGMOID_2 - 1) + 0.6 * (2 * SIGMOID_1 - 1)
    assert corrected_score(1.0, 2.0, config) == pytest.approx(expected)
    config = InstabilityConfig(formula="published", curvature_weight=0.4, curvature_scale=0.5, variance_scale=2.0)
    assert published_score(1.0, 2.0, config) == pytest.approx(0.4 * SIGMOID_2 + 0.6 * (1 - SIGMOID_1))


@given(curvature=st.floats(-1e6, 1e6), variance=st.floats(0, 1e6))
def test_the_published_score_lies_in_its_narrow_range_and_the_corrected_in_the_whole(
    curvature: float, variance: float
) -> None:
    assert 0.35 <= published_score(curvature, variance, PUBLISHED) <= 0.85
    assert 0.0 <= corrected_score(curvature, variance, CORRECTED) <= 1.0


def test_a_calm_gradient_raises_the_published_score_and_lowers_the_corrected_one() -> None:
    calm, wild = training(grad_variance=1e-9, peak_variance=1e-9), training(grad_variance=1e-3, peak_variance=1e-3)
    published = [instability_score(facts, PUBLISHED) or 0.0 for facts in (calm, wild)]
    corrected = [instability_score(facts, CORRECTED) or 0.0 for facts in (calm, wild)]
    assert published[0] > published[1]
    assert corrected[0] < corrected[1]


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        (PUBLISHED, "loss_curvature"),
        (PUBLISHED, "grad_variance"),
        (CORRECTED, "loss_curvature"),
        (CORRECTED, "peak_variance"),
        (CORRECTED, "curvature_scale"),
        (CORRECTED, "variance_scale"),
    ],
)
def test_without_a_value_that_the_formula_needs_nothing_is_asked_for(config: InstabilityConfig, missing: str) -> None:
    facts = save_facts(newest_step=40, training=training(**{missing: None}))
    assert InstabilityPolicy(config).opinion(facts).due_at_s is None
    assert instability_score(training(**{missing: None}), config) is None


def test_a_scale_of_nothing_is_no_scale() -> None:
    assert instability_score(training(curvature_scale=0.0), CORRECTED) is None


def test_the_threshold_moves_with_the_offset_and_stays_within_reach() -> None:
    assert reachable_threshold(CORRECTED, 0.0) == 0.65
    assert reachable_threshold(CORRECTED, 0.1) == pytest.approx(0.75)
    assert reachable_threshold(CORRECTED, 5.0) == pytest.approx(0.99)
    assert reachable_threshold(PUBLISHED, 0.2) == pytest.approx(0.84)
    assert published_score(1.0, 0.0, PUBLISHED) > reachable_threshold(PUBLISHED, 5.0)


def test_a_save_of_1_2_gb_keeps_a_score_below_the_threshold_that_was_above_it() -> None:
    facts = training(loss_curvature=0.04, peak_variance=2.55e-6)  # ratios 2 and 0.85: a score of 0.653
    score = instability_score(facts, CORRECTED)
    assert score == pytest.approx(0.7 * math.tanh(1.0) + 0.3 * math.tanh(0.425))
    asked = save_facts(now_s=9.0, newest_step=40, training=facts)
    tightened = save_facts(now_s=9.0, newest_step=40, training=facts, threshold_offset=0.0131517)
    assert InstabilityPolicy(CORRECTED).opinion(asked).due_at_s == 9.0
    opinion = InstabilityPolicy(CORRECTED).opinion(tightened)
    assert opinion.due_at_s is None
    assert "threshold 0.66" in opinion.why


def test_the_reason_names_score_threshold_and_figures() -> None:
    facts = save_facts(now_s=9.0, newest_step=40, training=training(), threshold_offset=0.02)
    opinion = InstabilityPolicy(CORRECTED).opinion(facts)
    assert opinion.due_at_s == 9.0
    assert opinion.why == "score 0.90 > 0.67: curvature 0.08 (usual 0.02), variance 6e-06 (usual 3e-06)"
    opinion = InstabilityPolicy(PUBLISHED).opinion(facts)
    assert opinion.why == "score 0.78 > 0.67: curvature 0.08, variance 3e-06"


def test_one_evaluation_is_one_save_whoever_asked_for_it() -> None:
    policy, facts = InstabilityPolicy(CORRECTED), {"newest_step": 60, "training": training(step=40)}
    assert policy.opinion(save_facts(last_save_step=39, **facts)).due_at_s is not None
    assert policy.opinion(save_facts(last_save_step=40, **facts)).due_at_s is None
    assert policy.opinion(save_facts(last_save_step=42, last_instability_step=42, **facts)).due_at_s is None


def test_its_saves_keep_their_distance() -> None:
    policy = InstabilityPolicy(InstabilityConfig(min_interval_steps=20, curvature_gain=1.0, variance_gain=1.0))
    settings: dict[str, Any] = {"training": training(step=40), "last_save_step": 32, "last_instability_step": 32}
    early = policy.opinion(save_facts(newest_step=51, **settings))
    assert early.due_at_s is None
    assert "19 steps since the last such save, policy.instability.min_interval_steps is 20" in early.why
    assert policy.opinion(save_facts(newest_step=52, **settings)).due_at_s is not None


def _saves(config: InstabilityConfig, *, seed: int, onset: int, end: int, steps: int) -> list[int]:
    """Steps that are saved in a noisy, falling loss that swings between ``onset`` and ``end``."""
    generator = np.random.default_rng(seed)
    signals = TrainingSignals(10, config.quantile, window=config.window, lag=config.lag)
    policy, facts, saves = InstabilityPolicy(config), None, [0]
    for step in range(1, steps + 1):
        is_wild = onset <= step < end
        loss = 7.0 * step**-0.15 + float(generator.normal(0, 0.05))
        norm = abs(float(generator.normal(1.0, 0.1)))
        if is_wild:
            loss += 1.5 * (((step - onset) // 4) % 2)
            norm *= 4.0
        variance = norm**2 * 1e-6 if step % 10 == 0 else None
        facts = signals.add(step_report(step, loss=loss, grad_norm=norm, grad_variance=variance)) or facts
        seen = save_facts(
            now_s=float(step),
            newest_step=step,
            training=facts,
            last_save_step=saves[-1],
            last_instability_step=saves[-1] or None,
        )
        if policy.opinion(seen).due_at_s is not None:
            saves.append(step + 2)
    return saves[1:]


@pytest.mark.parametrize("seed", range(5))
def test_a_loss_that_swings_is_saved_within_20_steps_and_a_quiet_one_hardly_ever(seed: int) -> None:
    saves = _saves(InstabilityConfig(), seed=seed, onset=1000, end=1050, steps=2000)
    within = [step for step in saves if 1000 <= step < 1062]
    assert within
    assert within[0] <= 1020
    assert len(within) >= 3
    # 194 quiet evaluations: under 5 % of them
    assert len(saves) - len(within) < 0.05 * 194

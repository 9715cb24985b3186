"""Signals of the training from made-up step reports: what is kept between evaluations, what is usual, what left out."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from orchestrator.save_facts import TrainingFacts
from orchestrator.training_signals import RunningQuantile, TrainingSignals
from tests.fakes.step_reports import step_report


def facts_of(signals: TrainingSignals, losses: Iterable[float], first: int = 1, **fields: Any) -> list[TrainingFacts]:
    heard = [signals.add(step_report(step, loss=loss, **fields)) for step, loss in enumerate(losses, first)]
    return [facts for facts in heard if facts is not None]


@pytest.mark.parametrize("quantile", [0.1, 0.5, 0.9, 0.97])
@pytest.mark.parametrize("count", [5, 37, 50, 400])
def test_the_quantile_is_that_of_numpy_over_the_window(quantile: float, count: int) -> None:
    values = np.random.default_rng(count).lognormal(size=count)
    tracker = RunningQuantile(quantile, window=50, lag=0)
    for step, value in enumerate(values):
        tracker.add(step, float(value))
    assert tracker.value == pytest.approx(float(np.quantile(values[-50:], quantile)))


def test_the_newest_values_do_not_count_yet() -> None:
    values = np.random.default_rng(7).lognormal(size=80)
    tracker = RunningQuantile(0.9, window=30, lag=6)
    for step, value in enumerate(values):
        tracker.add(step, float(value))
    assert tracker.value == pytest.approx(float(np.quantile(values[44:74], 0.9)))


def test_nothing_is_usual_before_five_values_are_old_enough() -> None:
    tracker = RunningQuantile(0.5, window=10, lag=3)
    for step in range(7):
        tracker.add(step, 1.0)
    assert tracker.value is None
    tracker.add(7, 1.0)
    assert tracker.value == 1.0


def test_the_quantile_follows_a_drift_over_three_orders_of_magnitude() -> None:
    generator = np.random.default_rng(3)
    tracker = RunningQuantile(0.9, window=50, lag=5)
    for step in range(2000):
        scale = 10.0 ** (-3.0 * step / 2000)
        tracker.add(step, scale * abs(float(generator.normal())))
        if step > 100:
            value = tracker.value
            assert value is not None
            assert 0.5 < value / (1.645 * scale) < 2.2


def test_a_value_that_is_not_finite_leaves_the_quantile_as_it_is() -> None:
    tracker = RunningQuantile(0.5, window=10, lag=0)
    for step, value in enumerate([1.0, 2.0, math.nan, 3.0, math.inf, 4.0, -math.inf, 5.0]):
        tracker.add(step, value)
    assert tracker.value == 3.0


@pytest.mark.parametrize(("quantile", "window", "lag"), [(0.0, 10, 0), (1.0, 10, 0), (0.5, 4, 0), (0.5, 10, -1)])
def test_settings_of_no_use_are_refused(quantile: float, window: int, lag: int) -> None:
    with pytest.raises(ValueError, match="expected a quantile"):
        RunningQuantile(quantile, window=window, lag=lag)


def test_a_value_comes_every_so_many_steps_and_says_nothing_it_has_not_seen() -> None:
    signals = TrainingSignals(5, 0.9)
    facts = facts_of(signals, [1.0] * 12)
    assert [each.step for each in facts] == [5, 10]
    assert facts[0].loss_curvature is None  # a median of five, and two more for the second difference
    assert facts[1].loss_curvature == 0.0
    assert facts[1].grad_variance is None
    assert facts[1].curvature_scale is None
    assert facts[1].grad_norm == 1.0


def test_the_curvature_is_the_largest_since_the_last_value() -> None:
    # A level shift of 3 between two evaluations: the median moves at its third step, then all is flat again.
    facts = facts_of(TrainingSignals(20, 0.9), [5.0] * 24 + [2.0] * 16 + [2.0] * 20)
    assert [each.loss_curvature for each in facts] == [0.0, -3.0, 0.0]


def test_a_lone_outlier_is_no_curvature() -> None:
    (facts,) = facts_of(TrainingSignals(20, 0.9), [5.0] * 10 + [50.0] + [5.0] * 9)
    assert facts.loss_curvature == 0.0


def test_the_variance_between_two_measurements_follows_the_square_of_the_norm() -> None:
    signals = TrainingSignals(4, 0.9)
    for step, norm, variance in [(1, 1.0, None), (2, 6.0, None), (3, 1.0, None)]:
        signals.add(step_report(step, grad_norm=norm, grad_variance=variance))
    facts = signals.add(step_report(4, grad_norm=2.0, grad_variance=4e-6))
    assert facts is not None
    assert facts.grad_variance == 4e-6
    assert facts.peak_variance == pytest.approx(36e-6)
    quiet = [signals.add(step_report(step, grad_norm=1.0)) for step in range(5, 9)][-1]
    assert quiet is not None
    assert quiet.peak_variance == 4e-6  # measured last, and no step since had a larger norm


def test_a_loss_or_gradient_that_is_not_finite_poisons_nothing() -> None:
    signals, bad = TrainingSignals(10, 0.9, window=10, lag=0), {13, 27, 44}
    heard: list[TrainingFacts] = []
    for step in range(1, 101):
        value = math.nan if step in bad else math.inf if step - 1 in bad else None
        facts = signals.add(
            step_report(
                step,
                loss=5.0 - step / 1000 if value is None else value,
                grad_norm=1.0 if value is None else value,
                grad_variance=1e-6 if value is None else value,
            )
        )
        heard += [facts] if facts is not None else []
    last = heard[-1]
    for value in (last.loss_curvature, last.curvature_scale):
        assert value == pytest.approx(0.0, abs=3e-3)
    assert (last.grad_variance, last.peak_variance, last.variance_scale) == (1e-6, 1e-6, 1e-6)


def test_a_step_heard_before_means_that_the_training_went_back() -> None:
    straight, back = (TrainingSignals(1, 0.5, window=20, lag=0) for _ in range(2))
    calm = np.random.default_rng(1).normal(5.0, 0.1, size=30).tolist()
    expected = facts_of(straight, calm)[-1]
    facts_of(back, calm)
    facts_of(back, [9.0, 1.0] * 7, first=31, grad_variance=1.0, ranks_pressed=1)
    after = back.add(step_report(31, loss=5.0))
    assert after is not None
    assert after.curvature_scale == expected.curvature_scale
    assert after.loss_curvature is None
    assert after.grad_variance is None
    assert after.variance_scale is None
    assert after.pressed_since_step is None


def test_rewind_forgets_what_came_after() -> None:
    tracker = RunningQuantile(0.5, window=10, lag=0)
    for step in range(5):
        tracker.add(step, 1.0)
    for step in range(5, 10):
        tracker.add(step, 100.0)
    tracker.rewind(4)
    assert tracker.value == 1.0


def test_an_episode_of_pressure_begins_at_once_and_ends_after_three_calm_evaluations() -> None:
    signals, since = TrainingSignals(10, 0.9), []
    pressed = {5: 2, 20: 1, 40: 1}
    for step in range(1, 91):
        share = 0.98 if step in pressed else 0.5
        facts = signals.add(step_report(step, ranks_pressed=pressed.get(step, 0), pressed_share=share))
        if facts is not None:
            since.append((facts.step, facts.pressed_since_step, facts.ranks_pressed))
    assert since[:5] == [(10, 5, 2), (20, 5, 1), (30, 5, 0), (40, 5, 1), (50, 5, 0)]
    assert since[5:] == [(60, 5, 0), (70, None, 0), (80, None, 0), (90, None, 0)]


def test_the_share_is_the_largest_since_the_last_value_and_none_where_it_was_not_told() -> None:
    signals = TrainingSignals(3, 0.9)
    for step, share in [(1, 0.7), (2, 0.9)]:
        signals.add(step_report(step, pressed_share=share))
    first = signals.add(step_report(3, pressed_share=0.6))
    second = [signals.add(step_report(step)) for step in range(4, 7)][-1]
    assert first is not None
    assert second is not None
    assert (first.pressed_share, second.pressed_share) == (0.9, None)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_variance_that_is_not_finite_leaves_the_one_before(bad: float) -> None:
    signals = TrainingSignals(1, 0.9)
    signals.add(step_report(1, grad_variance=2e-6))
    facts = signals.add(step_report(2, grad_variance=bad))
    assert facts is not None
    assert (facts.grad_variance, facts.peak_variance) == (2e-6, 2e-6)

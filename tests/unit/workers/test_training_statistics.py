"""Curvature and variance on hand-made curves."""

from __future__ import annotations

import pytest

from workers.training_statistics import TrainingStatistics


def after(losses: list[float], norms: list[float] | None = None) -> TrainingStatistics:
    statistics = TrainingStatistics()
    for index, loss in enumerate(losses):
        statistics.add(loss=loss, grad_norm=1.0 if norms is None else norms[index])
    return statistics


def test_nothing_is_said_before_there_is_enough() -> None:
    assert after([1.0] * 6).loss_curvature is None
    assert after([]).grad_norm_variance is None


def test_a_straight_line_has_no_curvature_and_a_parabola_has_two() -> None:
    assert after([float(x) for x in range(10)]).loss_curvature == 0
    assert after([float(x * x) for x in range(10)]).loss_curvature == 2


def test_one_spike_is_filtered_out_and_a_value_that_is_not_finite_left_out() -> None:
    flat = [2.0] * 10
    assert after([*flat, 50.0, *flat]).loss_curvature == 0
    assert after([*flat, float("nan")], [*[1.0] * 10, float("inf")]).loss_curvature == 0


def test_variance_is_zero_for_an_even_norm_and_grows_with_its_spread() -> None:
    losses = [1.0] * 40
    assert after(losses).grad_norm_variance == 0
    small, large = (after(losses, [1 + spread * (index % 2) for index in range(40)]) for spread in (0.1, 1.0))
    assert small.grad_norm_variance is not None
    assert large.grad_norm_variance == pytest.approx(100 * small.grad_norm_variance)

"""The curvature of the loss on hand-made curves."""

from __future__ import annotations

from orchestrator.loss_curvature import LossCurvature


def after(losses: list[float]) -> float | None:
    curvature = LossCurvature()
    return [curvature.add(loss) for loss in losses][-1]


def test_nothing_is_said_before_there_is_enough() -> None:
    assert after([1.0] * 6) is None
    assert after([1.0] * 7) == 0


def test_a_straight_line_has_no_curvature_and_a_parabola_has_two() -> None:
    assert after([float(x) for x in range(10)]) == 0
    assert after([float(x * x) for x in range(10)]) == 2


def test_one_spike_is_filtered_out_and_a_value_that_is_not_finite_left_out() -> None:
    flat = [2.0] * 10
    assert after([*flat, 50.0, *flat]) == 0
    assert after([*flat, float("nan")]) == 0

"""Positions and places against the plain definition: a stream from which the windows were cut out."""

from __future__ import annotations

import random

import numpy as np
import pytest

from workers.contract import SkippedWindow
from workers.errors import LossSpike, StepNotFinite
from workers.skipped_windows import Windows, merge, place_of, skip_ahead, spans
from workers.state import Progress
from workers.step_check import StepCheck


def cut(windows: Windows, length: int = 200) -> list[int]:
    """All places of the stream but those in ``windows``."""
    gone = {place for first, count in windows for place in range(first, first + count)}
    return [place for place in range(length) if place not in gone]


@pytest.mark.parametrize("seed", range(20))
def test_places_are_those_of_the_stream_without_the_windows(seed: int) -> None:
    rng = random.Random(seed)
    windows: Windows = merge((), [(rng.randrange(60), rng.randint(1, 9)) for _ in range(rng.randrange(6))])
    left = cut(windows)
    for position in range(80):
        assert place_of(position, windows) == left[position]
        count = rng.randint(1, 40)
        found = [place for first, length in spans(position, count, windows) for place in range(first, first + length)]
        assert found == left[position : position + count]
        assert all(length > 0 for _, length in spans(position, count, windows))


def test_without_windows_a_position_is_its_place() -> None:
    assert place_of(7, ()) == 7
    assert spans(7, 4, ()) == ((7, 4),)


def test_windows_that_touch_or_overlap_become_one() -> None:
    assert merge(((8, 8),), [(16, 8), (40, 4), (42, 6)]) == ((8, 16), (40, 8))
    assert merge(((8, 8),), [(8, 8)]) == ((8, 8),)


def test_what_lies_behind_was_trained_on_and_is_not_cut_out_after_the_fact() -> None:
    told = [SkippedWindow(place=8, samples=8, step=2), SkippedWindow(place=32, samples=8, step=5)]
    assert skip_ahead((), 24, told) == ((32, 8),)
    assert skip_ahead((), 8, told) == ((8, 8), (32, 8))
    assert skip_ahead(((8, 8),), 24, told) == ((8, 8), (32, 8)), "position 24 is place 32"


NAN, INF = float("nan"), float("inf")


def check(*, must_be_finite: bool = True, loss_spike: float | None = None) -> StepCheck:
    return StepCheck(rank=1, global_batch=8, must_be_finite=must_be_finite, loss_spike=loss_spike)


@pytest.mark.parametrize(("loss", "norm"), [(NAN, 1.0), (1.0, NAN), (INF, 1.0), (1.0, INF)])
def test_a_step_that_is_not_finite_is_rejected_with_its_samples(loss: float, norm: float) -> None:
    before = Progress(step=2, position=16, skipped=((20, 4),))
    with pytest.raises(StepNotFinite, match=r"step 3: .* \[16, 20\), \[24, 28\)") as caught:
        check().require_sound(3, loss=loss, grad_norm=norm, before=before)
    assert sum(window.samples for window in caught.value.windows) == 8
    check(must_be_finite=False).require_sound(3, loss=loss, grad_norm=norm, before=before)


def test_a_loss_far_above_the_usual_is_a_spike_once_enough_losses_are_known() -> None:
    rng = np.random.default_rng(0)
    judge, off = check(loss_spike=3.0), check()
    for step in range(1, 16):
        judge.require_sound(step, loss=100.0 if step == 5 else rng.normal(2.0, 0.2), grad_norm=1.0, before=Progress())
    for step in range(16, 300):
        judge.require_sound(step, loss=rng.normal(2.0, 0.2), grad_norm=1.0, before=Progress())
        off.require_sound(step, loss=rng.normal(2.0, 0.2), grad_norm=1.0, before=Progress())
    with pytest.raises(LossSpike, match="usual is"):
        judge.require_sound(300, loss=9.0, grad_norm=1.0, before=Progress())
    judge.require_sound(301, loss=2.0, grad_norm=1.0, before=Progress())
    off.require_sound(300, loss=1e9, grad_norm=1.0, before=Progress())

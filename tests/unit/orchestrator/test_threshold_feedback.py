"""What the size and time of saves add to the instability threshold, to the digit."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from orchestrator.save_config import FeedbackConfig
from orchestrator.save_facts import SaveTimes
from orchestrator.threshold_feedback import ThresholdFeedback
from tests.fakes.save_facts import save_times


def save(stored_bytes: float, write_s: float = 1.0) -> SaveTimes:
    return replace(save_times(write_s=write_s), stored_bytes=int(stored_bytes))


FEEDBACK = ThresholdFeedback(FeedbackConfig())


def test_a_save_of_1_2_gb_raises_the_threshold_by_0_01315() -> None:
    assert FEEDBACK.offset([save(1.2e9)]) == pytest.approx(0.0131517, abs=1e-7)
    assert FEEDBACK.offset([save(1.2e9)]) == pytest.approx(0.05 * math.log2(1.2))


def test_each_doubling_adds_the_gain() -> None:
    feedback = ThresholdFeedback(FeedbackConfig(size_gain=0.03, write_gain=0.02))
    assert feedback.offset([save(4e9)]) == pytest.approx(0.06)
    assert feedback.offset([save(1e6, 80.0)]) == pytest.approx(0.06)
    assert feedback.offset([save(2e9, 20.0)]) == pytest.approx(0.05)


def test_saves_at_the_references_or_below_and_no_save_at_all_move_nothing() -> None:
    assert FEEDBACK.offset([]) == 0.0
    assert FEEDBACK.offset([save(1e9, 10.0)]) == 0.0
    assert FEEDBACK.offset([save(1.0, 0.0)]) == 0.0


def test_a_small_save_does_not_make_up_for_a_slow_store() -> None:
    assert FEEDBACK.offset([save(1.0, 20.0)]) == pytest.approx(0.02)


def test_the_offset_is_capped_and_says_so() -> None:
    assert FEEDBACK.offset([save(1e15)]) == 0.2
    assert "at policy.feedback.max_offset 0.2" in FEEDBACK.explain([save(1e15)])


def test_it_is_the_median_of_the_last_five_saves() -> None:
    saves = [save(1e12)] * 20 + [save(2e9), save(2e9), save(2e9), save(1e12), save(1e6)]
    assert FEEDBACK.offset(saves) == pytest.approx(0.05)


def test_it_explains_itself_with_its_figures() -> None:
    assert FEEDBACK.explain([save(1.2e9, 20.0)]) == "saves store 1.2 GB (+0.013) and take 20 s (+0.020)"
    assert FEEDBACK.explain([]) == "no save yet: +0"

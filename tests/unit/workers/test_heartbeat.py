"""The pulse under a clock of our own."""

from __future__ import annotations

import pytest

from workers.contract import Phase
from workers.heartbeat import Pulse


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_age_counts_from_the_last_progress() -> None:
    clock = Clock()
    pulse = Pulse(clock=clock)
    clock.now += 7
    assert pulse.read().age_s == 7
    pulse.beat(Phase.TRAINING, step=3)
    clock.now += 2
    reading = pulse.read()
    assert (reading.phase, reading.step, reading.age_s) == (Phase.TRAINING, 3, 2)


def test_a_phase_for_a_while_gives_way_to_the_one_before_even_after_an_error() -> None:
    pulse = Pulse(phase=Phase.TRAINING)
    with pulse.during(Phase.EVALUATING):
        assert pulse.read().phase is Phase.EVALUATING
    assert pulse.read().phase is Phase.TRAINING
    with pytest.raises(ValueError, match="inside"), pulse.during(Phase.CHECKPOINTING):
        raise ValueError("inside")
    assert pulse.read().phase is Phase.TRAINING


def test_the_length_of_each_phase_is_told_from_forming_on() -> None:
    clock = Clock()
    pulse = Pulse(clock=clock)
    for _ in range(2):
        for phase, length_s in ((Phase.FORMING, 1), (Phase.LOADING, 4), (Phase.COMPILING, 2), (Phase.TRAINING, 8)):
            pulse.beat(phase)
            clock.now += length_s / 2
            pulse.beat(step=1)
            clock.now += length_s / 2
        assert pulse.read().spent_s == {Phase.FORMING: 1, Phase.LOADING: 4, Phase.COMPILING: 2}
        pulse.beat(Phase.IDLE)

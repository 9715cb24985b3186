"""The time of a step and the cost of a change, from reports alone."""

from __future__ import annotations

import pytest

from orchestrator.pace import DEFAULT_REGROUP_S, Pace
from orchestrator.signals import StepFinished
from storage.keys import Attempt
from workers.contract import StepReport


def told(pace: Pace, attempt: int, step: int, *, took_s: float, at_s: float) -> None:
    report = StepReport(
        step=step,
        loss=1.0,
        grad_norm=1.0,
        lr=0.1,
        tokens=step,
        position=step,
        sample_chain="",
        step_s=took_s,
        finished_at_s=at_s,
    )
    pace.on_signal(StepFinished(attempt=Attempt(number=attempt, nonce="00000000"), report=report))


def test_the_first_step_of_a_world_is_no_measure() -> None:
    pace = Pace()
    assert pace.step_s is None
    told(pace, 1, 1, took_s=30.0, at_s=30.0)
    assert pace.step_s is None
    for step, took_s in ((2, 1.0), (3, 9.0), (4, 1.2)):
        told(pace, 1, step, took_s=took_s, at_s=30.0 + step)
    assert pace.step_s == 1.2
    told(pace, 2, 5, took_s=8.0, at_s=50.0)
    assert pace.step_s == 1.2, "what is known of the last World, until the new one has shown its own"
    told(pace, 2, 6, took_s=0.6, at_s=51.0)
    assert pace.step_s == 0.6


def test_a_change_costs_what_lies_between_the_last_step_and_the_next_ones_beginning() -> None:
    pace = Pace()
    assert pace.regroup_s == DEFAULT_REGROUP_S
    told(pace, 1, 9, took_s=1.0, at_s=100.0)
    told(pace, 1, 10, took_s=1.0, at_s=101.0)
    told(pace, 2, 11, took_s=2.0, at_s=106.0)
    assert pace.regroup_s == pytest.approx(3.0)


def test_a_report_that_nobody_told_is_reckoned_in() -> None:
    pace = Pace()
    told(pace, 1, 8, took_s=1.0, at_s=99.0)
    told(pace, 1, 9, took_s=1.0, at_s=100.0)
    told(pace, 2, 11, took_s=1.0, at_s=105.0)  # the report of step 10 went with its World
    assert pace.regroup_s == pytest.approx(3.0)


def test_a_rollback_and_a_wait_for_workers_are_no_measure_of_a_change() -> None:
    pace = Pace()
    told(pace, 1, 10, took_s=1.0, at_s=100.0)
    told(pace, 2, 6, took_s=1.0, at_s=160.0)
    assert pace.regroup_s == DEFAULT_REGROUP_S
    pace.interrupt()
    told(pace, 3, 7, took_s=1.0, at_s=900.0)
    assert pace.regroup_s == DEFAULT_REGROUP_S
    told(pace, 4, 8, took_s=1.0, at_s=903.0)
    assert pace.regroup_s == pytest.approx(2.0)

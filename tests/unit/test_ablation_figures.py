"""What the ablation counts: of a small made-up history, checked by hand."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from tests.bench.ablation_figures import Figures, figures_of
from tests.bench.unstable_runs import Course, course_of

COURSE = Course(seed=1, steps=100, windows=((40, 60),))
SUMMARY = {"goodput": {"lost_work_s": 3.0, "recovery_s": 2.0, "total_s": 120.0}}


def step(number: int, *, attempt: int = 1, step_s: float = 1.0) -> dict[str, Any]:
    return {"event": "step", "attempt": attempt, "step": number, "step_s": step_s, "finished_s": float(number)}


def save(number: int, reason: str, kind: str = "snapshot") -> dict[str, Any]:
    return {"event": "save_bound", "attempt": 1, "step": number, "kind": kind, "reason": reason}


def committed(number: int, *, t_s: float) -> dict[str, Any]:
    return {"event": "committed", "attempt": 1, "step": number, "bytes": 10, "stall_s": 0.5, "t_s": t_s}


def figures(*more: dict[str, Any]) -> Figures:
    return figures_of([*(step(number) for number in range(1, 101)), *more], SUMMARY, COURSE)


def test_saves_count_for_the_phase_in_which_they_were_asked_for() -> None:
    told = figures(
        save(42, "instability: score 0.8"), save(41, "hazard: due"), save(70, "hazard: due"), save(100, "cadence")
    )
    assert told.saves == 4
    assert (told.unstable_saves, told.quiet_saves) == (1, 1), "39 is quiet, 68 is just after, the last comes anyway"
    assert (told.unstable_steps, told.quiet_steps, told.quiet_evaluations) == (20, 60, 6)
    assert told.density_ratio == pytest.approx(3.0)


def test_a_snapshot_in_memory_alone_is_no_save() -> None:
    assert figures(save(42, "memory", kind="part")).saves == 0


@pytest.mark.parametrize(("asked_at", "missed"), [(39, 1), (40, 0), (60, 0), (61, 1)])
def test_a_window_is_missed_without_an_instability_save_within_twenty_steps(asked_at: int, missed: int) -> None:
    told = figures(save(asked_at + 2, "instability: score 0.8"), save(50, "hazard: due"))
    assert told.missed == missed


def test_an_instability_save_is_false_only_where_nothing_is_unstable_or_was_just_before() -> None:
    reason = "instability: score 0.8"
    told = figures(save(32, reason), save(42, reason), save(81, reason), save(82, reason), save(92, "hazard: due"))
    assert told.false_triggers == 2, "asked for at 30 and 80"
    assert told.false_rate == pytest.approx(2 / 6)


def test_steps_beside_a_save_are_held_against_the_others() -> None:
    events = [step(number, step_s=1.5 if number in (11, 12) else 1.0) for number in range(1, 21)]
    told = figures_of([*events, save(10, "hazard: due"), committed(10, t_s=12.0)], SUMMARY, COURSE)
    assert told.slowdown_s == pytest.approx(1.0)
    assert told.cost_share == pytest.approx((0.5 + 1.0) / 21.0)
    assert told.stored_bytes == 10


def test_what_a_fault_would_take_is_reckoned_from_the_newest_commit() -> None:
    restored = {"event": "attempt_started", "attempt": 2, "restored_step": 2, "lost_steps": 2}
    events = [step(1), step(2), step(3), committed(2, t_s=3.0), step(4), restored, step(3, attempt=2)]
    told = figures_of(events, SUMMARY, COURSE)
    assert (told.at_risk_steps, told.steps) == (1 + 2 + 3 + 2 + 1, 5)
    assert told.mean_at_risk_steps == pytest.approx(9 / 5)
    assert told.lost_steps == 2


def test_a_course_is_its_seeds_alone_with_a_loss_in_the_window_and_room_between() -> None:
    def course(seed: int) -> Course:
        return course_of(seed, steps=300, window=(200, 250), num_faults=3, least_step_s=0.0)

    assert course(4) == course(4)
    assert len({course(seed).lost_at for seed in range(20)}) > 10
    for seed in range(20):
        places = course(seed).lost_at
        assert any(200 <= place < 250 for place in places)
        assert min(later - sooner for sooner, later in pairwise(places)) >= 40

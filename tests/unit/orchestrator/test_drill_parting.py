"""What a drill says of the first difference: what came before it, and what to look at next. Pure."""

from __future__ import annotations

import pytest

from orchestrator.chaos import parse_chaos
from orchestrator.drill_compare import compare
from orchestrator.drill_history import read_history
from orchestrator.drill_parting import hints, parting_lines
from orchestrator.drill_rules import EXACT, ROUNDED
from tests.fakes.drill_events import DrillEvents

STEPS = 20
DROPOUT, OUTSIDE, PEACE = "reproducible=true", "make_trackers", "two runs in peace would part as well"


def parting(step: int, *, size: int = 3, reproducible: bool = False) -> tuple[list[str], tuple[str, ...]]:
    """Lines and hints, of runs whose losses part at ``step``; killed at step 8, gone on from step 6."""
    interrupted = DrillEvents({step: lambda event: event.update(loss=9.0)}).begin(4).train(8).strike("kill-worker", 8)
    history = read_history(interrupted.begin(size, restored=6, cause="worker-lost").train(STEPS).end())
    unbroken = read_history(DrillEvents().begin(4).train(STEPS).end())
    rules = EXACT if reproducible else ROUNDED
    found = compare(unbroken, history, rules=rules, num_steps=STEPS, planned=parse_chaos("kill-worker@8"))
    lines = parting_lines(found, history, reproducible=reproducible)
    return lines, hints(found, reproducible=reproducible)


@pytest.mark.parametrize(
    ("step", "size", "reproducible", "expected"),
    [
        (7, 3, False, [DROPOUT, OUTSIDE]),
        (12, 3, False, [DROPOUT, OUTSIDE]),
        (12, 3, True, [OUTSIDE]),
        (12, 4, False, [OUTSIDE]),
        (4, 3, False, [PEACE]),
    ],
)
def test_the_commonest_causes_are_named(step: int, size: int, reproducible: bool, expected: list[str]) -> None:
    lines, found = parting(step, size=size, reproducible=reproducible)
    assert [word in hint for word, hint in zip(expected, found, strict=True)] == [True] * len(expected)
    assert [line for line in lines if "CHECK" in line] == [f"  CHECK  {hint}" for hint in found]


@pytest.mark.parametrize(
    ("step", "again"), [(7, "; the run then went back to step 6, and step 7 was made again"), (9, "")]
)
def test_a_step_before_the_one_that_was_struck_is_said_to_have_been_made_again(step: int, again: str) -> None:
    lines, _ = parting(step)
    assert f"  the last fault before it: kill-worker at step 8 (node 2){again}" in lines
    assert "  the step was made by attempt 2 (worker-lost), which went on from step 6 (own-memory)" in lines


def test_numbers_of_workers_that_nobody_told_are_not_said_to_differ() -> None:
    run = DrillEvents({15: lambda event: event.update(loss=9.0)}).begin(4).train(8).strike("kill-driver", 8)
    history = read_history(run.begin(4, restored=10, cause="driver-restart").train(STEPS).end())
    unbroken = read_history(DrillEvents().begin(4).train(STEPS).end())
    found = compare(unbroken, history, rules=ROUNDED, num_steps=STEPS, planned=parse_chaos("kill-driver@8"))
    assert (found.world_differs_at, found.sizes_differ_at) == (9, None)
    assert [DROPOUT in hint for hint in hints(found, reproducible=False)] == [False]

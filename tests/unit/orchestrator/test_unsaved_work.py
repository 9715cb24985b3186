"""When a person's stop must wait for another World: what the last one did is in memory alone."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from orchestrator.attempt_run import Broken, Finished, Left
from orchestrator.failure_policy import AttemptFacts, Fault, FaultKind
from orchestrator.unsaved_work import holds_more, is_in_memory_alone


@dataclass
class Progress:
    steps_this_attempt: int = 5
    safe_step_this_attempt: int = -1


BROKEN = Broken(fault=Fault(kind=FaultKind.NODE_LOST, detail="d"), facts=AttemptFacts(), detected_at_s=0.0)


@pytest.mark.parametrize("is_parted", [True, False])
def test_a_world_that_parted_kept_its_step_in_memory_alone(is_parted: bool) -> None:
    left = Left(step=7, cause="join", reason="r", detected_at_s=0.0, is_parted=is_parted)
    assert is_in_memory_alone(left, Progress(), 7, was=False) is is_parted


def test_work_stays_unsaved_when_the_world_that_was_to_save_it_breaks_first() -> None:
    assert is_in_memory_alone(BROKEN, Progress(steps_this_attempt=0), 3, was=True)
    assert not is_in_memory_alone(BROKEN, Progress(steps_this_attempt=0), 3, was=False)


def test_after_a_fault_what_is_safe_in_memory_counts_where_no_checkpoint_is_as_new() -> None:
    assert is_in_memory_alone(BROKEN, Progress(safe_step_this_attempt=9), 8, was=False)
    assert not is_in_memory_alone(BROKEN, Progress(safe_step_this_attempt=8), 8, was=True)
    assert not is_in_memory_alone(BROKEN, Progress(), 0, was=True), "without the memory tier nothing is there to save"
    assert not is_in_memory_alone(BROKEN, Progress(safe_step_this_attempt=9), None, was=True)


def test_nothing_is_unsaved_before_the_first_world_or_after_the_last() -> None:
    assert not is_in_memory_alone(None, Progress(), 0, was=False)
    assert not is_in_memory_alone(Finished(weights_digest=None), Progress(), 0, was=True)


def test_at_the_end_of_a_driver_a_save_that_failed_leaves_more_in_memory_than_in_the_store() -> None:
    left = Left(step=9, cause="preemption", reason="r", detected_at_s=0.0)
    for end in (left, Finished(weights_digest=None)):
        assert holds_more(end, Progress(safe_step_this_attempt=9), 5, is_unsaved=False)
        assert not holds_more(end, Progress(safe_step_this_attempt=9), 9, is_unsaved=True)
        assert not holds_more(end, Progress(), 0, is_unsaved=True), "the memory tier is off"
    parted = Left(step=9, cause="join", reason="r", detected_at_s=0.0, is_parted=True)
    assert holds_more(parted, Progress(), 5, is_unsaved=True)
    assert holds_more(BROKEN, Progress(steps_this_attempt=0), 5, is_unsaved=True)
    assert not holds_more(None, Progress(), 0, is_unsaved=False)


@pytest.mark.parametrize(("deadline_at_s", "limit_s"), [(None, 60.0), (1010.0, 13.0), (990.0, 3.0), (2000.0, 60.0)])
def test_a_save_is_not_waited_for_long_after_the_node_that_makes_it_is_gone(
    deadline_at_s: float | None, limit_s: float
) -> None:
    left = Left(step=9, cause="preemption", reason="r", detected_at_s=0.0, deadline_at_s=deadline_at_s)
    assert left.save_limit_s(60.0, now_unix_s=1000.0) == limit_s

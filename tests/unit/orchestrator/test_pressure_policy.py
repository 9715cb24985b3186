"""Memory that runs full on a fake clock: one save an episode, and again where it does not end."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.pressure_policy import PressurePolicy
from orchestrator.save_config import PressureConfig
from orchestrator.save_facts import TrainingFacts
from orchestrator.training_signals import TrainingSignals
from tests.fakes.save_facts import save_facts
from tests.fakes.step_reports import step_report

POLICY = PressurePolicy(PressureConfig())


def pressed(**fields: Any) -> TrainingFacts:
    defaults: dict[str, Any] = {"step": 40, "ranks_pressed": 2, "pressed_share": 0.981, "pressed_since_step": 30}
    return TrainingFacts(**(defaults | fields))


def test_a_rank_that_becomes_pressed_asks_for_a_save_at_once_and_says_who() -> None:
    opinion = POLICY.opinion(save_facts(now_s=77.0, training=pressed()))
    assert opinion.due_at_s == 77.0
    assert opinion.why == "memory of 2 ranks is nearly full, rank 0 uses 98.1%, since step 30"
    assert opinion.is_pressing, "memory that runs full waits for no policy.min_interval_s"


@pytest.mark.parametrize(("unsettled", "durable_step"), [(1, 0), (0, 32)])
def test_a_save_since_the_episode_began_answers_it_for_ten_minutes(unsettled: int, durable_step: int) -> None:
    facts = save_facts(
        now_s=80.0,
        training=pressed(),
        last_save_step=32,
        last_save_at_s=78.0,
        unsettled=unsettled,
        durable_step=durable_step,
    )
    opinion = POLICY.opinion(facts)
    assert (opinion.due_at_s, opinion.is_pressing) == (678.0, False)


def test_a_save_that_came_to_nothing_does_not_answer_it_but_the_next_one_keeps_the_interval() -> None:
    facts = save_facts(now_s=80.0, training=pressed(), last_save_step=32, last_save_at_s=78.0, durable_step=29)
    opinion = POLICY.opinion(facts)
    assert (opinion.due_at_s, opinion.is_pressing) == (80.0, False)
    assert opinion.why.endswith("; the save of step 32 came to nothing")


def test_a_save_from_before_the_episode_does_not_answer_it() -> None:
    facts = save_facts(now_s=80.0, training=pressed(), last_save_step=29, last_save_at_s=78.0)
    assert POLICY.opinion(facts).due_at_s == 80.0


def test_nobody_pressed_asks_for_nothing() -> None:
    assert POLICY.opinion(save_facts()).due_at_s is None
    assert POLICY.opinion(save_facts(training=pressed(pressed_since_step=None, ranks_pressed=0))).due_at_s is None
    assert POLICY.opinion(save_facts(training=pressed(ranks_pressed=0))).due_at_s is None


def test_one_rank_whose_share_is_not_known_is_one_rank() -> None:
    why = POLICY.opinion(save_facts(training=pressed(ranks_pressed=1, pressed_share=None))).why
    assert why == "memory of 1 rank is nearly full, since step 30"


def test_two_episodes_of_swaying_pressure_are_two_saves() -> None:
    signals, saves = TrainingSignals(10, 0.9), [0]
    swaying = set(range(100, 200, 20)) | set(range(400, 500, 20))
    training = None
    for step in range(1, 601):
        training = signals.add(step_report(step, ranks_pressed=int(step in swaying))) or training
        facts = save_facts(
            now_s=float(step),
            newest_step=step,
            training=training,
            last_save_step=saves[-1],
            last_save_at_s=saves[-1],
            durable_step=saves[-1],
        )
        due_at_s = POLICY.opinion(facts).due_at_s
        if due_at_s is not None and due_at_s <= facts.now_s:
            saves.append(step + 2)
    assert saves == [0, 102, 402]

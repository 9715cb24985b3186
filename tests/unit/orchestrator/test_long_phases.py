"""What is said of phases that take longer than a step, and how often."""

from __future__ import annotations

from typing import Any

from orchestrator.long_phases import LongPhases
from storage.keys import Attempt
from workers.contract import Heartbeat, Phase

ATTEMPT = Attempt(number=1, nonce="0badcafe")


def beat(phase: Phase, age_s: float, step: int = 7) -> Heartbeat:
    return Heartbeat(worker_id="w", attempt=ATTEMPT, phase=phase, step=step, age_s=age_s)


def test_each_is_said_once_until_nobody_is_at_it_any_more() -> None:
    said: list[tuple[str, dict[str, Any]]] = []
    phases = LongPhases(lambda event, fields: said.append((event, fields)))
    training, short = beat(Phase.TRAINING, 9.0), beat(Phase.CHECKPOINTING, 0.5)
    phases.look_at([training, short, None])
    assert said == [], "a save as short as ever is no news"
    for age_s in (2.5, 3.5):
        phases.look_at([training, beat(Phase.CHECKPOINTING, age_s), beat(Phase.CHECKPOINTING, age_s, step=8)])
    assert said == [("checkpointing", {"ranks": [1, 2], "step": 8})]
    phases.look_at([training, training, training])
    phases.look_at([beat(Phase.CHECKPOINTING, 2.5), training, beat(Phase.EVALUATING, 60.0)])
    assert sorted(name for name, _ in said[1:]) == ["checkpointing", "evaluating"]


def test_a_wait_for_data_is_said_at_once() -> None:
    said: list[str] = []
    LongPhases(lambda event, _: said.append(event)).look_at([beat(Phase.WAITING_FOR_DATA, 0.0)])
    assert said == ["data_awaited"]

"""When to save: exact answers on numbers."""

from __future__ import annotations

from orchestrator.save_policy import SaveFacts, decide_save
from storage.config import CheckpointConfig

TIMED = CheckpointConfig(every_s=600)


def facts(since_save_s: float, unsettled: int = 0, newest_step: int = 50) -> SaveFacts:
    return SaveFacts(newest_step=newest_step, total_steps=100, since_save_s=since_save_s, unsettled=unsettled)


def test_the_time_policy_wishes_a_save_when_its_interval_has_passed() -> None:
    assert decide_save(facts(599.9), TIMED) is None
    wish = decide_save(facts(600.0), TIMED)
    assert wish is not None
    assert "600" in wish.reason


def test_no_wish_while_two_saves_are_unsettled_or_the_last_step_is_near_or_a_cadence_is_fixed() -> None:
    assert decide_save(facts(1000.0, unsettled=2), TIMED) is None
    assert decide_save(facts(1000.0, newest_step=98), TIMED) is None
    assert decide_save(facts(1000.0), CheckpointConfig(every_steps=10)) is None

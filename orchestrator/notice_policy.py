"""A preemption notice in the save policies: one save ahead of the last one, and none in the way of that. Pure.

Speaks only of notices that memory does not cover: where it hands over, the World parts at once and nothing is told
here. When the World leaves, and by which save, is deadline_policy's choice on the driver's side.
"""

from __future__ import annotations

from orchestrator.deadline_policy import STEPS_TO_LEAVE, FirstSave
from orchestrator.hazard import predicted_write_s, save_cost_s, time_in_words
from orchestrator.save_config import DeadlineConfig
from orchestrator.save_facts import Opinion, SaveFacts

__all__ = ["NoticePolicy", "why_in_the_way"]


class NoticePolicy:
    """A notice may come true early, and the last save may fail: what was trained until the notice is saved at once
    where there is time for both. Once for all notices of an Attempt."""

    def __init__(self, config: DeadlineConfig) -> None:
        self._config = config

    @property
    def name(self) -> str:
        return "deadline"

    def opinion(self, facts: SaveFacts) -> Opinion:
        if facts.noticed_at_s is None:
            return self._silent("no preemption notice that memory does not cover")
        if facts.deadline_at_s is None:
            return self._silent("a preemption notice without a deadline: the World leaves at once")
        covered_at_s = max(facts.durable_at_s, facts.last_save_at_s) if facts.unsettled else facts.durable_at_s
        if facts.noticed_at_s - covered_at_s <= (save_cost_s(facts.saves) or 0.0):
            return self._silent("what was trained until the preemption notice is saved, or being saved")
        why = why_in_the_way(facts, self._config)
        if why is not None:
            return self._silent(why)
        left = time_in_words(facts.deadline_at_s - facts.now_s)
        return Opinion(
            policy=self.name,
            due_at_s=facts.noticed_at_s,
            why=f"preemption notice, {left} left: there is time for a save before the last one",
            is_pressing=True,
        )

    def _silent(self, why: str) -> Opinion:
        return Opinion(policy=self.name, due_at_s=None, why=why)


def why_in_the_way(facts: SaveFacts, config: DeadlineConfig) -> str | None:
    """Why a save that is ordered now would hold up the last one before the earliest deadline; None: it would not."""
    if facts.deadline_at_s is None or facts.now_s > facts.deadline_at_s:
        return None
    one_s = _takes_s(facts, config)
    begins_in_s = facts.deadline_at_s - config.margin_s - one_s - facts.now_s
    if one_s <= begins_in_s:
        return None
    when = f"in {time_in_words(begins_in_s)}" if begins_in_s > 0 else "now"
    return f"preemption notice: the last save begins {when} at the latest, and would wait for another one"


def _takes_s(facts: SaveFacts, config: DeadlineConfig) -> float:
    """From an Order to its Commit."""
    state_bytes, num_ranks = facts.cluster.state_bytes, facts.cluster.num_ranks or facts.cluster.num_nodes
    rank_bytes = None if state_bytes is None else state_bytes / max(1, num_ranks)
    first_s, _ = FirstSave(rank_bytes=rank_bytes).forecast_s(config)
    return predicted_write_s(facts.saves, first_s=first_s) + STEPS_TO_LEAVE * max(0.0, facts.step_s or 0.0)

"""The bounds on losses: no longer between two saves than the limit, no more work at risk than the limit. Pure.

They always hold, whatever other policies are on. Work at risk counts against the nearest Tier: where memory keeps every
step, a save to the store is never asked for because of it.
"""

from __future__ import annotations

from orchestrator.hazard import predicted_write_s, recent_write_s, save_cost_s, time_in_words
from orchestrator.save_config import SavePolicyConfig
from orchestrator.save_facts import Opinion, SaveFacts

__all__ = ["BoundsPolicy"]

_STEPS_AHEAD = 3  # one step until the wish is heard, and the Order lands two later


class BoundsPolicy:
    """``BoundsPolicy(policy)``: one for a Run, from the whole of ``RunConfig.policy``."""

    def __init__(self, policy: SavePolicyConfig) -> None:
        self._policy = policy

    @property
    def name(self) -> str:
        return "bounds"

    def opinion(self, facts: SaveFacts) -> Opinion:
        """The earlier of the two bounds, but saves do not come more often than they can be written. One slow save makes
        the next ones begin earlier, and must not keep them from coming."""
        first_s = self._policy.deadline.guess_s
        write_s = predicted_write_s(facts.saves, first_s=first_s)
        between_s = recent_write_s(facts.saves, first_s=first_s)
        gap_s = max(self._policy.min_interval_s, between_s, save_cost_s(facts.saves) or 0.0)
        bounds = [self._longest(facts, gap_s)]
        if self._policy.max_at_risk_s is not None and facts.newest_step > facts.nearest_step:
            bounds.append(self._at_risk(facts, self._policy.max_at_risk_s, write_s, gap_s))
        due_at_s, why = min(bounds)
        return Opinion(policy=self.name, due_at_s=max(due_at_s, facts.last_save_at_s + gap_s), why=why)

    def _longest(self, facts: SaveFacts, gap_s: float) -> tuple[float, str]:
        limit_s = self._policy.max_interval_s
        since = time_in_words(max(0.0, facts.now_s - facts.last_save_at_s))
        why = f"{since} since the last save, policy.max_interval_s is {limit_s:g}"
        if gap_s > limit_s:
            why += f", which cannot be held: a save takes {time_in_words(gap_s)}"
        return facts.last_save_at_s + limit_s, why

    def _at_risk(self, facts: SaveFacts, limit_s: float, write_s: float, gap_s: float) -> tuple[float, str]:
        """When a save must begin to be durable before the limit, and whether saves that follow each other can be."""
        # A save under way covers what came before it, as soon as it is written.
        covered_at_s = max(facts.nearest_at_s, facts.last_save_at_s) if facts.unsettled else facts.nearest_at_s
        ahead_s = write_s + _STEPS_AHEAD * max(0.0, facts.step_s or 0.0)
        lasts_s = max(0.0, limit_s - ahead_s)
        at_risk = time_in_words(max(0.0, facts.now_s - facts.nearest_at_s))
        why = f"{at_risk} of work at risk, policy.max_at_risk_s is {limit_s:g}"
        worst_s = max(lasts_s, gap_s) + ahead_s
        if worst_s > limit_s and gap_s == self._policy.min_interval_s > lasts_s:
            why += f", which cannot be held: policy.min_interval_s is {gap_s:g}, so that up to"
            why += f" {time_in_words(worst_s)} are at risk"
        elif worst_s > limit_s:
            why += f", which cannot be held: saves take {time_in_words(write_s)} to write and come each"
            why += f" {time_in_words(max(lasts_s, gap_s))}, so that up to {time_in_words(worst_s)} are at risk"
        return covered_at_s + lasts_s, why

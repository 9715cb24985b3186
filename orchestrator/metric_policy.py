"""Save what evaluated best. It compares steps alone: which loss is the best so far is rank 0's word."""

from __future__ import annotations

from orchestrator.save_facts import Opinion, SaveFacts

__all__ = ["BestMetricPolicy"]


class BestMetricPolicy:
    """Wants a save as soon as an evaluation was the best so far, and none that was bound since covers it."""

    @property
    def name(self) -> str:
        return "best-metric"

    def opinion(self, facts: SaveFacts) -> Opinion:
        best, saved = facts.best_step, facts.saved_best_step
        if best is None:
            return Opinion(policy=self.name, due_at_s=None, why="no evaluation yet")
        if saved is not None and saved >= best:
            return Opinion(policy=self.name, due_at_s=None, why=f"the best evaluation, of step {best}, is covered")
        before = "no earlier best is saved" if saved is None else f"the best that is saved is of step {saved}"
        return Opinion(
            policy=self.name, due_at_s=facts.now_s, why=f"step {best} has the best evaluation so far, {before}"
        )

"""A fixed cadence in seconds, `checkpoint.every_s`: from one save to the next.

The cadence in steps is not its matter: rank 0 binds that one by itself.
"""

from __future__ import annotations

from orchestrator.save_facts import Opinion, SaveFacts

__all__ = ["CadencePolicy"]


class CadencePolicy:
    """Wants a save every ``every_s`` seconds, counted from when the last one was bound."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s

    @property
    def name(self) -> str:
        return "cadence"

    def opinion(self, facts: SaveFacts) -> Opinion:
        since_s = facts.now_s - facts.last_save_at_s
        return Opinion(
            policy=self.name,
            due_at_s=facts.last_save_at_s + self._every_s,
            why=f"{since_s:.0f} s since the last save, checkpoint.every_s is {self._every_s:g}",
        )

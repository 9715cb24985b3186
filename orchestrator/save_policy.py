"""When to save: a pure function over facts, the same live and in simulation. Time comes in as an argument.

Two rules for now, a fixed cadence in steps (bound by rank 0 itself) and one in seconds; signal-driven rules join here.
"""

from __future__ import annotations

from dataclasses import dataclass

from storage.config import CheckpointConfig

__all__ = ["SaveFacts", "SaveWish", "decide_save"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFacts:
    """``since_save_s``: seconds since the last save was ordered or the Attempt began."""

    newest_step: int
    total_steps: int
    since_save_s: float
    unsettled: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveWish:
    """Save soon; ``reason`` is carried to events and status."""

    reason: str


def decide_save(facts: SaveFacts, config: CheckpointConfig) -> SaveWish | None:
    """A wish, or None. Never while two saves are unsettled, never when the last step saves anyway."""
    if config.every_steps is not None or facts.unsettled >= 2:
        return None
    if facts.newest_step + 2 >= facts.total_steps:
        return None
    if facts.since_save_s < config.every_s:
        return None
    return SaveWish(
        reason=f"time: {facts.since_save_s:.0f} s since the last save, checkpoint.every_s {config.every_s:g}"
    )

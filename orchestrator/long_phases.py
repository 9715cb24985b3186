"""Says when members are at something that takes longer than a step: waiting for data, a save, an evaluation.

Events of steps tell nothing meanwhile. When it is over, the next step tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from workers.contract import Heartbeat, Phase

__all__ = ["LongPhases"]

# For how long a member is at it before it is worth a word. Data is only waited for in this phase once it is late.
_NEWS_AFTER_S: Final[Mapping[Phase, float]] = {
    Phase.WAITING_FOR_DATA: 0.0,
    Phase.CHECKPOINTING: 2.0,
    Phase.EVALUATING: 2.0,
}
_EVENTS: Final[Mapping[Phase, str]] = {
    Phase.WAITING_FOR_DATA: "data_awaited",
    Phase.CHECKPOINTING: "checkpointing",
    Phase.EVALUATING: "evaluating",
}


class LongPhases:
    """One Attempt's. ``say`` takes an event's name and its fields."""

    def __init__(self, say: Callable[[str, dict[str, Any]], None]) -> None:
        self._say = say
        self._told: frozenset[Phase] = frozenset()

    def look_at(self, beats: Iterable[Heartbeat | None]) -> None:
        """Take in the newest heartbeats, in rank order: each phase is said once until nobody is in it any more."""
        found: dict[Phase, list[int]] = {}
        steps: dict[Phase, int] = {}
        for rank, beat in enumerate(beats):
            if beat is not None and beat.age_s >= _NEWS_AFTER_S.get(beat.phase, float("inf")):
                found.setdefault(beat.phase, []).append(rank)
                steps[beat.phase] = max(steps.get(beat.phase, 0), beat.step)
        for phase in found.keys() - self._told:
            self._say(_EVENTS[phase], {"ranks": found[phase], "step": steps[phase]})
        self._told = frozenset(found)

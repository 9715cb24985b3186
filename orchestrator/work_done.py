"""What a Run's events tell of its steps up to one Checkpoint: their sample chains, and work that was done twice. Pure.

Events may be missing, those of a killed driver's last moments above all: what is counted here is the least that was.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.event_fields import Event, int_of, text_of
from orchestrator.summary import begins_history

__all__ = ["WorkDone", "work_done"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkDone:
    """``chains``: by step, of the history that the Checkpoint has. ``rolled_back``: steps that were trained and then
    given up, in Attempts up to the Checkpoint's own."""

    chains: dict[int, str]
    rolled_back: int


def work_done(events: Iterable[Event], *, attempt: int, step: int) -> WorkDone:
    """Of the Checkpoint that ``attempt`` made of ``step``."""
    chains: dict[int, str] = {}
    rolled_back = 0
    is_over = False
    for event in events:
        if begins_history(event):
            chains, rolled_back, is_over = {}, 0, False
        match event.get("event"):
            case "attempt_started":
                if int_of(event, "attempt") > attempt:
                    is_over = True
                    continue
                restored_step = int_of(event, "restored_step")
                lost = [number for number in chains if number > restored_step]
                rolled_back += len(lost)
                for number in lost:
                    del chains[number]
            case "step" if not is_over and int_of(event, "attempt") <= attempt:
                chains[int_of(event, "step")] = text_of(event, "sample_chain")
    kept = {number: chain for number, chain in chains.items() if number <= step and chain}
    return WorkDone(chains=kept, rolled_back=rolled_back)

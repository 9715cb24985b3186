"""What the Journal keeps of steps that may not stand: no World goes on from what memory holds of them.

Such a step was finished before all ranks learned that it went wrong, so a generation of it may exist. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from orchestrator.attempt_run import Broken
from orchestrator.journal import JournalEntry
from storage.keys import Attempt, StepKey
from workers.contract import CauseKind

__all__ = ["bad_step_entry", "bad_steps"]

_FIELD = "bad_step"


def bad_step_entry(end: Broken) -> dict[str, Any]:
    """Fields for the entry that says how ``end`` was answered; none where no step was bad."""
    for outcome in end.facts.outcomes:
        if outcome.cause is not None and outcome.cause.kind is CauseKind.BAD_STEP:
            return {_FIELD: [outcome.cause.step, outcome.attempt.number, outcome.attempt.nonce]}
    return {}


def bad_steps(entries: Iterable[JournalEntry]) -> set[StepKey]:
    """All of them that any driver of this Run met."""
    told = (entry.fields.get(_FIELD) for entry in entries)
    return {
        StepKey(step=int(value[0]), attempt=Attempt(number=int(value[1]), nonce=str(value[2])))
        for value in told
        if isinstance(value, list) and len(value) == 3
    }

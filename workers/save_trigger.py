"""When a loop without a coordinator saves: the Protocol that its rank 0 asks, its values, and the fixed cadence.

What decides by measured cost and hazard is `orchestrator.dynamic_trigger`; nothing here decides by time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from pydantic import JsonValue

__all__ = ["EverySteps", "SaveOver", "SaveTrigger", "StepFacts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """One finished step of this process. ``loss`` and ``grad_norm`` None: not logged at this step.

    ``metric``: of an evaluation after it, lower is better; None: there was none.
    """

    step: int
    step_s: float
    loss: float | None = None
    grad_norm: float | None = None
    metric: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOver:
    """A save that has ended. ``failure`` None: it is a Checkpoint now. ``stall_s``: what training waited for the copy;
    ``write_s``: from there until the Commit. ``stored_bytes`` is known on rank 0 alone."""

    step: int
    stall_s: float
    write_s: float
    raw_bytes: int
    stored_bytes: int = 0
    failure: str | None = None


class SaveTrigger(Protocol):
    """Asked by rank 0 alone; what it answers holds for all ranks. Its state is part of every Checkpoint.

    Order: ``load`` where one was restored, ``begin``, then for each step ``take_step`` and ``due``; ``began`` and
    ``over`` once for each save.
    """

    def begin(self, base_step: int, total_steps: int, world_size: int) -> None: ...

    def take_step(self, facts: StepFacts) -> None: ...

    def due(self, step: int) -> str | None:
        """Why a Checkpoint of ``step`` is due, the step that ends now or the next; None: it is not."""
        ...

    def began(self, step: int) -> None: ...

    def over(self, save: SaveOver) -> None: ...

    def state(self, *, is_planned_end: bool) -> dict[str, JsonValue]:
        """What its successor must know. ``is_planned_end``: the process stops on purpose with this save."""
        ...

    def load(self, state: Mapping[str, JsonValue]) -> None: ...


class EverySteps:
    """Every ``number`` steps; where a save is still under way then, as soon as it has ended."""

    def __init__(self, number: int) -> None:
        if number < 1:
            raise ValueError(f"every_steps {number}: expected 1 or more")
        self._number = number
        self._last_step = 0

    def begin(self, base_step: int, total_steps: int, world_size: int) -> None:
        del total_steps, world_size
        self._last_step = base_step

    def take_step(self, facts: StepFacts) -> None: ...

    def due(self, step: int) -> str | None:
        is_due = step // self._number > self._last_step // self._number
        return f"every {self._number} steps" if is_due else None

    def began(self, step: int) -> None:
        self._last_step = step

    def over(self, save: SaveOver) -> None: ...

    def state(self, *, is_planned_end: bool) -> dict[str, JsonValue]:
        del is_planned_end
        return {}

    def load(self, state: Mapping[str, JsonValue]) -> None: ...

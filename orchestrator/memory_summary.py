"""The part of a Run's summary that tells of the memory Tier: how much of it there was, what is safe, what it cost.

Pure: folds events, as orchestrator.summary does for the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypedDict

__all__ = ["MemoryFold", "MemorySummary", "farthest_tier"]

_TIERS: Final = ("own-memory", "peer-memory", "local-disk", "object-storage")  # nearest first


class MemorySummary(TypedDict):
    """``mode``: of the last World. ``safe_step``: the newest step whole in memory, replicas included, null: none."""

    mode: str
    safe_step: int | None
    snapshots: int
    stall_s: float
    passed_over: int
    degraded: int


@dataclass(slots=True)
class MemoryFold:
    """Counts over all drivers; ``safe_step`` is of the newest Attempt."""

    _mode: str = "off"
    _safe_step: int | None = None
    _snapshot_step: int = -1
    _snapshots: int = 0
    _stall_s: float = 0.0
    _passed_over: int = 0
    _degraded: int = 0

    def add(self, event: Mapping[str, object]) -> None:
        match event.get("event"):
            case "memory_tier":
                self._mode = str(event.get("mode", "off"))
            case "attempt_started":
                self._safe_step, self._snapshot_step = None, -1
            case "step":
                self._add_step(event)
            case "memory_passed_over":
                self._passed_over += 1
            case "memory_degraded":
                self._degraded += 1

    def _add_step(self, event: Mapping[str, object]) -> None:
        taken, safe, stall_s = event.get("memory_step"), event.get("safe_step"), event.get("memory_stall_s")
        if isinstance(safe, int) and safe >= 0:
            self._safe_step = max(safe, self._safe_step or 0)
        if isinstance(taken, int) and taken > self._snapshot_step:
            self._snapshot_step = taken
            self._snapshots += 1
            self._stall_s += stall_s if isinstance(stall_s, int | float) else 0.0

    def result(self) -> MemorySummary:
        return MemorySummary(
            mode=self._mode,
            safe_step=self._safe_step,
            snapshots=self._snapshots,
            stall_s=self._stall_s,
            passed_over=self._passed_over,
            degraded=self._degraded,
        )


def farthest_tier(tiers: object) -> str | None:
    """Of the Tiers that bytes were really read from, as `restored` tells them; None where none were."""
    read = [tier for tier, count in tiers.items() if count] if isinstance(tiers, dict) else []
    return max((tier for tier in read if tier in _TIERS), key=_TIERS.index, default=None)

"""The part of a Run's summary that tells how saving went: failed, skipped and slow saves, outages, work at risk.

Pure: folds events, as orchestrator.summary does for the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypedDict

__all__ = ["StorageFold", "StorageSummary"]


class StorageSummary(TypedDict):
    saves_skipped: int
    saves_failed: int
    saves_retried: int
    saves_slow: int
    upload_retries: int
    outages: int
    outage_s: float
    longest_outage_s: float
    max_at_risk_steps: int
    max_at_risk_s: float


@dataclass(slots=True)
class StorageFold:
    """Counts over all drivers. An outage that a driver did not see the end of counts as long as it was seen."""

    _counts: Counter[str] = field(default_factory=Counter)
    _delayed: set[tuple[int, int]] = field(default_factory=set)
    _ended_s: float = 0.0
    _open_s: float | None = None
    _longest_s: float = 0.0
    _at_risk_steps: int = 0
    _at_risk_s: float = 0.0

    def add(self, event: Mapping[str, object]) -> None:
        name = event.get("event")
        match name:
            case "save_skipped" | "save_failed" | "save_slow":
                self._counts[name] += 1
            case "save_delayed":
                self._delayed.add((_int(event, "attempt"), _int(event, "step")))
            case "committed":
                self._counts["upload_retries"] += _int(event, "upload_retries")
            case "store_away":
                self._close()
                self._counts[name] += 1
                self._open_s = _float(event, "away_s")
            case "work_at_risk" | "store_back":
                self._open_s = max(self._open_s or 0.0, _float(event, "away_s"))
                self._at_risk_steps = max(self._at_risk_steps, _int(event, "at_risk_steps"))
                self._at_risk_s = max(self._at_risk_s, _float(event, "at_risk_s"))
                if name == "store_back":
                    self._close()

    def result(self) -> StorageSummary:
        open_s = self._open_s or 0.0
        return StorageSummary(
            saves_skipped=self._counts["save_skipped"],
            saves_failed=self._counts["save_failed"],
            saves_retried=len(self._delayed),
            saves_slow=self._counts["save_slow"],
            upload_retries=self._counts["upload_retries"],
            outages=self._counts["store_away"],
            outage_s=self._ended_s + open_s,
            longest_outage_s=max(self._longest_s, open_s),
            max_at_risk_steps=self._at_risk_steps,
            max_at_risk_s=self._at_risk_s,
        )

    def _close(self) -> None:
        if self._open_s is not None:
            self._ended_s += self._open_s
            self._longest_s = max(self._longest_s, self._open_s)
        self._open_s = None


def _int(event: Mapping[str, object], key: str) -> int:
    return int(_float(event, key))


def _float(event: Mapping[str, object], key: str) -> float:
    value = event.get(key)
    return float(value) if isinstance(value, int | float) else 0.0

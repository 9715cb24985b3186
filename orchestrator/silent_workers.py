"""Says which members have not answered for some time, long before their silence counts as a hang.

Judging is `heartbeats`' business: this only lets people see for whom a World waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

__all__ = ["SilentWorkers"]

_NEWS_AFTER_S: Final = 5.0
_OF_LIMIT: Final = 3  # or this part of `failure.silent_s`, where that is longer
_MAX_NAMED: Final = 8


class SilentWorkers:
    """One Attempt's. ``say`` takes an event's name and its fields; ``limit_s``: the silence that is a hang."""

    def __init__(self, say: Callable[[str, dict[str, Any]], None], limit_s: float) -> None:
        self._say = say
        self._after_s = max(_NEWS_AFTER_S, limit_s / _OF_LIMIT)
        self._told: frozenset[str] = frozenset()

    def look_at(self, silences: Mapping[str, float]) -> None:
        """Take in for how long each member has owed an answer. Each is said once: who stutters is no news each time."""
        silent = [worker for worker, silent_s in silences.items() if silent_s >= self._after_s]
        if self._told.issuperset(silent):
            return
        self._told |= frozenset(silent)
        longest_s = max(silences[worker] for worker in silent)
        named = {"workers": silent[:_MAX_NAMED], "num_workers": len(silent)}
        self._say("worker_silent", {**named, "silent_s": round(longest_s, 3)})

"""Which saves are abnormally slow, and what their time most likely went into. A plain ledger; time is an argument.

It never ends a save: a slow one is only named.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from storage.manifest import Receipt

__all__ = ["SlowSave", "SlowSaves"]

_MANY_TIMES = 3.0
_FEWEST = 3  # saves seen before any is called slow
_REMEMBERED = 16
_FLOOR_S = 10.0  # nobody minds a save that is four times as slow, and over in two seconds
_PARTS: dict[str, Callable[[Receipt], float]] = {
    "stall": lambda receipt: receipt.stall_s,
    "encode": lambda receipt: receipt.encode_s,
    "upload": lambda receipt: receipt.upload_s,
}
_COMMIT = "commit"
_WORDS = {
    "stall": "copying into shared memory: memory bandwidth or the device is busy",
    "encode": "encoding: the CPUs of the node are busy",
    "upload": "uploading: the store or the network is slow",
    _COMMIT: "the Commit: small writes and listings of the store are slow",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowSave:
    step: int
    seconds: float
    usual_s: float
    cause: str


class SlowSaves:
    """Owned and locked by the coordinator. One word for each step at most."""

    def __init__(self, floor_s: float = _FLOOR_S) -> None:
        self._floor_s = floor_s
        self._began_at: dict[int, float] = {}
        self._said: set[int] = set()
        self._explained: set[int] = set()
        self._totals: deque[float] = deque(maxlen=_REMEMBERED)
        self._parts: deque[Mapping[str, float]] = deque(maxlen=_REMEMBERED)

    def begin(self, step: int, now_s: float) -> None:
        """The first sign of the save of ``step``."""
        self._began_at.setdefault(step, now_s)

    def explain(self, step: int) -> None:
        """The store fails the save of ``step``, which was said. That holds up every other save under way as well, and
        their times say nothing about what is usual."""
        self._explained |= {step, *self._began_at}

    def forget(self, step: int) -> None:
        """It was given up: its time says nothing about the next."""
        self._began_at.pop(step, None)
        self._said.discard(step)
        self._explained.discard(step)

    def forget_all(self) -> None:
        self._began_at.clear()
        self._said.clear()
        self._explained.clear()

    def committed(self, step: int, receipts: Sequence[Receipt], commit_s: float, now_s: float) -> SlowSave | None:
        """Take a save's times in; the word about it when it was slow and was not called so before."""
        began_at = self._began_at.get(step, now_s)
        is_said, is_explained = step in self._said, step in self._explained
        self.forget(step)
        if is_explained:
            return None
        total_s = now_s - began_at
        parts = {name: max(map(part, receipts)) for name, part in _PARTS.items()} | {_COMMIT: commit_s}
        limit_s, usual_s = self._limit_s(), self._usual_s()
        slow = None
        if total_s > limit_s and not is_said:
            slow = SlowSave(step=step, seconds=total_s, usual_s=usual_s, cause=self._cause(parts, receipts))
        self._totals.append(total_s)
        self._parts.append(parts)
        return slow

    def overdue(self, missing: Mapping[int, Sequence[int]], now_s: float) -> list[SlowSave]:
        """Saves under way that are late by now. ``missing``: for each step the ranks without a Receipt."""
        limit_s, usual_s = self._limit_s(), self._usual_s()
        slow = []
        for step, ranks in missing.items():
            waited_s = now_s - self._began_at.setdefault(step, now_s)
            if waited_s <= limit_s or step in self._said | self._explained:
                continue
            self._said.add(step)
            shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
            cause = f"still encoding or uploading: rank {shown}" if ranks else _WORDS[_COMMIT]
            slow.append(SlowSave(step=step, seconds=waited_s, usual_s=usual_s, cause=cause))
        return slow

    def _usual_s(self) -> float:
        return median(self._totals) if self._totals else 0.0

    def _limit_s(self) -> float:
        if len(self._totals) < _FEWEST:
            return float("inf")
        return max(self._floor_s, _MANY_TIMES * self._usual_s())

    def _cause(self, parts: Mapping[str, float], receipts: Sequence[Receipt]) -> str:
        """The part that grew most over what it usually takes; with the rank whose Shard it was."""
        growth = {name: value - median(before[name] for before in self._parts) for name, value in parts.items()}
        name = max(growth, key=lambda part: growth[part])
        if name == _COMMIT:
            return _WORDS[name]
        slowest = max(receipts, key=_PARTS[name])
        return f"{_WORDS[name]} (rank {slowest.shard.rank}: {parts[name]:.1f} s)"

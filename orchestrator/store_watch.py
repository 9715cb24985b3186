"""What is known of the store and of the work that no Checkpoint holds yet. A plain ledger; time is an argument.

Fed with Signals and with the driver's own failing calls. What follows from it is `storage_policy`'s business.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from orchestrator.save_backoff import LONGEST_BACKOFF_S
from orchestrator.signals import Committed, SaveBound, SaveDelayed, SaveFailed, SaveSkipped, Signal, StepFinished
from storage.errors import StoreRefused, StoreUnavailable

__all__ = ["StoreFacts", "StoreNews", "StoreUser", "StoreWatch"]

_REMIND_S = 10.0
_SILENT_S = 60.0
_REMEMBERED = 1024
_STORE_ERRORS = (StoreUnavailable.__name__, StoreRefused.__name__)  # as the reason of a failed save begins with


class StoreUser(StrEnum):
    """Who needs the store; each is in trouble, or not, by itself."""

    SAVES = "saves"
    PLAN = "plan"
    LOADING = "loading"
    JOURNAL = "journal"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFacts:
    """``away_s`` None: the store answers. ``at_risk_*``: training after the newest durable Checkpoint."""

    away_s: float | None
    reason: str
    failed_in_row: int
    last_failure: str
    durable_step: int
    at_risk_steps: int
    at_risk_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreNews:
    """An event to be written."""

    event: str
    fields: dict[str, Any]


@dataclass(slots=True, kw_only=True)
class _Trouble:
    """``step``: the newest that could not be saved; only a Commit of it, or of a later one, proves the store good.
    ``num_asked``: saves that were asked for to find out."""

    since_s: float
    seen_at_s: float
    reason: str
    step: int = 0
    num_asked: int = 0


class StoreWatch:
    """One per driver."""

    def __init__(self) -> None:
        self._troubles: dict[StoreUser, _Trouble] = {}
        self._news: list[StoreNews] = []
        self._reminded_at_s = 0.0
        self._away_since_s: float | None = None
        self._num_failed = self._num_skipped = 0  # in this outage
        # When saves failed and were skipped outside one: an outage has gone on for a while before anyone hears of it.
        self._failed_at_s, self._skipped_at_s = deque[float](maxlen=_REMEMBERED), deque[float](maxlen=_REMEMBERED)
        self._peak_steps, self._peak_s = 0, 0.0  # at risk, in this outage
        self._failed_in_row = 0
        self._last_failure = ""
        self._bound_at_s: dict[int, float] = {}
        self._durable_step = self._newest_step = 0
        self._durable_at_s: float | None = None

    @property
    def is_away(self) -> bool:
        return bool(self._troubles)

    def facts(self, now_s: float) -> StoreFacts:
        oldest = min(self._troubles.values(), key=lambda trouble: trouble.since_s, default=None)
        at_risk_steps = max(0, self._newest_step - self._durable_step)
        began_s = now_s if self._durable_at_s is None else self._durable_at_s
        return StoreFacts(
            away_s=None if oldest is None else now_s - oldest.since_s,
            reason="" if oldest is None else oldest.reason,
            failed_in_row=self._failed_in_row,
            last_failure=self._last_failure,
            durable_step=self._durable_step,
            at_risk_steps=at_risk_steps,
            at_risk_s=max(0.0, now_s - began_s) if at_risk_steps else 0.0,
        )

    def begin_attempt(self, restored_step: int, now_s: float, durable_step: int | None = None) -> None:
        """A new Attempt goes on from ``restored_step``; the saves of the one before are forgotten.

        ``durable_step``: of the newest Checkpoint, where it went on from memory.
        """
        self._note_peak(now_s)
        self._newest_step = restored_step
        self._durable_step = restored_step if durable_step is None else min(durable_step, restored_step)
        if self._durable_step == restored_step or self._durable_at_s is None:
            self._durable_at_s = now_s
        self._bound_at_s.clear()
        self.answered(StoreUser.SAVES, now_s)

    def note(self, signal: Signal, now_s: float) -> None:
        match signal:
            case StepFinished(report=report):
                self._newest_step = max(self._newest_step, report.step)
                self.answered(StoreUser.LOADING, now_s)
            case SaveBound(bound=bound):
                self._bound_at_s[bound.step] = now_s
            case SaveDelayed():
                where = "its Commit" if signal.rank is None else f"rank {signal.rank}"
                reason = f"save of step {signal.step}, {where}: {signal.reason}"
                self._save_failed(signal.step, reason, now_s, signal.failing_for_s)
            case SaveFailed(step=step, reason=reason):
                self._failed_in_row += 1
                self._last_failure = f"save of step {step}, {reason}"
                # A Keeper that has a newer one to try gives the older up without a word of delay.
                if any(f"{name}: " in reason for name in _STORE_ERRORS):
                    self._save_failed(step, self._last_failure, now_s, 0.0)
                self._num_failed += self._counts(self._failed_at_s, now_s)
                self._bound_at_s.pop(step, None)
            case SaveSkipped(step=step):
                self._num_skipped += self._counts(self._skipped_at_s, now_s)
                self._bound_at_s.pop(step, None)
            case Committed(step=step):
                self._note_peak(now_s)
                self._failed_in_row = 0
                if step >= self._durable_step:
                    self._durable_step = step
                    self._durable_at_s = self._bound_at_s.get(step, now_s)
                self._bound_at_s = {bound: at_s for bound, at_s in self._bound_at_s.items() if bound > step}
                trouble = self._troubles.get(StoreUser.SAVES)
                if trouble is not None and step >= trouble.step:
                    self.answered(StoreUser.SAVES, now_s)
            case _:
                pass

    def failed(self, user: StoreUser, reason: str, now_s: float, *, failing_for_s: float = 0.0) -> None:
        """A call of ``user`` failed, as it has for ``failing_for_s``."""
        trouble = self._troubles.setdefault(
            user, _Trouble(since_s=now_s - failing_for_s, seen_at_s=now_s, reason=reason)
        )
        trouble.seen_at_s, trouble.reason = now_s, reason
        if self._away_since_s is None:
            self._away_since_s = trouble.since_s
            self._reminded_at_s = now_s
            self._num_failed = sum(at_s >= trouble.since_s for at_s in self._failed_at_s)
            self._num_skipped = sum(at_s >= trouble.since_s for at_s in self._skipped_at_s)
            self._failed_at_s.clear()
            self._skipped_at_s.clear()
            self._peak_steps, self._peak_s = 0, 0.0
            self._news.append(
                StoreNews(event="store_away", fields={"reason": reason, "away_s": now_s - trouble.since_s})
            )

    def _counts(self, outside: deque[float], now_s: float) -> bool:
        """Whether a save missed now counts for the outage; otherwise it is noted in ``outside``."""
        if not self.is_away:
            outside.append(now_s)
        return self.is_away

    def _save_failed(self, step: int, reason: str, now_s: float, failing_for_s: float) -> None:
        if step <= self._durable_step:
            return  # late word of trouble that is over: a later save is durable
        self.failed(StoreUser.SAVES, reason, now_s, failing_for_s=failing_for_s)
        trouble = self._troubles[StoreUser.SAVES]
        trouble.step = max(trouble.step, step)

    def answered(self, user: StoreUser, now_s: float) -> None:
        """What ``user`` needs of the store works, or is needed no more."""
        self._troubles.pop(user, None)
        self._end_if_over(now_s)

    def take_news(self, now_s: float) -> list[StoreNews]:
        """What is to be said by now: an outage that began, goes on, or is over."""
        if self.is_away and now_s - self._reminded_at_s >= _REMIND_S:
            self.remind(now_s)
        news, self._news = self._news, []
        return news

    def wants_save(self, now_s: float) -> bool:
        """Whether nobody has spoken of the trouble with saves for long: their save was given up, and only another one
        can tell whether the store is back. True once in a while, after twice the time each time it was in vain."""
        trouble = self._troubles.get(StoreUser.SAVES)
        if trouble is None:
            return False
        if now_s - trouble.seen_at_s < min(_SILENT_S * 2.0**trouble.num_asked, LONGEST_BACKOFF_S):
            return False
        trouble.seen_at_s, trouble.num_asked = now_s, trouble.num_asked + 1
        return True

    def remind(self, now_s: float) -> None:
        """Say how much is at risk by now."""
        self._note_peak(now_s)
        facts = self.facts(now_s)
        self._reminded_at_s = now_s
        fields = {"away_s": facts.away_s, "reason": facts.reason, "durable_step": facts.durable_step}
        risk = {"at_risk_steps": facts.at_risk_steps, "at_risk_s": facts.at_risk_s}
        self._news.append(StoreNews(event="work_at_risk", fields=fields | risk))

    def _note_peak(self, now_s: float) -> None:
        facts = self.facts(now_s)
        self._peak_steps = max(self._peak_steps, facts.at_risk_steps)
        self._peak_s = max(self._peak_s, facts.at_risk_s)

    def _end_if_over(self, now_s: float) -> None:
        if self._troubles or self._away_since_s is None:
            return
        fields = {
            "away_s": now_s - self._away_since_s,
            "saves_failed": self._num_failed,
            "saves_skipped": self._num_skipped,
            "durable_step": self._durable_step,
            "at_risk_steps": self._peak_steps,
            "at_risk_s": self._peak_s,
        }
        self._news.append(StoreNews(event="store_back", fields=fields))
        self._away_since_s = None

"""The driver's dealings with a store that may be away: calls that are repeated, waits that do not count outages.

No Attempt is lost to an outage: whatever the driver needs of the store between two Attempts is tried again, with the
books kept up to date meanwhile, until `storage_policy` or a person ends the Run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, TypeVar

from orchestrator.decisions import Stop
from orchestrator.exit_codes import ExitCode
from orchestrator.recorder import Recorder
from orchestrator.signals import Signal
from orchestrator.storage_policy import decide_on_storage
from orchestrator.store_watch import StoreUser, StoreWatch
from storage.config import CheckpointConfig
from storage.errors import StoreRefused, StoreUnavailable

__all__ = ["StoreWaits"]

T = TypeVar("T")
_log = logging.getLogger(__name__)
_SLICE_S = 0.25
_CHECK_EVERY_S = 1.0
_MOST_SAVES = 2  # under way at the same time
_LAST_TRY_S = 10.0  # for the last save of a Run that ends in an outage
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.5, 5.0


class SaveBoard(Protocol):
    """What this file needs of the coordinator."""

    def drain_signals(self) -> tuple[Signal, ...]: ...

    def wait_settled(self, step: int | None, timeout_s: float) -> bool: ...

    def has_committed(self, step: int) -> bool: ...

    def pending(self) -> dict[int, tuple[int, ...]]: ...

    def submit_snapshot(self, reason: str) -> int: ...

    def check_store(self) -> None: ...


class StoreWaits:
    """One per driver. ``tick`` keeps the books while something is waited for; ``asked_to_stop``: by a person, or since
    another driver took over."""

    def __init__(
        self,
        *,
        coordinator: SaveBoard,
        recorder: Recorder,
        config: CheckpointConfig,
        tick: Callable[[], None],
        asked_to_stop: Callable[[], Stop | None],
        monotonic: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._coordinator = coordinator
        self._recorder = recorder
        self._config = config
        self._tick = tick
        self._asked_to_stop = asked_to_stop
        self._monotonic = monotonic
        self._wall_clock = wall_clock
        self._sleep = sleep
        self._watch = StoreWatch()
        self._stop: Stop | None = None
        self._checked_at = float("-inf")
        self._answers = True

    @property
    def is_away(self) -> bool:
        return self._watch.is_away

    def take_signals(self) -> None:
        """Bring what the coordinator saw into the books and the events."""
        signals = self._coordinator.drain_signals()
        self._recorder.record(signals)
        now = self._monotonic()
        for signal in signals:
            self._watch.note(signal, now)
        self._say(now)
        if self._watch.wants_save(now) and len(self._coordinator.pending()) < _MOST_SAVES:
            self._coordinator.submit_snapshot("no save is under way that would tell whether the store is back")

    def begin_attempt(self, restored_step: int, durable_step: int | None = None) -> None:
        """See StoreWatch.begin_attempt."""
        self._watch.begin_attempt(restored_step, self._monotonic(), durable_step)

    def loading_failed(self, reason: str) -> Stop | None:
        """Ranks could not read a Checkpoint because the store did not answer. Waits a little before the next try."""
        self._watch.failed(StoreUser.LOADING, reason, self._monotonic())
        return self.pause(_LONGEST_DELAY_S)

    def verdict(self) -> Stop | None:
        """The policy's Stop, once it has spoken; then for good."""
        now = self._monotonic()
        if self._stop is None:
            chosen = decide_on_storage(self._watch.facts(now), self._config, now_unix_s=self._wall_clock())
            if isinstance(chosen, Stop):
                self._stop = chosen
                self._watch.remind(now)
                self._say(now)
                _log.error("%s", chosen.reason)
        return self._stop

    def call(self, user: StoreUser, ask: Callable[[], T], *, outlasts_refusals: bool = True) -> T | Stop:
        """``ask()``, again and again while the store is away. Raises what else it raises."""
        delay_s = _FIRST_DELAY_S
        while True:
            try:
                answer = ask()
            except StoreUnavailable as error:
                if isinstance(error, StoreRefused) and not outlasts_refusals:
                    raise
                _log.debug("%s: %s", user.value, error)
                self._watch.failed(user, str(error), self._monotonic())
            else:
                self._watch.answered(user, self._monotonic())
                self._say(self._monotonic())
                return answer
            stop = self.pause(delay_s)
            if stop is not None:
                return stop
            delay_s = min(_LONGEST_DELAY_S, 2 * delay_s)

    def pause(self, seconds: float) -> Stop | None:
        """Wait, ended early by a reason to stop."""
        until = self._monotonic() + seconds
        while True:
            self._tick()
            stop = self.verdict() or self._asked_to_stop()
            left_s = until - self._monotonic()
            if stop is not None or left_s <= 0:
                return stop
            self._sleep(min(_SLICE_S, left_s))

    def wait_settled(
        self, step: int | None, limit_s: float, is_in_vain: Callable[[], bool] = lambda: False
    ) -> Stop | None:
        """Wait until the save of ``step`` (None: every save) is over, at most ``limit_s`` of the time in which the
        store answers. While it is away, a person may end the wait; ``is_in_vain`` ends it at any time."""
        spent_s = 0.0
        seen_at = self._monotonic()
        while not self._coordinator.wait_settled(step, _SLICE_S):
            self._tick()
            if is_in_vain():
                return None
            is_counted = not self.is_away or self._is_answering()
            now = self._monotonic()
            spent_s, seen_at = spent_s + (now - seen_at if is_counted else 0.0), now
            stop = self.verdict() or (None if is_counted else self._asked_to_stop())
            if stop is not None or spent_s >= limit_s:
                return stop
        return None

    def last_try(self, step: int, limit_s: float, stop: Stop) -> Stop:
        """All ranks left for the end: the save they made on leaving gets its time, or a last try in an outage."""
        is_outage = stop.exit_code is ExitCode.STORAGE_OUTAGE
        until, is_short = self._monotonic() + limit_s, False
        while True:
            now = self._monotonic()
            if not is_short and (self.is_away or is_outage):
                until, is_short = min(until, now + _LAST_TRY_S), True
            if now >= until or self._coordinator.wait_settled(step, min(_SLICE_S, until - now)):
                break
            self.take_signals()
        self.take_signals()
        if self._coordinator.has_committed(step):
            after_all = f"{stop.reason}; the last save, of step {step}, was committed after all"
            return replace(stop, reason=after_all) if is_outage else stop
        if is_outage:
            return stop  # its reason says what is lost
        facts = self._watch.facts(self._monotonic())
        durable = f"step {facts.durable_step}" if facts.durable_step else "none"
        lost = f"newest checkpoint: {durable}, {facts.at_risk_steps} steps ({facts.at_risk_s:.0f} s) after it are lost"
        away = f"; the store has been away for {facts.away_s:.0f} s: {facts.reason}" if facts.away_s else ""
        return replace(stop, reason=f"{stop.reason}; the last save, of step {step}, was not committed; {lost}{away}")

    def _is_answering(self) -> bool:
        """A save may be lost for another reason than the outage, and would never be over: so the store is asked."""
        now = self._monotonic()
        if now - self._checked_at >= _CHECK_EVERY_S:
            self._checked_at = now
            try:
                self._coordinator.check_store()
                self._answers = True
            except StoreUnavailable as error:
                _log.debug("the store is still away: %s", error)
                self._answers = False
        return self._answers

    def _say(self, now_s: float) -> None:
        for news in self._watch.take_news(now_s):
            self._recorder.emit(news.event, **news.fields)

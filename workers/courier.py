"""Rank 0's side thread: carries news to the coordinator and brings back the newest Order.

One call is outstanding at a time; the training thread never waits for it. Reports wait in a bounded queue: when the
coordinator stays away for long the oldest are dropped and counted. A call that failed may have arrived, so the same
news can be delivered twice; the coordinator knows a step by its number. It binds nothing and decides nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TypeVar

from storage.keys import Attempt
from workers.contract import (
    BoundOrder,
    CoordinatorPort,
    EvalReport,
    ExchangeReply,
    ExchangeRequest,
    Order,
    ShareReport,
    StepReport,
)
from workers.errors import AttemptAbandoned, CoordinatorUnavailable

__all__ = ["Courier"]

_log = logging.getLogger(__name__)
_POLL_S = 0.1
_RETRY_S = 0.5
_MAX_WAITING = 4096
_MAX_PER_CALL = 256

T = TypeVar("T")


class Courier:
    """Runs from `start` to `close`; every other method belongs to the training thread and returns at once."""

    def __init__(self, coordinator: CoordinatorPort, attempt: Attempt) -> None:
        self._coordinator, self._attempt = coordinator, attempt
        self._changed = threading.Condition()
        self._reports: deque[StepReport] = deque()
        self._evals: deque[EvalReport] = deque()
        self._bound: deque[BoundOrder] = deque()
        self._skipped: deque[int] = deque()
        self._shares: deque[ShareReport] = deque()
        self._num_dropped = 0
        self._order: Order | None = None
        self._settled: set[int] = set()
        self._trouble: str | None = None
        self._is_outdated = self._is_calling = self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=f"courier-{attempt.label}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def report(self, report: StepReport) -> None:
        self._put(self._reports, report)

    def report_eval(self, report: EvalReport) -> None:
        self._put(self._evals, report)

    def report_bound(self, order: BoundOrder) -> None:
        self._put(self._bound, order)

    def report_skipped(self, step: int) -> None:
        self._put(self._skipped, step)

    def report_share(self, report: ShareReport) -> None:
        self._put(self._shares, report)

    def newest_order(self) -> Order | None:
        """The newest Order. Raises AttemptAbandoned once the coordinator serves a newer Attempt."""
        with self._changed:
            if self._is_outdated:
                raise AttemptAbandoned(self._attempt.label, "the coordinator serves a newer one")
            if self._trouble is not None:
                raise RuntimeError(f"rank 0's exchange with the coordinator broke: {self._trouble}")
            return self._order

    def take_settled(self) -> frozenset[int]:
        """Steps whose saves were reported to be over since the last call."""
        with self._changed:
            settled, self._settled = frozenset(self._settled), set()
            return settled

    def flush(self, timeout_s: float) -> bool:
        """Wait until all news is delivered. False when it could not be in time."""
        with self._changed:
            if self._thread.is_alive():
                self._changed.wait_for(self._is_idle, timeout_s)
            return self._is_delivered()

    def close(self, timeout_s: float) -> None:
        """End the thread. News that was not flushed is lost."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _put(self, queue: deque[T], item: T) -> None:
        with self._changed:
            if len(queue) >= _MAX_WAITING:
                queue.popleft()
                self._num_dropped += 1
            queue.append(item)
            self._changed.notify_all()

    def _is_delivered(self) -> bool:
        waiting = (self._reports, self._evals, self._bound, self._skipped, self._shares)
        return not (self._is_calling or any(waiting))

    def _is_idle(self) -> bool:
        return self._is_delivered() or self._is_closing or self._is_outdated or self._trouble is not None

    def _run(self) -> None:
        try:
            while (request := self._next_request()) is not None:
                self._exchange(request)
        except Exception as error:  # noqa: BLE001  the thread's outermost edge: the training thread raises it
            _log.exception("attempt %s: the courier broke", self._attempt.label)
            with self._changed:
                self._is_calling = False
                self._trouble = f"{type(error).__name__}: {error}"
                self._changed.notify_all()

    def _next_request(self) -> ExchangeRequest | None:
        """Waits for news, at most one poll; None when the thread must end. The items stay queued until delivered."""
        with self._changed:
            if not self._is_closing and self._is_delivered():
                self._changed.wait(_POLL_S)
            if self._is_closing or self._is_outdated:
                return None
            self._is_calling = True
            return ExchangeRequest(
                attempt=self._attempt,
                reports=_first(self._reports),
                evals=_first(self._evals),
                bound=_first(self._bound),
                skipped=_first(self._skipped),
                shares=_first(self._shares),
            )

    def _exchange(self, request: ExchangeRequest) -> None:
        started_at = time.monotonic()
        try:
            reply = self._coordinator.exchange(request)
        except CoordinatorUnavailable as error:
            _log.warning("attempt %s: %s; trying again", self._attempt.label, error)
            with self._changed:
                self._is_calling = False
                self._changed.wait_for(lambda: self._is_closing, max(0.0, _RETRY_S - time.monotonic() + started_at))
            return
        self._take(request, reply)

    def _take(self, request: ExchangeRequest, reply: ExchangeReply) -> None:
        with self._changed:
            _drop(self._reports, request.reports)
            _drop(self._evals, request.evals)
            _drop(self._bound, request.bound)
            _drop(self._skipped, request.skipped)
            _drop(self._shares, request.shares)
            if self._num_dropped:
                _log.warning("attempt %s: %d reports were dropped", self._attempt.label, self._num_dropped)
                self._num_dropped = 0
            self._is_calling = False
            self._is_outdated = not reply.is_current
            if reply.order is not None and reply.order.attempt == self._attempt:
                self._order = reply.order
            self._settled.update(reply.settled_steps)
            self._changed.notify_all()


def _first(queue: deque[T]) -> tuple[T, ...]:
    return tuple(queue[index] for index in range(min(len(queue), _MAX_PER_CALL)))


def _drop(queue: deque[T], delivered: tuple[T, ...]) -> None:
    """Take the delivered items off the front; some may have been dropped meanwhile."""
    for item in delivered:
        if queue and queue[0] == item:
            queue.popleft()

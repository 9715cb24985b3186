"""Word from the Keeper to the coordinator, sent again until it is acknowledged: Receipts and failed Snapshots.

It stores nothing: what is not acknowledged when a newer Attempt fences it, or at `close`, is given up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from storage.keeper_protocol import ReceiptSink
from storage.keys import Attempt
from storage.manifest import Receipt

__all__ = ["Outbox", "OutboxMessage"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxMessage:
    """One Receipt, or the reason why there will be none."""

    attempt: Attempt
    step: int
    rank: int
    receipt: Receipt | None
    reason: str = ""


class Outbox:
    """A bounded queue with one delivering thread. A message that fails goes to the back, so none blocks the others."""

    def __init__(
        self,
        sink: ReceiptSink,
        on_error: Callable[[str], None],
        *,
        capacity: int = 256,
        first_wait_s: float = 0.1,
        longest_wait_s: float = 5.0,
    ) -> None:
        self._sink = sink
        self._on_error = on_error
        self._capacity = capacity
        self._first_wait_s, self._longest_wait_s = first_wait_s, longest_wait_s
        self._changed = threading.Condition()
        self._pending: deque[OutboxMessage] = deque()
        self._sending: OutboxMessage | None = None
        self._oldest_attempt = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="keeper-outbox", daemon=True)
        self._thread.start()

    @property
    def num_pending(self) -> int:
        with self._changed:
            return len(self._pending) + (self._sending is not None)

    def put(self, message: OutboxMessage) -> None:
        """Queue ``message``; waits while the queue is full, which in turn holds further Snapshots back."""
        with self._changed:
            while len(self._pending) >= self._capacity and not self._is_closed:
                self._changed.wait(timeout=30.0)
            if not self._is_closed and message.attempt.number >= self._oldest_attempt:
                self._pending.append(message)
                self._changed.notify_all()

    def fence(self, number: int) -> None:
        """Give up every message of an Attempt below ``number``."""
        with self._changed:
            self._oldest_attempt = max(self._oldest_attempt, number)
            self._pending = deque(m for m in self._pending if m.attempt.number >= self._oldest_attempt)
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything is acknowledged; False when time is up or the outbox was closed before."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closed or not (self._pending or self._sending), timeout=max(0.0, timeout_s)
            )
            return not (self._pending or self._sending)

    def close(self, timeout_s: float = 5.0) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        wait_s = self._first_wait_s
        while (message := self._take()) is not None:
            if self._deliver(message):
                wait_s = self._first_wait_s
                self._settle(message, is_done=True)
                continue
            self._settle(message, is_done=False)
            self._pause(wait_s)
            wait_s = min(2 * wait_s, self._longest_wait_s)

    def _take(self) -> OutboxMessage | None:
        with self._changed:
            while not self._pending and not self._is_closed:
                self._changed.wait(timeout=30.0)
            if self._is_closed:
                return None
            self._sending = self._pending.popleft()
            return self._sending

    def _settle(self, message: OutboxMessage, *, is_done: bool) -> None:
        with self._changed:
            self._sending = None
            if not is_done and message.attempt.number >= self._oldest_attempt:
                self._pending.append(message)
            self._changed.notify_all()

    def _pause(self, wait_s: float) -> None:
        until = time.monotonic() + wait_s
        with self._changed:
            while not self._is_closed and (left := until - time.monotonic()) > 0:
                self._changed.wait(timeout=left)

    def _deliver(self, message: OutboxMessage) -> bool:
        where = f"attempt {message.attempt.label} step {message.step} rank {message.rank}"
        try:
            if message.receipt is not None:
                is_taken = self._sink.deliver(message.receipt)
            else:
                is_taken = self._sink.report_failed(message.attempt, message.step, message.rank, message.reason)
        except Exception as error:  # noqa: BLE001 - outer edge of the thread: a dead outbox would lose every Receipt
            self._on_error(f"{where}: delivery to the coordinator failed: {type(error).__name__}: {error}")
            logger.warning("%s: delivery failed and is tried again: %s", where, error)
            return False
        if not is_taken:
            logger.warning("%s: the coordinator did not take the word; it is sent again", where)
        return is_taken

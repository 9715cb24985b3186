"""Word from the Keeper to the coordinator, sent again until it is acknowledged: Receipts and failed Snapshots.

It stores nothing: what is not acknowledged when a newer Attempt fences it, or at `close`, is given up. Word of a delay
is not kept: it is said anew every few seconds while the delay lasts.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from storage.keeper_protocol import ReceiptSink
from storage.keys import Attempt
from storage.manifest import Receipt

__all__ = ["DelayNotice", "Outbox", "OutboxMessage"]

logger = logging.getLogger(__name__)

_BATCH: Final = 64
_IDLE_S: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxMessage:
    """One Receipt, or the reason why there will be none."""

    attempt: Attempt
    step: int
    rank: int
    receipt: Receipt | None
    reason: str = ""

    @property
    def lane(self) -> tuple[int, int]:
        """Messages of one lane are delivered in the order they were put."""
        return self.attempt.number, self.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayNotice:
    """The store has been failing since ``since_s`` on the Keeper's clock; the Snapshot of this step waits for it."""

    attempt: Attempt
    step: int
    rank: int
    reason: str
    since_s: float


class Outbox:
    """A bounded queue with one delivering thread. A lane whose message fails goes to the back, so none blocks others.

    ``on_done`` is told of each message the coordinator took, on the delivering thread.
    """

    def __init__(
        self,
        sink: ReceiptSink,
        on_error: Callable[[str], None],
        on_done: Callable[[OutboxMessage], None] = lambda _: None,
        *,
        capacity: int = 256,
        first_wait_s: float = 0.1,
        longest_wait_s: float = 5.0,
        delay_every_s: float = 3.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sink, self._on_error, self._on_done = sink, on_error, on_done
        self._capacity, self._clock = capacity, clock
        self._first_wait_s, self._longest_wait_s = first_wait_s, longest_wait_s
        self._delay_every_s = delay_every_s
        self._changed = threading.Condition()
        self._pending: list[OutboxMessage] = []
        self._sending: tuple[OutboxMessage, ...] = ()
        self._delays: dict[tuple[int, int], DelayNotice] = {}
        self._delays_due_at_s = time.monotonic()
        self._batch = _BATCH
        self._oldest_attempt = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="keeper-outbox", daemon=True)
        self._thread.start()

    @property
    def num_pending(self) -> int:
        with self._changed:
            return len(self._pending) + len(self._sending)

    def put(self, message: OutboxMessage) -> None:
        """Queue ``message``; waits while the queue is full, which in turn holds further Snapshots back."""
        with self._changed:
            while len(self._pending) >= self._capacity and not self._is_closed:
                self._changed.wait(timeout=_IDLE_S)
            if not self._is_closed and message.attempt.number >= self._oldest_attempt:
                self._pending.append(message)
                self._changed.notify_all()

    def say_delayed(self, notice: DelayNotice) -> None:
        """Tell the coordinator of a delay, now and every few seconds until `end_delay`. Never waits."""
        with self._changed:
            if notice.attempt.number >= self._oldest_attempt:
                self._delays[notice.attempt.number, notice.rank] = notice
                self._changed.notify_all()

    def end_delay(self, attempt: Attempt, rank: int) -> None:
        with self._changed:
            self._delays.pop((attempt.number, rank), None)

    def fence(self, number: int) -> None:
        """Give up every message of an Attempt below ``number``."""
        with self._changed:
            self._oldest_attempt = max(self._oldest_attempt, number)
            self._pending = [m for m in self._pending if m.attempt.number >= self._oldest_attempt]
            self._delays = {lane: n for lane, n in self._delays.items() if lane[0] >= self._oldest_attempt}
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
        while self._wait_for_work():
            self._send_delays()
            batch = self._take()
            if not batch:
                continue
            taken = self._deliver(batch)
            self._settle(batch, taken)
            if all(taken):
                wait_s, self._batch = self._first_wait_s, min(2 * self._batch, _BATCH)
                continue
            self._pause(wait_s)
            wait_s = min(2 * wait_s, self._longest_wait_s)

    def _wait_for_work(self) -> bool:
        with self._changed:
            while not self._is_closed:
                left_s = self._delays_due_at_s - time.monotonic()
                if self._pending or (self._delays and left_s <= 0):
                    return True
                self._changed.wait(timeout=min(_IDLE_S, left_s) if self._delays else _IDLE_S)
        return False

    def _send_delays(self) -> None:
        with self._changed:
            if time.monotonic() < self._delays_due_at_s or not self._delays:
                return
            self._delays_due_at_s = time.monotonic() + self._delay_every_s
            notices = tuple(self._delays.values())
        for notice in notices:
            failing_for_s = self._clock() - notice.since_s
            try:
                self._sink.report_delayed(notice.attempt, notice.step, notice.rank, notice.reason, failing_for_s)
            except Exception as error:  # noqa: BLE001 - outer edge of the thread, as in _deliver
                logger.warning("step %d rank %d: the delay could not be told: %s", notice.step, notice.rank, error)
                return

    def _take(self) -> tuple[OutboxMessage, ...]:
        """The next messages for one call: Receipts in a row, or one failure."""
        with self._changed:
            receipts = itertools.takewhile(lambda m: m.receipt is not None, self._pending[: self._batch])
            self._sending = tuple(receipts) or tuple(self._pending[:1])
            del self._pending[: len(self._sending)]
            return self._sending

    def _settle(self, batch: tuple[OutboxMessage, ...], taken: tuple[bool, ...]) -> None:
        for message, is_taken in zip(batch, taken, strict=True):
            if is_taken:
                self._on_done(message)
        with self._changed:
            self._sending = ()
            left = [m for m, is_taken in zip(batch, taken, strict=True) if not is_taken]
            left = [m for m in left if m.attempt.number >= self._oldest_attempt]
            lanes = {message.lane for message in left}
            # The coordinator takes a Receipt for the end of all earlier steps of its rank: lanes keep their order.
            behind = [m for m in self._pending if m.lane in lanes]
            self._pending = [*(m for m in self._pending if m.lane not in lanes), *left, *behind]
            self._changed.notify_all()

    def _pause(self, wait_s: float) -> None:
        until = time.monotonic() + wait_s
        with self._changed:
            while not self._is_closed and (left := until - time.monotonic()) > 0:
                self._changed.wait(timeout=left)

    def _deliver(self, batch: tuple[OutboxMessage, ...]) -> tuple[bool, ...]:
        first, receipts = batch[0], tuple(m.receipt for m in batch if m.receipt is not None)
        where = f"attempt {first.attempt.label} step {first.step} rank {first.rank} ({len(batch)} in one call)"
        try:
            if receipts:
                taken = tuple(self._sink.deliver_many(receipts))
            else:
                taken = (self._sink.report_failed(first.attempt, first.step, first.rank, first.reason),)
        except Exception as error:  # noqa: BLE001 - outer edge of the thread: a dead outbox would lose every Receipt
            self._on_error(f"{where}: delivery to the coordinator failed: {type(error).__name__}: {error}")
            logger.warning("%s: delivery failed and is tried again: %s", where, error)
            self._batch = 1  # one that cannot be delivered must not take the others with it
            return (False,) * len(batch)
        if len(taken) != len(batch):
            self._on_error(f"{where}: the coordinator answered for {len(taken)}")
            return (False,) * len(batch)
        if not all(taken):
            logger.warning("%s: the coordinator did not take all of it; the rest is sent again", where)
        return taken

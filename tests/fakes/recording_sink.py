"""A ReceiptSink that records what it is told and can refuse, raise or wait on request."""

from __future__ import annotations

import threading

from storage.keys import Attempt
from storage.manifest import Receipt


class RecordingSink:
    """``refusals`` deliveries are answered with False (or raise ``error``) before one is taken."""

    def __init__(self, refusals: int = 0, error: Exception | None = None) -> None:
        self._changed = threading.Condition()
        self._refusals = refusals
        self._error = error
        self.num_calls = 0
        self.receipts: list[Receipt] = []
        self.failures: list[tuple[Attempt, int, int, str]] = []
        self.delays: list[tuple[Attempt, int, int, str, float]] = []

    def deliver(self, receipt: Receipt) -> bool:
        if not self._may_take():
            return False
        with self._changed:
            self.receipts.append(receipt)
            self._changed.notify_all()
        return True

    def deliver_many(self, receipts: tuple[Receipt, ...]) -> tuple[bool, ...]:
        return tuple(self.deliver(receipt) for receipt in receipts)

    def report_delayed(self, attempt: Attempt, step: int, rank: int, reason: str, failing_for_s: float) -> bool:
        with self._changed:
            self.delays.append((attempt, step, rank, reason, failing_for_s))
            self._changed.notify_all()
        return True

    def report_failed(self, attempt: Attempt, step: int, rank: int, reason: str) -> bool:
        if not self._may_take():
            return False
        with self._changed:
            self.failures.append((attempt, step, rank, reason))
            self._changed.notify_all()
        return True

    def wait_for_calls(self, number: int, timeout_s: float = 20.0) -> None:
        """Return once ``number`` deliveries were tried, taken or not."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.num_calls >= number, timeout_s):
                raise AssertionError(f"{self.num_calls} deliveries tried, {number} expected")

    def wait_for_delays(self, number: int, timeout_s: float = 20.0) -> None:
        """Return once ``number`` delays were told."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.delays) >= number, timeout_s):
                raise AssertionError(f"{len(self.delays)} delays told, {number} expected")

    def _may_take(self) -> bool:
        with self._changed:
            self.num_calls += 1
            self._changed.notify_all()
            if self._refusals <= 0:
                return True
            self._refusals -= 1
        if self._error is not None:
            raise self._error
        return False

"""How a Keeper's store has been doing: since when it fails, how often uploads were repeated, when to try again.

It calls nothing and waits for nothing; the Keeper owns and locks it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

__all__ = ["FailingCall", "StoreHealth"]

_SAID_AFTER_S: Final = 10.0  # of failing: less is a hiccup, which retries are for


class FailingCall:
    """Says of one call that it fails, long before its retries are used up where the store is silent: each of them
    takes a whole deadline then."""

    def __init__(self, deadline_s: float, clock: Callable[[], float], say: Callable[[str, float], None]) -> None:
        self._deadline_s, self._clock, self._say = deadline_s, clock, say
        self._since_s: float | None = None

    def note_retry(self, reason: str, tried_s: float) -> None:
        """A call failed after ``tried_s`` and will be sent again."""
        now_s = self._clock()
        if self._since_s is None:
            self._since_s = now_s - tried_s
        if tried_s >= self._deadline_s or now_s - self._since_s >= _SAID_AFTER_S:
            self._say(reason, self._since_s)


class StoreHealth:
    """Fed with the outcome of each upload. ``now_s`` is the Keeper's monotonic clock."""

    def __init__(self, first_wait_s: float, longest_wait_s: float) -> None:
        self._first_wait_s, self._longest_wait_s = first_wait_s, longest_wait_s
        self.failing_since_s: float | None = None
        self.num_retries = 0
        self.num_superseded = 0

    def note_success(self) -> None:
        self.failing_since_s = None

    def note_failure(self, now_s: float) -> float:
        """The store fails an upload, for long or for good; since when it has been failing."""
        if self.failing_since_s is None:
            self.failing_since_s = now_s
        return self.failing_since_s

    def failing_for_s(self, now_s: float) -> float:
        """Seconds since the first failure without a success since; 0.0 while all is well."""
        return 0.0 if self.failing_since_s is None else max(0.0, now_s - self.failing_since_s)

    def wait_s(self, num_failures: int) -> float:
        """Before try ``num_failures`` + 1: doubles up to a limit."""
        return float(min(self._longest_wait_s, self._first_wait_s * 2.0 ** min(num_failures - 1, 32)))

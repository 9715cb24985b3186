"""How often the requests of one piece of work had to be sent again, whatever stores it passes through.

A count per store would mix what several threads send at the same time; here whoever begins the work counts its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock

__all__ = ["RetryTally", "count_retry", "current_tally"]


class RetryTally:
    """Counts what is sent again by this thread inside `counting`. Add from any thread."""

    def __init__(self) -> None:
        self._count = 0
        self._heard: Callable[[str, float], None] | None = None
        self._lock = Lock()

    @property
    def count(self) -> int:
        return self._count

    def add(self) -> None:
        with self._lock:
            self._count += 1

    def hear(self, reason: str, tried_s: float) -> None:
        """A whole call failed after ``tried_s`` and is sent again."""
        self.add()
        if self._heard is not None:
            self._heard(reason, tried_s)

    @contextmanager
    def counting(self, heard: Callable[[str, float], None] | None = None) -> Iterator[None]:
        """Stores called from here on, until the end of the block, count into this tally. ``heard``: of each failure
        that will be tried again its reason, and how long the try took."""
        token = _current.set(self)
        self._heard = heard
        try:
            yield
        finally:
            self._heard = None
            _current.reset(token)


def current_tally() -> RetryTally | None:
    """The tally of the work that this thread is at; None when nobody counts."""
    return _current.get()


def count_retry(reason: str, tried_s: float) -> None:
    """A call failed after ``tried_s`` and is sent again now."""
    tally = _current.get()
    if tally is not None:
        tally.hear(reason, tried_s)


_current: ContextVar[RetryTally | None] = ContextVar("retry_tally", default=None)

"""How often the requests of one piece of work had to be sent again, whatever stores it passes through.

A count per store would mix what several threads send at the same time; here whoever begins the work counts its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock

__all__ = ["RetryTally", "count_retry", "current_tally"]


class RetryTally:
    """Counts what is sent again by this thread inside `counting`. Add from any thread."""

    def __init__(self) -> None:
        self._count = 0
        self._lock = Lock()

    @property
    def count(self) -> int:
        return self._count

    def add(self) -> None:
        with self._lock:
            self._count += 1

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Stores called from here on, until the end of the block, count into this tally."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


def current_tally() -> RetryTally | None:
    """The tally of the work that this thread is at; None when nobody counts."""
    return _current.get()


def count_retry() -> None:
    """Something is sent again now."""
    tally = _current.get()
    if tally is not None:
        tally.add()


_current: ContextVar[RetryTally | None] = ContextVar("retry_tally", default=None)

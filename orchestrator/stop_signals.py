"""SIGINT and SIGTERM as values: collected, not raised, so that nothing is left half done."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["stop_signals"]


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """While it lasts, what comes is appended to the list, in order: an exception would leave half a node behind."""
    received: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda got, _frame: received.append(got)) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

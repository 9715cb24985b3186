"""Work on many items by a pool of threads, the results in the order of the items and within bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor, Future, wait
from typing import Final, TypeVar

__all__ = ["in_order"]

Item = TypeVar("Item")
Result = TypeVar("Result")

_WINDOW_BYTES: Final = 16 << 20  # of items that are being worked on or whose result waits for its turn
_WINDOW_ITEMS: Final = 64
_TIMEOUT_S: Final = 600.0


def in_order(
    work: Callable[[Item], Result], items: Iterable[Item], num_bytes: Callable[[Item], int], pool: Executor | None
) -> Generator[tuple[Item, Result]]:
    """Every item with its result. Without ``pool`` all is done here. An error of ``work`` passes through.

    Close the generator when you leave it early: then no thread is at work on an item any more.
    """
    if pool is None:
        for item in items:
            yield item, work(item)
        return
    pending: deque[tuple[Item, Future[Result]]] = deque()
    pending_bytes = 0
    try:
        for item in items:
            size = num_bytes(item)
            while pending and (pending_bytes + size > _WINDOW_BYTES or len(pending) >= _WINDOW_ITEMS):
                yield pending[0][0], pending[0][1].result(timeout=_TIMEOUT_S)
                pending_bytes -= num_bytes(pending.popleft()[0])
            pending.append((item, pool.submit(work, item)))
            pending_bytes += size
        while pending:
            yield pending[0][0], pending[0][1].result(timeout=_TIMEOUT_S)
            pending.popleft()
    finally:
        # The caller may take the items' memory back next, so no thread may still be reading it.
        wait([future for _, future in pending if not future.cancel()], timeout=_TIMEOUT_S)

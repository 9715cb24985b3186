"""Fetches the next leaves in a thread while a step computes, so that the store's latency is paid beside it.

At most ``depth`` leaves are held or under way. What was fetched ahead counts for nothing: who closes this and asks
anew from a position gets the same leaves again. The thread stops at the first error, which is handed over in its turn.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from workers.leaf_source import Failed, Fetched, LeafSource, Request

__all__ = ["InTurn", "ReadAhead"]

_log = logging.getLogger(__name__)

_TICK_S: Final = 5.0
_CLOSING_S: Final = 2.0


class InTurn:
    """Fetches each leaf when it is asked for."""

    def __init__(self, source: LeafSource, requests: Iterable[Request]) -> None:
        self._source, self._requests = source, iter(requests)

    def next(self) -> Fetched | Failed:
        """The next leaf, or why it did not come."""
        return self._source[next(self._requests)]

    def close(self) -> None:
        """Nothing is under way."""


@dataclass(frozen=True, slots=True)
class _Crashed:
    """An error that is no answer of a store; raised again in the thread that asks."""

    error: Exception


class ReadAhead:
    """Fetches leaves in a thread of its own until it is closed."""

    def __init__(self, source: LeafSource, requests: Iterable[Request], depth: int) -> None:
        self._source, self._requests, self._depth = source, iter(requests), depth
        self._changed = threading.Condition()
        self._ready: deque[Fetched | Failed | _Crashed] = deque()
        self._is_closed = False
        self._thread = threading.Thread(target=self._fetch_ahead, name="data-read-ahead", daemon=True)
        self._thread.start()

    def next(self) -> Fetched | Failed:
        """The next leaf, or why it did not come; waits for it as long as its reads may take."""
        with self._changed:
            while not self._changed.wait_for(lambda: self._ready, _TICK_S):
                if not self._thread.is_alive():
                    raise RuntimeError("nothing reads ahead any more; seek before asking for further leaves")
            got = self._ready.popleft()
            self._changed.notify_all()
        if isinstance(got, _Crashed):
            raise got.error
        return got

    def close(self) -> None:
        """End the thread. A read that hangs is not waited for: the thread ends after it, and drops what it read."""
        with self._changed:
            self._is_closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join(_CLOSING_S)
        if self._thread.is_alive():
            _log.info("a read of data is still under way; its thread ends with it")

    def _fetch_ahead(self) -> None:
        for request in self._requests:
            if not self._has_room():
                return
            got: Fetched | Failed | _Crashed
            try:
                got = self._source[request]
            except Exception as error:  # noqa: BLE001 - the thread's outer edge: raised again where the leaf is asked for
                got = _Crashed(error)
            with self._changed:
                if self._is_closed:
                    return
                self._ready.append(got)
                self._changed.notify_all()
            if not isinstance(got, Fetched):
                return

    def _has_room(self) -> bool:
        """Waits until one more leaf may be fetched; False once this is closed."""
        with self._changed:
            while not self._changed.wait_for(lambda: self._is_closed or len(self._ready) < self._depth, _TICK_S):
                continue
            return not self._is_closed

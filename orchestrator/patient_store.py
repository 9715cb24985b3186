"""A store that, where it is told to, outlasts an outage: failed calls are tried again until the store answers.

The coordinator writes Commits through it, so that a Commit whose Shards are durable is never given up for an outage,
and each write is repeated with the same content. Elsewhere, and after `close`, a call fails as the inner store's does.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from storage.errors import StoreUnavailable
from storage.object_store import ObjectEntry, ObjectStore
from storage.retry_tally import RetryTally
from storage.store_health import FailingCall

__all__ = ["PatientStore"]

T = TypeVar("T")
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.5, 5.0
_SAID_AFTER_S = 10.0


class PatientStore:
    """``limit_s``: longest that one call is tried. ``deadline_s``: of each try, where the caller names none."""

    def __init__(
        self,
        inner: ObjectStore,
        *,
        limit_s: float,
        deadline_s: float = 30.0,
        monotonic: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] | None = None,
    ) -> None:
        self._inner = inner
        self._limit_s = limit_s
        self._deadline_s = deadline_s
        self._monotonic = monotonic
        self._closed = threading.Event()
        self._pause = pause or self._closed.wait
        self._local = threading.local()
        self._trouble: str | None = None

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def trouble(self) -> str | None:
        """What a patient call is failing with at this moment."""
        return self._trouble

    @contextlib.contextmanager
    def patience(self, on_failure: Callable[[str, float], None]) -> Iterator[None]:
        """Inside, calls of this thread are patient; ``on_failure`` hears of each failed try and how long it has been
        failing."""
        self._local.on_failure = on_failure
        try:
            yield
        finally:
            self._local.on_failure = None

    def close(self) -> None:
        """No call is tried again from here on."""
        self._closed.set()

    def put(self, key: str, data: bytes | memoryview, *, deadline_s: float | None = None) -> None:
        self._try(lambda: self._inner.put(key, data, deadline_s=deadline_s or self._deadline_s))

    def create(self, key: str, data: bytes, *, deadline_s: float | None = None) -> None:
        self._try(lambda: self._inner.create(key, data, deadline_s=deadline_s or self._deadline_s))

    def get(self, key: str, *, deadline_s: float | None = None) -> bytes:
        return self._try(lambda: self._inner.get(key, deadline_s=deadline_s or self._deadline_s))

    def get_range(self, key: str, offset: int, length: int, *, deadline_s: float | None = None) -> bytes:
        return self._try(lambda: self._inner.get_range(key, offset, length, deadline_s=deadline_s or self._deadline_s))

    def list(self, prefix: str, *, deadline_s: float | None = None) -> list[ObjectEntry]:
        return self._try(lambda: self._inner.list(prefix, deadline_s=deadline_s or self._deadline_s))

    def delete(self, keys: Sequence[str], *, deadline_s: float | None = None) -> None:
        self._try(lambda: self._inner.delete(keys, deadline_s=deadline_s or self._deadline_s))

    def abort_uploads(self, prefix: str, *, older_than_s: float, deadline_s: float | None = None) -> int:
        limit_s = deadline_s or self._deadline_s
        return self._try(lambda: self._inner.abort_uploads(prefix, older_than_s=older_than_s, deadline_s=limit_s))

    def _try(self, call: Callable[[], T]) -> T:
        on_failure: Callable[[str, float], None] | None = getattr(self._local, "on_failure", None)
        if on_failure is None:
            return call()
        began = self._monotonic()

        def say(reason: str, _: float) -> None:
            """The inner store goes on with its own retries, which take minutes where nothing answers at all."""
            self._trouble = reason
            on_failure(reason, self._monotonic() - began)

        delay_s = _FIRST_DELAY_S
        try:
            while True:
                failing = FailingCall(_SAID_AFTER_S, self._monotonic, say)
                try:
                    with RetryTally().counting(failing.note_retry):
                        return call()
                # Refusals too: rights that were lost while a Run goes on are mended by people, as an outage is.
                except StoreUnavailable as error:
                    failing_for_s = self._monotonic() - began
                    if self._closed.is_set() or failing_for_s >= self._limit_s:
                        raise
                    self._trouble = str(error)
                    on_failure(self._trouble, failing_for_s)
                self._pause(delay_s)
                delay_s = min(_LONGEST_DELAY_S, 2 * delay_s)
        finally:
            self._trouble = None

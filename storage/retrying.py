"""Bounded retries with exponential backoff and full jitter round any store.

Only failures that another try may cure are retried: never a missing or existing object, never a refusal.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from storage.errors import ObjectExists, StorageError, StoreRefused, StoreUnavailable
from storage.object_store import GrowingObject, GrowsObjects, ObjectEntry, ObjectStore, ResumesPuts
from storage.retry_tally import count_retry

__all__ = ["RetryingStore", "backoff_s"]

T = TypeVar("T")
_MOST_SILENT = 2

logger = logging.getLogger(__name__)


def backoff_s(retry: int, *, first_s: float, longest_s: float, rng: random.Random) -> float:
    """Wait before retry number ``retry`` (from 0): evenly drawn below ``first_s * 2**retry``, at most ``longest_s``.

    Full jitter: many ranks that failed together must not come back together.
    """
    return rng.uniform(0.0, min(longest_s, first_s * 2.0 ** min(retry, 32)))


class RetryingStore:
    """An ObjectStore whose calls are tried ``retries`` times more. ``deadline_s`` bounds each single try.

    ``keeps_parts``: what a failed put has stored of its object is not dropped, so that a later one goes on from it.
    A store that does not answer at all is asked twice: what fails at once may pass soon, silence mostly stays.
    """

    def __init__(
        self,
        inner: ObjectStore,
        *,
        retries: int,
        deadline_s: float = 60.0,
        first_delay_s: float = 0.4,
        max_delay_s: float = 10.0,
        keeps_parts: bool = False,
        sleep: Callable[[float], None] = time.sleep,
        rng: random.Random | None = None,
    ) -> None:
        self._inner = inner
        self._retries = retries
        self._deadline_s = deadline_s
        self._first_delay_s = first_delay_s
        self._max_delay_s = max_delay_s
        self._keeps_parts = keeps_parts
        self._sleep = sleep
        self._rng = rng or random.Random()
        self._num_retries = 0
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def inner(self) -> ObjectStore:
        """The store without retries."""
        return self._inner

    @property
    def num_retries(self) -> int:
        """Calls and single parts that had to be sent again since this store was opened."""
        inner = self._inner.num_retries if isinstance(self._inner, ResumesPuts) else 0
        return self._num_retries + inner

    def put(self, key: str, data: bytes | memoryview, *, deadline_s: float | None = None) -> None:
        try:
            self._try(lambda limit: self._inner.put(key, data, deadline_s=limit), deadline_s)
        except StoreUnavailable as error:
            is_final = isinstance(error, StoreRefused) or not self._keeps_parts
            if is_final and isinstance(self._inner, ResumesPuts):
                self._inner.give_up(key)
            raise

    def grow(self, key: str, most_bytes: int, *, deadline_s: float | None = None) -> GrowingObject | None:
        """Not tried again: what it cannot send, the put does."""
        if not isinstance(self._inner, GrowsObjects):
            return None
        return self._inner.grow(key, most_bytes, deadline_s=self._deadline_s if deadline_s is None else deadline_s)

    def create(self, key: str, data: bytes, *, deadline_s: float | None = None) -> None:
        tries = 0

        def create(limit: float) -> None:
            nonlocal tries
            tries += 1
            try:
                self._inner.create(key, data, deadline_s=limit)
            except ObjectExists:
                # An earlier try may have been carried out although its answer was lost: then the object is ours.
                if tries == 1 or self._inner.get(key, deadline_s=limit) != data:
                    raise

        self._try(create, deadline_s)

    def get(self, key: str, *, deadline_s: float | None = None) -> bytes:
        return self._try(lambda limit: self._inner.get(key, deadline_s=limit), deadline_s)

    def get_range(self, key: str, offset: int, length: int, *, deadline_s: float | None = None) -> bytes:
        return self._try(lambda limit: self._inner.get_range(key, offset, length, deadline_s=limit), deadline_s)

    def list(self, prefix: str, *, deadline_s: float | None = None) -> list[ObjectEntry]:
        return self._try(lambda limit: self._inner.list(prefix, deadline_s=limit), deadline_s)

    def delete(self, keys: Sequence[str], *, deadline_s: float | None = None) -> None:
        self._try(lambda limit: self._inner.delete(keys, deadline_s=limit), deadline_s)

    def abort_uploads(self, prefix: str, *, older_than_s: float, deadline_s: float | None = None) -> int:
        def abort(limit: float) -> int:
            return self._inner.abort_uploads(prefix, older_than_s=older_than_s, deadline_s=limit)

        return self._try(abort, deadline_s)

    def _try(self, call: Callable[[float], T], deadline_s: float | None) -> T:
        limit = self._deadline_s if deadline_s is None else deadline_s
        retry = num_silent = 0
        while True:
            began_s = time.monotonic()
            try:
                return call(limit)
            except StoreRefused:
                raise
            except StoreUnavailable as error:
                took_s = time.monotonic() - began_s
                num_silent += took_s >= limit and isinstance(error.__cause__, TimeoutError)
                if retry >= self._retries or num_silent >= _MOST_SILENT:
                    raise
                count_retry(f"{type(error).__name__}: {error}", took_s)
                self._wait(error, retry)
                retry += 1

    def _wait(self, error: StorageError, retry: int) -> None:
        delay_s = backoff_s(retry, first_s=self._first_delay_s, longest_s=self._max_delay_s, rng=self._rng)
        with self._lock:
            self._num_retries += 1
        logger.info("%s; retry %d of %d in %.2f s", error, retry + 1, self._retries, delay_s)
        self._sleep(delay_s)

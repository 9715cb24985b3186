"""Bounded retries with exponential backoff and jitter round any store.

Only failures that another try may cure are retried: never a missing or existing object, never a refusal.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from storage.errors import ObjectExists, StoreRefused, StoreUnavailable
from storage.object_store import ObjectEntry, ObjectStore

__all__ = ["RetryingStore"]

T = TypeVar("T")

logger = logging.getLogger(__name__)


class RetryingStore:
    """An ObjectStore whose calls are tried ``retries`` times more. ``deadline_s`` bounds each single try.

    Before retry n the wait is drawn evenly from the upper half of ``first_delay_s * 2**n``, at most ``max_delay_s``.
    """

    def __init__(
        self,
        inner: ObjectStore,
        *,
        retries: int,
        deadline_s: float = 60.0,
        first_delay_s: float = 0.2,
        max_delay_s: float = 10.0,
        sleep: Callable[[float], None] = time.sleep,
        rng: random.Random | None = None,
    ) -> None:
        self._inner = inner
        self._retries = retries
        self._deadline_s = deadline_s
        self._first_delay_s = first_delay_s
        self._max_delay_s = max_delay_s
        self._sleep = sleep
        self._rng = rng or random.Random()

    @property
    def url(self) -> str:
        return self._inner.url

    def put(self, key: str, data: bytes | memoryview, *, deadline_s: float | None = None) -> None:
        self._try(lambda limit: self._inner.put(key, data, deadline_s=limit), deadline_s)

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

    def _try(self, call: Callable[[float], T], deadline_s: float | None) -> T:
        limit = self._deadline_s if deadline_s is None else deadline_s
        retry = 0
        while True:
            try:
                return call(limit)
            except StoreRefused:
                raise
            except StoreUnavailable as error:
                if retry >= self._retries:
                    raise
                delay_s = self._delay_s(retry)
                retry += 1
                logger.warning("%s; retry %d of %d in %.2f s", error, retry, self._retries, delay_s)
                self._sleep(delay_s)

    def _delay_s(self, retry: int) -> float:
        full = min(self._max_delay_s, self._first_delay_s * 2.0 ** min(retry, 32))
        return full * self._rng.uniform(0.5, 1.0)

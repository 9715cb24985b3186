"""Finds out what a store really does with the requests that servers treat differently, in a few seconds.

For people, logs and reports: nothing decides by these facts whether it is correct. Writes only under a prefix of its
own below `PROBES` and removes it again, unfinished uploads included.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from storage.errors import ObjectExists, StorageError
from storage.keys import PROBES, new_nonce
from storage.object_store import ObjectStore
from storage.retrying import RetryingStore

__all__ = ["Condition", "Seen", "StoreFacts", "learn_store"]

_log = logging.getLogger(__name__)

Condition = Literal["honoured", "ignored", "unsupported", "unknown", "not-applicable"]
Seen = Literal["yes", "no", "unknown"]

_BODY = bytes(range(256)) * 16
_ANSWERS: dict[str, Condition] = {"exists": "honoured", "created": "ignored", "unsupported": "unsupported"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFacts:
    """What one store was seen to do. ``reasons`` tells for each fact that is unknown why."""

    url: str
    create_on_put: Condition
    create_on_complete: Condition
    exact_ranges: Seen
    fresh_after_put: Seen
    fresh_after_delete: Seen
    fresh_after_overwrite: Seen
    clock_skew_s: float | None
    took_s: float
    reasons: dict[str, str]

    @property
    def honours_create(self) -> bool:
        """Whether a create-only put was seen to be refused where the name was taken."""
        return self.create_on_put == "honoured"

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values, by field name."""
        return asdict(self)

    def text(self) -> str:
        """One line for people."""
        facts = {
            "create-only put": self.create_on_put,
            "create-only completion": self.create_on_complete,
            "exact ranges": self.exact_ranges,
            "listed right after a put": self.fresh_after_put,
            "gone right after a delete": self.fresh_after_delete,
            "overwrite visible at once": self.fresh_after_overwrite,
            "clock ahead of ours": "unknown" if self.clock_skew_s is None else f"{self.clock_skew_s:+.1f} s",
        }
        return f"{self.url} ({self.took_s:.1f} s): " + ", ".join(f"{name}: {fact}" for name, fact in facts.items())


@runtime_checkable
class _TriesCreate(Protocol):
    def try_create(self, key: str, data: bytes, *, deadline_s: float = 60.0) -> str: ...


@runtime_checkable
class _TriesCreateInParts(Protocol):
    def try_create_in_parts(self, key: str, data: bytes, *, deadline_s: float = 60.0) -> str: ...


@runtime_checkable
class _TellsClock(Protocol):
    def clock_skew_s(self, *, deadline_s: float = 60.0) -> float | None: ...


def learn_store(store: ObjectStore, *, deadline_s: float = 10.0) -> StoreFacts:
    """Try ``store`` out. Raises StorageError only where a plain put, get or delete fails or reads back other bytes."""
    began_s = time.monotonic()
    probe = _Probe(store, f"{PROBES}{new_nonce()}{new_nonce()}/", deadline_s)
    try:
        facts = probe.facts()
    finally:
        probe.clean_up()
    return StoreFacts(url=store.url, took_s=round(time.monotonic() - began_s, 3), reasons=dict(probe.reasons), **facts)


class _Probe:
    def __init__(self, store: ObjectStore, prefix: str, deadline_s: float) -> None:
        self._store = store
        self._inner = _unwrapped(store)
        self._prefix = prefix
        self._deadline_s = deadline_s
        self._keys = {name: f"{prefix}{name}" for name in ("object", "parts")}
        self.reasons: dict[str, str] = {}

    def facts(self) -> dict[str, Any]:
        key = self._keys["object"]
        self._store.put(key, _BODY, deadline_s=self._deadline_s)
        if self._store.get(key, deadline_s=self._deadline_s) != _BODY:
            raise StorageError(f"{key} reads back other bytes than were written to {self._store.url}")
        facts: dict[str, Any] = {
            "fresh_after_put": self._ask("fresh_after_put", lambda: _seen(self._is_listed()), "unknown"),
            "exact_ranges": self._ask("exact_ranges", self._exact_ranges, "unknown"),
            "create_on_put": self._ask("create_on_put", self._create_on_put, "unknown"),
            "create_on_complete": self._ask("create_on_complete", self._create_on_complete, "unknown"),
            "fresh_after_overwrite": self._ask("fresh_after_overwrite", self._overwrite, "unknown"),
            "clock_skew_s": self._ask("clock_skew_s", self._clock_skew_s, None),
        }
        self._store.delete([key], deadline_s=self._deadline_s)
        gone = self._ask("fresh_after_delete", lambda: _seen(not self._is_listed()), "unknown")
        return facts | {"fresh_after_delete": gone}

    def clean_up(self) -> None:
        """What was written goes by name, since a listing may lag; then what a listing still shows."""
        try:
            self._store.delete([*self._keys.values()], deadline_s=self._deadline_s)
            left = [entry.key for entry in self._store.list(self._prefix, deadline_s=self._deadline_s)]
            self._store.delete(left, deadline_s=self._deadline_s)
            self._store.abort_uploads(self._prefix, older_than_s=0.0, deadline_s=self._deadline_s)
        except StorageError as error:
            _log.warning("remains of a probe may stay under %s of %s: %s", self._prefix, self._store.url, error)

    def _ask(self, name: str, question: Callable[[], Any], otherwise: Any) -> Any:
        try:
            return question()
        except StorageError as error:
            self.reasons[name] = str(error)
            return otherwise

    def _is_listed(self) -> bool:
        found = self._store.list(self._prefix, deadline_s=self._deadline_s)
        return any(entry.key == self._keys["object"] for entry in found)

    def _exact_ranges(self) -> Seen:
        spans = ((0, 1), (7, 100), (len(_BODY) - 3, 3))
        key = self._keys["object"]
        return _seen(
            all(
                self._store.get_range(key, offset, length, deadline_s=self._deadline_s)
                == _BODY[offset : offset + length]
                for offset, length in spans
            )
        )

    def _create_on_put(self) -> Condition:
        if isinstance(self._inner, _TriesCreate):
            return _ANSWERS[self._inner.try_create(self._keys["object"], _BODY, deadline_s=self._deadline_s)]
        try:
            self._store.create(self._keys["object"], _BODY, deadline_s=self._deadline_s)
        except ObjectExists:
            return "honoured"
        return "ignored"

    def _create_on_complete(self) -> Condition:
        if not isinstance(self._inner, _TriesCreateInParts):
            return "not-applicable"
        key = self._keys["parts"]
        self._store.put(key, _BODY, deadline_s=self._deadline_s)
        return _ANSWERS[self._inner.try_create_in_parts(key, _BODY, deadline_s=self._deadline_s)]

    def _overwrite(self) -> Seen:
        key, newer = self._keys["object"], _BODY[::-1]
        self._store.put(key, newer, deadline_s=self._deadline_s)
        return _seen(self._store.get(key, deadline_s=self._deadline_s) == newer)

    def _clock_skew_s(self) -> float | None:
        if not isinstance(self._inner, _TellsClock):
            self.reasons["clock_skew_s"] = "this kind of store tells no time"
            return None
        skew_s = self._inner.clock_skew_s(deadline_s=self._deadline_s)
        if skew_s is None:
            self.reasons["clock_skew_s"] = "the store told no time"
            return None
        return round(skew_s, 1)


def _seen(fact: bool) -> Seen:
    return "yes" if fact else "no"


def _unwrapped(store: ObjectStore) -> ObjectStore:
    """The store itself: what it answers to one request, not what retries make of it."""
    while True:
        inner = store.inner if isinstance(store, RetryingStore) else getattr(store, "inner", None)
        if inner is None:
            return store
        store = inner

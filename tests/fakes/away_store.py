"""A store in memory that is away whenever a test says so."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from storage.errors import StoreUnavailable
from storage.memory_store import MemoryStore
from storage.object_store import ObjectEntry

__all__ = ["AwayStore"]


class AwayStore(MemoryStore):
    """While ``is_away`` every call on a key that begins with ``prefix`` fails; ``failed`` is set by
    the first, ``failed_often`` by the third. ``before_call`` may hold such a call up."""

    def __init__(self, name: str = "away", *, prefix: str = "") -> None:
        super().__init__(name)
        self.is_away = False
        self.before_call: Callable[[], object] = lambda: None
        self.prefix = prefix
        self.num_failed = 0
        self.failed = threading.Event()
        self.failed_often = threading.Event()

    def put(self, key: str, data: bytes | memoryview, *, deadline_s: float = 60.0) -> None:
        self._check("put", key)
        super().put(key, data, deadline_s=deadline_s)

    def create(self, key: str, data: bytes, *, deadline_s: float = 60.0) -> None:
        self._check("create", key)
        super().create(key, data, deadline_s=deadline_s)

    def get(self, key: str, *, deadline_s: float = 60.0) -> bytes:
        self._check("get", key)
        return super().get(key, deadline_s=deadline_s)

    def list(self, prefix: str, *, deadline_s: float = 60.0) -> list[ObjectEntry]:
        self._check("list", prefix)
        return super().list(prefix, deadline_s=deadline_s)

    def delete(self, keys: Sequence[str], *, deadline_s: float = 60.0) -> None:
        for key in keys:
            self._check("delete", key)
        super().delete(keys, deadline_s=deadline_s)

    def _check(self, operation: str, key: str) -> None:
        if key.startswith(self.prefix):
            self.before_call()
        if self.is_away and key.startswith(self.prefix):
            self.num_failed += 1
            self.failed.set()
            if self.num_failed >= 3:
                self.failed_often.set()
            raise StoreUnavailable(operation, key, "connection refused")

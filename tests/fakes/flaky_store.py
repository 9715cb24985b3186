"""An in-memory store whose puts fail until they are told to work, can be held up, and can spoil what they store."""

from __future__ import annotations

import threading

from storage.errors import StoreUnavailable
from storage.memory_store import MemoryStore


class FlakyStore(MemoryStore):
    """``is_away``: every put raises ``error``. ``spoil_puts``: so many puts store a changed index."""

    def __init__(self, *, is_away: bool = False, spoil_puts: int = 0) -> None:
        super().__init__("flaky")
        self._changed = threading.Condition()
        self._is_away = is_away
        self._spoil_puts = spoil_puts
        self.error: Exception = StoreUnavailable("put", "shards/any", "503 for the sixth time")
        self.tried: list[str] = []
        self.stored: list[str] = []

    def put(self, key: str, data: bytes | memoryview, *, deadline_s: float = 60.0) -> None:
        with self._changed:
            self.tried.append(key)
            self._changed.notify_all()
            if self._is_away:
                raise self.error
            is_spoilt = self._spoil_puts > 0
            self._spoil_puts -= is_spoilt
        content = bytearray(data)
        if is_spoilt:
            content[-30] ^= 1
        super().put(key, bytes(content), deadline_s=deadline_s)
        with self._changed:
            self.stored.append(key)
            self._changed.notify_all()

    def come_back(self) -> None:
        with self._changed:
            self._is_away = False

    def go_away(self) -> None:
        with self._changed:
            self._is_away = True

    def wait_for_tries(self, key: str, number: int, timeout_s: float = 20.0) -> None:
        """Return once ``number`` puts of ``key`` have begun."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.tried.count(key) >= number, timeout_s):
                raise AssertionError(f"{self.tried.count(key)} puts of {key} began, {number} expected: {self.tried}")

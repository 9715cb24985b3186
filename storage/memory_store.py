"""The in-memory twin of every other store: a thread-safe dictionary with the same rules.

Nothing is durable; it serves tests and short experiments inside one process.
"""

# ruff: noqa: ARG002 - deadlines belong to the interface; nothing here can block
from __future__ import annotations

import threading
from collections.abc import Sequence

from storage.errors import ObjectExists, ObjectMissing, StoreUnavailable
from storage.object_keys import checked_name, inside
from storage.object_store import ObjectEntry

__all__ = ["MemoryStore"]


class MemoryStore:
    """Objects of one root, kept in memory."""

    def __init__(self, name: str = "unnamed") -> None:
        self._url = f"memory://{name}"
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return self._url

    def put(self, key: str, data: bytes | memoryview, *, deadline_s: float = 60.0) -> None:
        checked_name(key, self._url)
        content = bytes(data)
        with self._lock:
            self._objects[key] = content

    def create(self, key: str, data: bytes, *, deadline_s: float = 60.0) -> None:
        checked_name(key, self._url)
        content = bytes(data)
        with self._lock:
            if key in self._objects:
                raise ObjectExists(key)
            self._objects[key] = content

    def get(self, key: str, *, deadline_s: float = 60.0) -> bytes:
        inside(key, self._url)
        with self._lock:
            content = self._objects.get(key)
        if content is None:
            raise ObjectMissing(key, self._url)
        return content

    def get_range(self, key: str, offset: int, length: int, *, deadline_s: float = 60.0) -> bytes:
        part = self.get(key)[offset : offset + length]
        if len(part) != length:
            raise StoreUnavailable("get_range", key, f"{len(part)} of {length} bytes at offset {offset}")
        return part

    def list(self, prefix: str, *, deadline_s: float = 60.0) -> list[ObjectEntry]:
        inside(prefix, self._url)
        with self._lock:
            found = [
                ObjectEntry(key=key, size=len(content))
                for key, content in self._objects.items()
                if key.startswith(prefix)
            ]
        return sorted(found, key=lambda entry: entry.key)

    def delete(self, keys: Sequence[str], *, deadline_s: float = 60.0) -> None:
        with self._lock:
            for key in keys:
                self._objects.pop(key, None)

    def abort_uploads(self, prefix: str, *, older_than_s: float, deadline_s: float = 60.0) -> int:
        return 0

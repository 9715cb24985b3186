"""A store that reads through to another one and keeps every write to itself, so that "what would happen" can be asked.

Nothing ever reaches the store below. Writes live in memory: meant for small records, not for Shards.
"""

# ruff: noqa: ARG002 - deadlines belong to the interface; nothing here can block
from __future__ import annotations

from collections.abc import Sequence

from storage.errors import ObjectExists, ObjectMissing, StoreUnavailable
from storage.object_store import ObjectEntry, ObjectStore

__all__ = ["OverlayStore"]


class OverlayStore:
    """An ObjectStore over ``inner``. A key that was written or deleted here hides the one below."""

    def __init__(self, inner: ObjectStore) -> None:
        self._inner = inner
        self._own: dict[str, bytes | None] = {}

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def written(self) -> dict[str, bytes]:
        """What would have been written, by key."""
        return {key: content for key, content in self._own.items() if content is not None}

    @property
    def deleted(self) -> list[str]:
        return sorted(key for key, content in self._own.items() if content is None)

    def put(self, key: str, data: bytes | memoryview, *, deadline_s: float = 60.0) -> None:
        self._own[key] = bytes(data)

    def create(self, key: str, data: bytes, *, deadline_s: float = 60.0) -> None:
        if any(entry.key == key for entry in self.list(key.rpartition("/")[0] + "/")):
            raise ObjectExists(key)
        self._own[key] = bytes(data)

    def get(self, key: str, *, deadline_s: float = 60.0) -> bytes:
        if key not in self._own:
            return self._inner.get(key, deadline_s=deadline_s)
        content = self._own[key]
        if content is None:
            raise ObjectMissing(key, self.url)
        return content

    def get_range(self, key: str, offset: int, length: int, *, deadline_s: float = 60.0) -> bytes:
        if key not in self._own:
            return self._inner.get_range(key, offset, length, deadline_s=deadline_s)
        part = self.get(key)[offset : offset + length]
        if len(part) != length:
            raise StoreUnavailable("get_range", key, f"{len(part)} of {length} bytes at offset {offset}")
        return part

    def list(self, prefix: str, *, deadline_s: float = 60.0) -> list[ObjectEntry]:
        below = [entry for entry in self._inner.list(prefix, deadline_s=deadline_s) if entry.key not in self._own]
        here = [
            ObjectEntry(key=key, size=len(content))
            for key, content in self._own.items()
            if content is not None and key.startswith(prefix)
        ]
        return sorted([*below, *here], key=lambda entry: entry.key)

    def delete(self, keys: Sequence[str], *, deadline_s: float = 60.0) -> None:
        for key in keys:
            self._own[key] = None

    def abort_uploads(self, prefix: str, *, older_than_s: float, deadline_s: float = 60.0) -> int:
        return 0

"""Tells how many bytes are read through a store, so that long work can show where it is. Changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from storage.object_store import ObjectEntry, ObjectStore

__all__ = ["MeteredStore"]


class MeteredStore:
    """An ObjectStore over ``inner``; ``on_read`` is told the length of every ranged read."""

    def __init__(self, inner: ObjectStore, on_read: Callable[[int], None]) -> None:
        self._inner = inner
        self._on_read = on_read

    @property
    def url(self) -> str:
        return self._inner.url

    def put(self, key: str, data: bytes | memoryview, *, deadline_s: float = 60.0) -> None:
        self._inner.put(key, data, deadline_s=deadline_s)

    def create(self, key: str, data: bytes, *, deadline_s: float = 60.0) -> None:
        self._inner.create(key, data, deadline_s=deadline_s)

    def get(self, key: str, *, deadline_s: float = 60.0) -> bytes:
        return self._inner.get(key, deadline_s=deadline_s)

    def get_range(self, key: str, offset: int, length: int, *, deadline_s: float = 60.0) -> bytes:
        part = self._inner.get_range(key, offset, length, deadline_s=deadline_s)
        self._on_read(len(part))
        return part

    def list(self, prefix: str, *, deadline_s: float = 60.0) -> list[ObjectEntry]:
        return self._inner.list(prefix, deadline_s=deadline_s)

    def delete(self, keys: Sequence[str], *, deadline_s: float = 60.0) -> None:
        self._inner.delete(keys, deadline_s=deadline_s)

    def abort_uploads(self, prefix: str, *, older_than_s: float, deadline_s: float = 60.0) -> int:
        return self._inner.abort_uploads(prefix, older_than_s=older_than_s, deadline_s=deadline_s)

"""Reads byte ranges of Shard objects from the object store: the last and farthest Tier of a RestorePlan.

What it returns is unchecked: the reader compares digests.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

from storage.errors import ObjectMissing, StoreUnavailable
from storage.object_store import ObjectStore
from storage.sources import ShardLocation, ShardRange

__all__ = ["ObjectStoreSource", "ObjectTooShort"]


class ObjectTooShort(ObjectMissing):
    """The object exists, but ends before the bytes that were committed. ``size`` is what the store lists."""

    def __init__(self, key: str, size: int, needed: int) -> None:
        super().__init__(key)
        self.args = (key, size, needed)
        self.size, self.needed = size, needed

    def __str__(self) -> str:
        return f"object {self.key} has {self.size} bytes, at least {self.needed} were committed"


class ObjectStoreSource:
    """A ShardSource over ``store``. Counts the bytes it fetched; safe to call from several threads."""

    def __init__(self, store: ObjectStore, *, deadline_s: float = 120.0) -> None:
        self._store = store
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._bytes_read = 0

    @property
    def bytes_read(self) -> int:
        with self._lock:
            return self._bytes_read

    def read_range(self, location: ShardLocation, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes. Raises ObjectMissing (ObjectTooShort) or StoreUnavailable."""
        key = location.location
        try:
            data = self._store.get_range(key, offset, length, deadline_s=self._deadline_s)
        except StoreUnavailable as error:
            self._check_size(key, offset + length, error)
            raise
        with self._lock:
            self._bytes_read += len(data)
        return data

    def other_copies(self, location: ShardLocation) -> Iterator[ShardRange]:  # noqa: ARG002
        """None: an object is the last copy there is."""
        return iter(())

    def _check_size(self, key: str, needed: int, error: StoreUnavailable) -> None:
        """A store that answers, with an object too short, is not an outage: the Checkpoint is broken."""
        folder = key.rpartition("/")[0]
        for entry in self._store.list(f"{folder}/", deadline_s=self._deadline_s):
            if entry.key == key and entry.size < needed:
                raise ObjectTooShort(key, entry.size, needed) from error

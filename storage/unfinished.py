"""Finds uploads that were begun and never ended, where a store can tell. Reads only; sweeping them is the sweeper's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from storage.errors import StorageError
from storage.object_store import ObjectStore

__all__ = ["unfinished_uploads"]


@runtime_checkable
class _TellsUploads(Protocol):
    def unfinished_uploads(self, prefix: str, *, deadline_s: float = 60.0) -> Sequence[str]: ...


def unfinished_uploads(store: ObjectStore) -> Sequence[str] | None:
    """Keys below the root with such an upload; None where the store does not tell."""
    while not isinstance(store, _TellsUploads):
        inner = getattr(store, "inner", None)
        if inner is None:
            return None
        store = inner
    try:
        return store.unfinished_uploads("")
    except StorageError:  # no rights to list them, or a server that knows no such request: a hint less, no damage
        return None

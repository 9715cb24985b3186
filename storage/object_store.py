"""The small interface through which every stored byte passes, and `open_store`, which picks an implementation by URL.

Keys are relative to the store's root URL and never start with a slash. Listings are never cached. Every call has a
deadline of its own, because some servers let a put hang for ever: ``deadline_s`` is the longest wait for a sign of
life, and a large transfer is given the time its bytes need on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

__all__ = ["GrowingObject", "GrowsObjects", "ObjectEntry", "ObjectStore", "ResumesPuts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectEntry:
    """One listed object: key relative to the root, size in bytes."""

    key: str
    size: int


class ObjectStore(Protocol):
    """What Raysume asks of a place that keeps bytes. Each method raises StoreUnavailable when the deadline passes."""

    @property
    def url(self) -> str:
        """The root URL, without credentials."""
        ...

    def put(self, key: str, data: bytes | memoryview, *, deadline_s: float = 60.0) -> None:
        """Write the whole object or nothing; replaces an older one; durable when it returns."""
        ...

    def create(self, key: str, data: bytes, *, deadline_s: float = 60.0) -> None:
        """Like put, but raises ObjectExists where the store honours create-only writes. One more guard, no more."""
        ...

    def get(self, key: str, *, deadline_s: float = 60.0) -> bytes:
        """The whole object. Raises ObjectMissing."""
        ...

    def get_range(self, key: str, offset: int, length: int, *, deadline_s: float = 60.0) -> bytes:
        """Exactly ``length`` bytes from ``offset``. Raises ObjectMissing, or StoreUnavailable on a short read."""
        ...

    def list(self, prefix: str, *, deadline_s: float = 60.0) -> list[ObjectEntry]:
        """Every object under ``prefix`` (a folder ending in a slash), sorted by key. Empty is no error."""
        ...

    def delete(self, keys: Sequence[str], *, deadline_s: float = 60.0) -> None:
        """Remove objects; a key that is already gone is no error."""
        ...

    def abort_uploads(self, prefix: str, *, older_than_s: float, deadline_s: float = 60.0) -> int:
        """Remove what interrupted puts of keys under ``prefix`` left behind and nobody sees; returns how many.

        An upload that began less than ``older_than_s`` ago may be going on and stays. No object is ever touched.
        """
        ...


@runtime_checkable
class ResumesPuts(Protocol):
    """A store in which a failed put leaves parts behind that the next put of the key goes on from."""

    @property
    def num_retries(self) -> int:
        """Requests that were sent again inside one call."""
        ...

    def give_up(self, key: str, *, deadline_s: float = 10.0) -> None:
        """Nobody will try the put of ``key`` again: remove its parts. Never raises; what stays is logged."""
        ...


class GrowingObject(Protocol):
    """One object that is sent while it is made. It spares the put work and proves nothing: what it could not send, the
    put of the whole sends. Nobody sees the object before that put."""

    def write(self, data: bytes | memoryview, /) -> object:
        """The next bytes. Never waits and never raises; ``data`` may be changed afterwards."""
        ...

    def abandon(self) -> None:
        """No put will follow: stop, and remove what was stored. Never waits, never raises. Nothing once a put began."""
        ...


@runtime_checkable
class GrowsObjects(Protocol):
    """A store that can send parts of an object before the whole is known."""

    def grow(self, key: str, most_bytes: int, *, deadline_s: float = 60.0) -> GrowingObject | None:
        """An object that will have at most ``most_bytes`` and be put as ``key`` once it is whole, or be abandoned.

        None where it is not worth it, or not known yet how it would be cut.
        """
        ...

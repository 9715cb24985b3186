"""Which keys a store takes: none that leads outside its root, and new ones only of characters that every store keeps.

What the keys mean is not decided here; see `storage/keys.py`.
"""

from __future__ import annotations

from storage.errors import StorageError

__all__ = ["checked_name", "inside"]

_LONGEST = 900  # object stores take 1,024 bytes, and the root's own prefix is part of them


def inside(key: str, where: str) -> str:
    """``key``, or StorageError where it could name something outside the store at ``where``."""
    if key.startswith("/") or {"..", "."} & set(key.split("/")) or "//" in key or "\0" in key:
        raise StorageError(f"key {key!r} points outside the store {where}")
    return key


def checked_name(key: str, where: str) -> str:
    """``key`` as the name of a new object, or StorageError."""
    inside(key, where)
    if not key or key.endswith("/") or len(key) > _LONGEST:
        raise StorageError(
            f"key {key!r} is no name of an object: empty, a folder, or over {_LONGEST} characters ({where})"
        )
    if not key.isascii() or not key.isprintable() or "\\" in key:
        raise StorageError(
            f"key {key!r} has characters that not every store keeps; names are printable ASCII ({where})"
        )
    return key

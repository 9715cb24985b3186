"""Reads Shards from this node's local disk where a whole and right copy lies there, else from the object store.

Which copy is right the Manifest says: name, size and digest of the whole Shard are compared before the first byte is
used, so a stale or damaged copy only costs the time to read it. What it returns the reader checks again.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final

import xxhash

from storage.keys import parse_shard_key
from storage.manifest import ShardRecord, Tier
from storage.object_source import ObjectStoreSource
from storage.sources import ShardLocation, ShardRange
from storage.spool_files import drop_copy, spool_file

__all__ = ["NearestSource"]

logger = logging.getLogger(__name__)

_PIECE: Final = 8 << 20


class NearestSource:
    """A ShardSource: ``directory`` (see spool_files), where there is one, before ``far``. Use in a ``with`` block.

    Safe to call from several threads.
    """

    def __init__(self, far: ObjectStoreSource, directory: Path | None, shards: Iterable[ShardRecord]) -> None:
        self._far, self._directory = far, directory
        self._records = {shard.key: shard for shard in shards}
        self._locks = {key: threading.Lock() for key in self._records}
        self._copies: dict[str, int | None] = {}
        self._lock = threading.Lock()
        self._bytes_read = 0

    def __enter__(self) -> NearestSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for copy in self._copies.values():
            if copy is not None:
                os.close(copy)
        self._copies.clear()

    @property
    def bytes_by_tier(self) -> Mapping[Tier, int]:
        """How much was read from where."""
        with self._lock:
            return {"local-disk": self._bytes_read, "object-storage": self._far.bytes_read}

    def read_range(self, location: ShardLocation, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes. Raises as the object store does."""
        copy = self._copy(location.location)
        data = b"" if copy is None else _read(copy, offset, length)
        if len(data) < length:
            return self._far.read_range(location, offset, length)
        with self._lock:
            self._bytes_read += length
        return data

    def other_copies(self, location: ShardLocation) -> Iterator[ShardRange]:
        """The object, where a copy on this disk went bad after it was checked."""
        if self._copies.get(location.location) is not None:
            yield partial(self._far.read_range, location)

    def _copy(self, key: str) -> int | None:
        record = self._records.get(key)
        if self._directory is None or record is None or parse_shard_key(key) is None:
            return None
        with self._locks[key]:
            if key not in self._copies:
                self._copies[key] = _checked(self._directory, record)
            return self._copies[key]


def _checked(directory: Path, record: ShardRecord) -> int | None:
    """The copy on this disk, open, when it is what was committed. One that only claims to be is removed."""
    path = spool_file(directory, record.key)
    try:
        copy = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("the copy %s cannot be opened, the object store is read: %s", path, error)
        return None
    if os.fstat(copy).st_size == record.size:
        digest = _digest(copy)
        if digest == record.digest:
            return copy  # open: the Keeper may remove the name while it is read
        logger.warning(
            "the copy %s of %s has digest %s, committed was %s: removed, the object store is read",
            path, record.key, digest, record.digest,
        )  # fmt: skip
        drop_copy(directory, record.key)
    os.close(copy)
    return None


def _digest(copy: int) -> str:
    digest, position = xxhash.xxh3_128(), 0
    while piece := _read(copy, position, _PIECE):
        digest.update(piece)
        position += len(piece)
    return digest.hexdigest()


def _read(copy: int, offset: int, length: int) -> bytes:
    """Up to ``length`` bytes; fewer at the end of the file, or where the disk gives no more."""
    pieces: list[bytes] = []
    missing = length
    try:
        while missing and (piece := os.pread(copy, missing, offset + length - missing)):
            pieces.append(piece)
            missing -= len(piece)
    except OSError as error:
        logger.warning("a local copy cannot be read on, the object store is: %s", error)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)

"""Mappings of leased buffer files: what a worker keeps from Snapshot to Snapshot, and the one call that maps a file.

It leases nothing and never creates, resizes or removes a file: that is the arena's.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from storage.errors import StorageError

__all__ = ["BufferMap", "map_buffer", "map_file"]


class BufferMap:
    """A worker's mappings, kept from Snapshot to Snapshot because mapping cold pages costs more than the copy.

    Thread-safe. A rank holds at most three generations and, besides, two Snapshots on their way to the store.
    """

    def __init__(self, max_buffers: int = 5) -> None:
        self._lock = threading.Lock()
        self._max_buffers = max_buffers
        self._mappings: OrderedDict[tuple[str, int], mmap.mmap] = OrderedDict()

    def open(self, path: str, num_bytes: int) -> memoryview:
        """Writable view of the first ``num_bytes`` of the leased file."""
        with self._lock:
            return self._open(path, num_bytes)

    def _open(self, path: str, num_bytes: int) -> memoryview:
        for known, inode in list(self._mappings):
            if not _is_same_file(known, inode):
                del self._mappings[known, inode]  # else an unlinked buffer's memory would never come back
        try:
            key = (path, os.stat(path).st_ino)
        except OSError as error:
            raise StorageError(f"leased buffer {path} cannot be mapped: {error}; lease anew") from error
        if key not in self._mappings:
            self._mappings[key] = map_file(Path(path), num_bytes, writable=True)
        self._mappings.move_to_end(key)
        while len(self._mappings) > self._max_buffers:
            self._mappings.popitem(last=False)
        mapping = self._mappings[key]
        _check_size(path, len(mapping), num_bytes)
        return memoryview(mapping)[:num_bytes]

    def close(self) -> None:
        """Forget every mapping; its memory goes when the last view of it goes."""
        with self._lock:
            self._mappings.clear()


@contextmanager
def map_buffer(path: str, num_bytes: int) -> Iterator[memoryview]:
    """One leased file, mapped for the length of a ``with`` block; a process that saves again uses `BufferMap`."""
    mapping = map_file(Path(path), num_bytes, writable=True)
    with memoryview(mapping) as whole, whole[:num_bytes] as view:
        yield view


def map_file(path: Path, num_bytes: int, *, writable: bool) -> mmap.mmap:
    """The whole file, page tables filled in; it must have at least ``num_bytes``."""
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    try:
        descriptor = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
        try:
            size = os.fstat(descriptor).st_size
            _check_size(path, size, num_bytes)
            return mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=protection)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StorageError(f"buffer {path} cannot be mapped: {error}") from error


def _check_size(path: Path | str, size: int, num_bytes: int) -> None:
    if size < num_bytes:
        raise StorageError(f"buffer {path} has {size} bytes, {num_bytes} were expected; lease anew")


def _is_same_file(path: str, inode: int) -> bool:
    try:
        return os.stat(path).st_ino == inode
    except FileNotFoundError:
        return False

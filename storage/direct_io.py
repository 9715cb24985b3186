"""Writes one new file past the page cache: temporary name, O_DIRECT where it is taken, fsync, rename, folder fsync.

A reader sees the whole file under its name or none. What is in it and which files may go is not decided here.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from storage.errors import StorageError

__all__ = ["TEMPORARY", "DiskFull", "FileWriter", "check_room", "free_bytes", "new_file", "sync_folder"]

logger = logging.getLogger(__name__)

TEMPORARY: Final = ".raysume-tmp-"
_BLOCK: Final = 4 << 20  # a multiple of every logical block size there is
_NO_ROOM: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NOT_DIRECT: Final = {errno.EINVAL, errno.EOPNOTSUPP}


class DiskFull(StorageError):
    """There is no room at ``path`` for ``need`` bytes; ``free`` are left, or may be used."""

    def __init__(self, path: str, need: int, free: int) -> None:
        super().__init__(path, need, free)
        self.path, self.need, self.free = path, need, free

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.need} bytes are needed, {self.free} may be used; free some of that disk, or choose "
            "another checkpoint.local_disk.directory"
        )


class FileWriter:
    """Takes the bytes of one file in order, through one page-aligned block. Made by `new_file`."""

    def __init__(self, descriptor: int, path: Path, *, is_direct: bool) -> None:
        self._descriptor, self._path = descriptor, path
        self.is_direct = is_direct
        self.num_bytes = 0
        self._block = mmap.mmap(-1, _BLOCK)
        self._fill = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append ``data``; the caller may change it afterwards."""
        part = memoryview(data).cast("B")
        self.num_bytes += len(part)
        while len(part):
            taken = min(len(part), _BLOCK - self._fill)
            self._block[self._fill : self._fill + taken] = part[:taken]
            self._fill += taken
            part = part[taken:]
            if self._fill == _BLOCK:
                self._drain()

    def finish(self) -> None:
        """Write what is left and return once the disk has all of it."""
        if self._fill % mmap.PAGESIZE:
            self._leave_direct()  # the tail is no whole block
        self._drain()
        os.fsync(self._descriptor)

    def _drain(self) -> None:
        done = 0
        with memoryview(self._block) as whole:
            while done < self._fill:
                try:
                    written = os.write(self._descriptor, whole[done : self._fill])
                except OSError as error:
                    if not self.is_direct or error.errno not in _NOT_DIRECT:
                        raise
                    self._leave_direct()  # some file systems refuse it at the first write only
                    continue
                done += written
                if done < self._fill and done % mmap.PAGESIZE:
                    self._leave_direct()  # cut short inside a block: the rest is not aligned any more
        self._fill = 0

    def _leave_direct(self) -> None:
        if self.is_direct:
            flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            self.is_direct = False


@contextmanager
def new_file(path: Path, *, direct: bool = True) -> Iterator[FileWriter]:
    """A writer; ``path`` exists, whole and synced, after a clean exit, and nothing is left behind after an error.

    Raises DiskFull or StorageError for errors of the operating system.
    """
    temporary = path.parent / f"{TEMPORARY}{secrets.token_hex(8)}"
    writer: FileWriter | None = None
    try:
        descriptor, is_direct = _open(temporary, direct)
        try:
            writer = FileWriter(descriptor, path, is_direct=is_direct)
            yield writer
            writer.finish()
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise DiskFull(str(path), 0 if writer is None else writer.num_bytes, free_bytes(path.parent)) from error
        raise StorageError(f"{path} cannot be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def check_room(folder: Path, need: int, keep_free_bytes: int, free: Callable[[Path], int] | None = None) -> None:
    """Raises DiskFull unless ``need`` more bytes leave ``keep_free_bytes`` free."""
    usable = max(0, (free or free_bytes)(folder) - keep_free_bytes)
    if need > usable:
        raise DiskFull(str(folder), need, usable)


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write on the file system of ``folder``."""
    space = os.statvfs(folder)
    return space.f_bavail * space.f_frsize


def sync_folder(folder: Path) -> None:
    """Make new names and removals in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open(path: Path, direct: bool) -> tuple[int, bool]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    if direct and hasattr(os, "O_DIRECT"):
        try:
            return os.open(path, flags | os.O_DIRECT, 0o600), True
        except OSError as error:
            if error.errno not in _NOT_DIRECT:
                raise
            path.unlink(missing_ok=True)  # Linux may have made the name before it refused the flag
            logger.debug("%s: no O_DIRECT here, buffered writes are used", path.parent)
    return os.open(path, flags, 0o600), False

"""Objects as files below one directory of a POSIX file system.

A file appears under its name only when it is whole and synced: temporary name in the same folder, fsync, replace, then
fsync of the folder. What was deleted stays deleted, too: a Commit that came back after a power failure would name
Shards that are gone. No stuck call of the operating system can be interrupted, so each operation runs in a thread that
is left behind when a mount hangs; one that comes back late publishes nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, TypeVar

from storage.deadlines import Patience, call_within
from storage.direct_io import sync_folder
from storage.errors import ObjectExists, ObjectMissing, StoreRefused, StoreUnavailable
from storage.object_keys import checked_name, inside
from storage.object_store import ObjectEntry

__all__ = ["LocalStore"]

T = TypeVar("T")

_TEMPORARY = ".raysume-tmp-"
_TEMPORARY_NAME = re.compile(rf"{re.escape(_TEMPORARY)}[0-9a-f]{{16}}\Z")
_FOLDER_TRIES = 16
_CHUNK = 16 << 20
# What the operating system answers the same way however often it is asked. A full disk is not among them.
_FINAL = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EEXIST),
    *(errno.EOPNOTSUPP, errno.ENOSYS, errno.ENAMETOOLONG, errno.ELOOP),
}


class LocalStore:
    """Objects below the directory ``root``, which is made by the first write."""

    def __init__(self, root: str | os.PathLike[str], *, min_bytes_per_s: float = 2e6) -> None:
        self._root = Path(os.path.abspath(root))
        self._is_anchored = False
        self._min_bytes_per_s = min_bytes_per_s

    @property
    def url(self) -> str:
        return f"file://{self._root}"

    def put(self, key: str, data: bytes | memoryview, *, deadline_s: float = 60.0) -> None:
        checked_name(key, self.url)
        path = self._path(key)

        def put(patience: Patience) -> None:
            with self._written("put", key, data, patience) as temporary:
                os.replace(temporary, path)

        self._within("put", key, deadline_s, put)

    def create(self, key: str, data: bytes, *, deadline_s: float = 60.0) -> None:
        checked_name(key, self.url)
        path = self._path(key)

        def create(patience: Patience) -> None:
            with self._written("create", key, data, patience) as temporary:
                # A hard link fails when the name exists, so the name is taken and the content whole in one step.
                os.link(temporary, path)

        self._within("create", key, deadline_s, create)

    def get(self, key: str, *, deadline_s: float = 60.0) -> bytes:
        path = self._path(key)
        return self._within("get", key, deadline_s, lambda patience: _read(path, 0, None, patience))

    def get_range(self, key: str, offset: int, length: int, *, deadline_s: float = 60.0) -> bytes:
        path = self._path(key)
        part = self._within("get_range", key, deadline_s, lambda patience: _read(path, offset, length, patience))
        if len(part) != length:
            raise StoreUnavailable("get_range", key, f"{len(part)} of {length} bytes at offset {offset}")
        return part

    def list(self, prefix: str, *, deadline_s: float = 60.0) -> list[ObjectEntry]:
        def walk(patience: Patience) -> list[ObjectEntry]:
            found = []
            for path in self._walk(prefix):
                patience.beat()
                key = path.relative_to(self._root).as_posix()
                if not path.name.startswith(_TEMPORARY) and key.startswith(prefix):
                    try:
                        status = path.stat()
                        if stat.S_ISREG(status.st_mode):  # to read a pipe would be to wait for ever
                            found.append(ObjectEntry(key=key, size=status.st_size))
                    except OSError as error:  # gone, or somebody's link to nothing or to itself: no object
                        if error.errno not in (errno.ENOENT, errno.ELOOP):
                            raise
            return sorted(found, key=lambda entry: entry.key)

        return self._within("list", prefix, deadline_s, walk)

    def delete(self, keys: Sequence[str], *, deadline_s: float = 60.0) -> None:
        paths = {key: self._path(key) for key in keys}

        def remove(patience: Patience) -> None:
            folders: set[Path] = set()
            for path in paths.values():
                patience.beat()
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
                    folders.add(path.parent)
            for folder in sorted(folders):
                patience.beat()
                with contextlib.suppress(FileNotFoundError):  # emptied and removed by another process
                    sync_folder(folder)
                self._drop_empty_folders(folder)

        if paths:
            self._within("delete", next(iter(paths)), deadline_s, remove)

    def abort_uploads(self, prefix: str, *, older_than_s: float, deadline_s: float = 60.0) -> int:
        def remove(patience: Patience) -> int:
            removed = 0
            for path in self._walk(prefix):
                patience.beat()
                key = path.relative_to(self._root).as_posix()
                if _TEMPORARY_NAME.match(path.name) is None or not key.startswith(prefix):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - path.stat().st_mtime >= older_than_s:
                        path.unlink()
                        self._drop_empty_folders(path.parent)
                        removed += 1
            return removed

        return self._within("abort_uploads", prefix, deadline_s, remove)

    def unfinished_uploads(self, prefix: str, *, deadline_s: float = 60.0) -> Sequence[str]:
        """Temporary files of puts that are under way or were cut off."""

        def look(patience: Patience) -> Sequence[str]:
            found = []
            for path in self._walk(prefix):
                patience.beat()
                if _TEMPORARY_NAME.match(path.name) is not None:
                    found.append(path.relative_to(self._root).as_posix())
            return sorted(found)

        return self._within("list", prefix, deadline_s, look)

    def clock_skew_s(self, *, deadline_s: float = 60.0) -> float | None:
        """How far the file server's clock is ahead of ours."""

        def compare(_: Patience) -> float:
            path = self._root / f"{_TEMPORARY}{secrets.token_hex(8)}"
            with _opened_for_writing(path):
                pass
            try:
                return path.stat().st_mtime - time.time()
            finally:
                path.unlink(missing_ok=True)

        return self._within("put", "", deadline_s, compare)

    def _path(self, key: str) -> Path:
        return self._root / inside(key, self.url)

    def _within(self, operation: str, key: str, deadline_s: float, call: Callable[[Patience], T]) -> T:
        with _naming(operation, key, self.url):
            return call_within(call, deadline_s)

    @contextlib.contextmanager
    def _written(self, operation: str, key: str, data: bytes | memoryview, patience: Patience) -> Iterator[Path]:
        """A synced temporary file beside the object's; the caller moves it there; the folder is synced afterwards."""
        folder = self._path(key).parent
        temporary = folder / f"{_TEMPORARY}{secrets.token_hex(8)}"
        try:
            file = _opened_for_writing(temporary)
        except OSError as error:
            kind = StoreRefused if error.errno in _FINAL else StoreUnavailable
            reason = f"the directory {folder} cannot be created or written: {error} ({self.url})"
            raise kind(operation, key, reason) from error
        try:
            with file:
                self._fill(file, data, patience)
            patience.check()
            yield temporary
            self._sync_folders(folder)
        finally:
            temporary.unlink(missing_ok=True)

    def _fill(self, file: BinaryIO, data: bytes | memoryview, patience: Patience) -> None:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _CHUNK):
            file.write(view[start : start + _CHUNK])
            patience.beat()
        file.flush()
        patience.beat(len(view) / self._min_bytes_per_s)  # all of it may still have to reach the disk
        os.fsync(file.fileno())
        patience.beat()

    def _sync_folders(self, folder: Path) -> None:
        """Sync ``folder`` and, since it may be new, every folder above it up to the one that holds the root.

        The first time those above too, to the mount point: `mkdir` may have made several of them.
        """
        stop = self._root.parent
        while folder != stop:
            sync_folder(folder)
            folder = folder.parent
        for above in (stop, *stop.parents):
            with contextlib.suppress(PermissionError):  # the folders above the root may not be ours to read
                sync_folder(above)
            if self._is_anchored or os.path.ismount(above):
                break
        self._is_anchored = True

    def _walk(self, prefix: str) -> Iterator[Path]:
        """Every file in the folder that ``prefix`` names or begins in, and below."""
        start = self._path(inside(prefix, self.url).rpartition("/")[0])
        if not start.exists():
            # Only absence means empty: a root that is a file, or unreadable, must not look like an empty Run.
            if self._root.exists() and not self._root.is_dir():
                raise NotADirectoryError(f"{self._root} is not a directory")
            return
        if not start.is_dir():
            raise NotADirectoryError(f"{start} is not a directory")
        for folder, _, names in os.walk(start, onerror=_raise_unless_gone):
            yield from (Path(folder) / name for name in names)

    def _drop_empty_folders(self, folder: Path) -> None:
        while folder != self._root and folder != folder.parent:
            try:
                folder.rmdir()
            except OSError:  # not empty, or another process was faster: both are fine
                return
            folder = folder.parent


def _opened_for_writing(path: Path) -> BinaryIO:
    """A new file in a folder that a sweeper may remove, because it is empty, until the file is there."""
    failure = OSError(errno.EBUSY, "the folder is removed again and again", str(path.parent))
    for _ in range(_FOLDER_TRIES):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except (FileNotFoundError, FileExistsError) as error:  # a sweeper in between, or a folder that cannot be
            failure = error
            continue
        with contextlib.suppress(FileNotFoundError):
            return open(path, "xb")
        failure = OSError(errno.EBUSY, "the folder is removed again and again", str(path.parent))
    raise failure


def _read(path: Path, offset: int, length: int | None, patience: Patience) -> bytes:
    """The file from ``offset`` on, at most ``length`` bytes; the buffer is never larger than what is there."""
    chunks = []
    with open(path, "rb") as file:
        left = max(0, os.fstat(file.fileno()).st_size - offset)
        left = left if length is None else min(left, length)
        file.seek(offset)
        while left and (chunk := file.read(min(left, _CHUNK))):
            chunks.append(chunk)
            left -= len(chunk)
            patience.beat()
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


@contextlib.contextmanager
def _naming(operation: str, key: str, url: str) -> Iterator[None]:
    """Turn errors of the operating system into errors of the store that name the object."""
    try:
        yield
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ObjectMissing(key, url) from error
    except FileExistsError as error:
        if operation == "create":
            raise ObjectExists(key) from error
        raise StoreUnavailable(operation, key, f"{error} ({url})") from error
    except PermissionError as error:
        raise StoreRefused(operation, key, f"access denied: {error} ({url})") from error
    except NotADirectoryError as error:
        raise StoreRefused(operation, key, f"{error} ({url})") from error
    except OSError as error:
        kind = StoreRefused if error.errno in _FINAL else StoreUnavailable
        raise kind(operation, key, f"{error} ({url})") from error

"""Objects as files below one directory of a POSIX file system.

A file appears under its name only when it is whole and synced: temporary name in the same folder, fsync, replace, then
fsync of the folder. What was deleted stays deleted, too: a Commit that came back after a power failure would name
Shards that are gone. Deadlines cannot be kept here: no stuck call of the operating system can be left.
"""

# ruff: noqa: ARG002 - see the second sentence above
from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from storage.errors import ObjectExists, ObjectMissing, StorageError, StoreRefused, StoreUnavailable
from storage.object_store import ObjectEntry

__all__ = ["LocalStore"]

_TEMPORARY = ".raysume-tmp-"
_FOLDER_TRIES = 16
# What the operating system answers the same way however often it is asked. A full disk is not among them.
_FINAL = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EEXIST),
    *(errno.EOPNOTSUPP, errno.ENOSYS, errno.ENAMETOOLONG, errno.ELOOP),
}


class LocalStore:
    """Objects below the directory ``root``, which is made by the first write."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = Path(os.path.abspath(root))
        self._is_anchored = False

    @property
    def url(self) -> str:
        return f"file://{self._root}"

    def put(self, key: str, data: bytes | memoryview, *, deadline_s: float = 60.0) -> None:
        path = self._path(key)
        with _naming("put", key, self.url), self._written("put", key, data) as temporary:
            os.replace(temporary, path)

    def create(self, key: str, data: bytes, *, deadline_s: float = 60.0) -> None:
        path = self._path(key)
        with _naming("create", key, self.url), self._written("create", key, data) as temporary:
            # A hard link fails when the name exists, so the name is taken and the content whole in one step.
            os.link(temporary, path)

    def get(self, key: str, *, deadline_s: float = 60.0) -> bytes:
        with _naming("get", key, self.url):
            return self._path(key).read_bytes()

    def get_range(self, key: str, offset: int, length: int, *, deadline_s: float = 60.0) -> bytes:
        with _naming("get_range", key, self.url), open(self._path(key), "rb") as file:
            available = max(0, os.fstat(file.fileno()).st_size - offset)
            file.seek(offset)
            part = file.read(min(length, available))
        if len(part) != length:
            raise StoreUnavailable("get_range", key, f"{len(part)} of {length} bytes at offset {offset}")
        return part

    def list(self, prefix: str, *, deadline_s: float = 60.0) -> list[ObjectEntry]:
        with _naming("list", prefix, self.url):
            return sorted(self._walk(prefix), key=lambda entry: entry.key)

    def delete(self, keys: Sequence[str], *, deadline_s: float = 60.0) -> None:
        folders: set[Path] = set()
        for key in keys:
            with _naming("delete", key, self.url), contextlib.suppress(FileNotFoundError):
                path = self._path(key)
                path.unlink()
                folders.add(path.parent)
        for folder in sorted(folders):
            with _naming("delete", folder.name, self.url):
                with contextlib.suppress(FileNotFoundError):  # emptied and removed by another process
                    _sync_folder(folder)
                self._drop_empty_folders(folder)

    def _path(self, key: str) -> Path:
        if key.startswith("/") or ".." in key.split("/"):
            raise StorageError(f"key {key!r} points outside the store {self.url}")
        return self._root / key

    @contextlib.contextmanager
    def _written(self, operation: str, key: str, data: bytes | memoryview) -> Iterator[Path]:
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
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            yield temporary
            self._sync_folders(folder)
        finally:
            temporary.unlink(missing_ok=True)

    def _sync_folders(self, folder: Path) -> None:
        """Sync ``folder`` and, since it may be new, every folder above it up to the one that holds the root.

        The first time those above too, to the mount point: `mkdir` may have made several of them.
        """
        stop = self._root.parent
        while folder != stop:
            _sync_folder(folder)
            folder = folder.parent
        for above in (stop, *stop.parents):
            with contextlib.suppress(PermissionError):  # the folders above the root may not be ours to read
                _sync_folder(above)
            if self._is_anchored or os.path.ismount(above):
                break
        self._is_anchored = True

    def _walk(self, prefix: str) -> Iterator[ObjectEntry]:
        start = self._path(prefix)
        if not start.exists():
            # Only absence means empty: a root that is a file, or unreadable, must not look like an empty Run.
            if self._root.exists() and not self._root.is_dir():
                raise NotADirectoryError(f"{self._root} is not a directory")
            return
        for folder, _, names in os.walk(start, onerror=_raise_unless_gone):
            for name in names:
                if name.startswith(_TEMPORARY):
                    continue
                path = Path(folder) / name
                with contextlib.suppress(FileNotFoundError):
                    size = path.stat().st_size
                    yield ObjectEntry(key=path.relative_to(self._root).as_posix(), size=size)

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


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
        raise StoreUnavailable(operation, key, f"{error} ({url})") from error

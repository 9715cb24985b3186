"""Any fsspec filesystem as a store: listings never cached, a deadline of our own on every call.

Nothing is ever written through an open file: closing one after an error would publish a truncated object.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import inspect
import os
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import fsspec
from fsspec.asyn import sync

from storage.errors import ObjectExists, ObjectMissing, StoreRefused, StoreUnavailable
from storage.object_store import ObjectEntry

__all__ = ["FsspecStore", "url_without_credentials"]

T = TypeVar("T")

_NOT_HONOURED = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}
_NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "TokenRetrievalError"}
_PARALLEL_DELETES = 16
_KNOWN_PROTOCOLS = "file, s3, gs, az, memory"


def url_without_credentials(url: str) -> str:
    """``url`` without user name, password and query."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path.rstrip("/"), "", ""))


class FsspecStore:
    """Objects below ``url`` through fsspec; ``options`` go to the filesystem's constructor."""

    def __init__(self, url: str, options: dict[str, Any] | None = None) -> None:
        self._full_url = url
        self._url = url_without_credentials(url)
        self._options = dict(options or {})
        self._lock = threading.Lock()
        self._owner_pid = -1
        self._opened: Any = None
        self._root = ""

    @property
    def url(self) -> str:
        return self._url

    def put(self, key: str, data: bytes | memoryview, *, deadline_s: float = 60.0) -> None:
        with self._naming("put", key, deadline_s):
            self._write(self._path(key), data, deadline_s)

    def create(self, key: str, data: bytes, *, deadline_s: float = 60.0) -> None:
        with self._naming("create", key, deadline_s):
            try:
                self._create(self._path(key), data, deadline_s)
            except (OSError, NotImplementedError) as error:
                if _status(error) == 412:
                    raise ObjectExists(key) from error
                if not _not_honoured(error):
                    raise
                self._write(self._path(key), data, deadline_s)

    def get(self, key: str, *, deadline_s: float = 60.0) -> bytes:
        with self._naming("get", key, deadline_s):
            return bytes(self._read(self._path(key), deadline_s))

    def get_range(self, key: str, offset: int, length: int, *, deadline_s: float = 60.0) -> bytes:
        if length == 0:
            return b""
        with self._naming("get_range", key, deadline_s):
            part = self._call(deadline_s, "cat_file", self._path(key), start=offset, end=offset + length)
        if len(part) != length:
            raise StoreUnavailable("get_range", key, f"{len(part)} of {length} bytes at offset {offset}")
        return bytes(part)

    def list(self, prefix: str, *, deadline_s: float = 60.0) -> list[ObjectEntry]:
        with self._naming("list", prefix, deadline_s):
            self._filesystem().invalidate_cache()
            found = self._find(self._path(prefix).rstrip("/"), deadline_s)
        start = len(self._root) + 1
        entries = (
            ObjectEntry(key=str(item["name"])[start:], size=int(item["size"] or 0))
            for item in found
            if item.get("type") == "file" and not str(item["name"]).endswith("/")
        )
        return sorted((entry for entry in entries if entry.key.startswith(prefix)), key=lambda entry: entry.key)

    def delete(self, keys: Sequence[str], *, deadline_s: float = 60.0) -> None:
        for start in range(0, len(keys), _PARALLEL_DELETES):
            batch = keys[start : start + _PARALLEL_DELETES]
            with self._naming("delete", batch[0], deadline_s):
                self._remove([self._path(key) for key in batch], deadline_s)

    def _write(self, path: str, data: bytes | memoryview, deadline_s: float) -> None:
        self._call(deadline_s, "pipe_file", path, bytes(data))

    def _create(self, path: str, data: bytes, deadline_s: float) -> None:
        filesystem = self._filesystem()
        method = filesystem._pipe_file if filesystem.async_impl else filesystem.pipe_file
        if "mode" not in inspect.signature(method).parameters:
            raise NotImplementedError
        self._call(deadline_s, "pipe_file", path, bytes(data), mode="create")

    def _read(self, path: str, deadline_s: float) -> bytes:
        content: bytes = self._call(deadline_s, "cat_file", path)
        return content

    def _find(self, path: str, deadline_s: float) -> Sequence[dict[str, Any]]:
        try:
            found: dict[str, dict[str, Any]] = self._call(deadline_s, "find", path, detail=True, withdirs=False)
        except FileNotFoundError:
            return []
        return tuple(found.values())

    def _remove(self, paths: Sequence[str], deadline_s: float) -> None:
        filesystem = self._filesystem()
        if not filesystem.async_impl:
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    self._call(deadline_s, "rm_file", path)
            return

        async def remove(path: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                await filesystem._rm_file(path)

        async def remove_all() -> None:
            await asyncio.gather(*(remove(path) for path in paths))

        self._run(remove_all, deadline_s)

    def _path(self, key: str) -> str:
        self._filesystem()
        return f"{self._root}/{key}"

    def _filesystem(self) -> Any:
        """The filesystem object of this process: one made before a fork has an event loop that no longer runs."""
        with self._lock:
            if self._owner_pid != os.getpid():
                options = {"skip_instance_cache": True, "use_listings_cache": False, **self._options}
                self._check_protocol()
                filesystem, root = fsspec.core.url_to_fs(self._full_url, **options)
                self._opened, self._root, self._owner_pid = filesystem, root.rstrip("/"), os.getpid()
                self._configure(filesystem)
            return self._opened

    def _check_protocol(self) -> None:
        """Refuse what no further try can open: a protocol that does not exist, or one whose package is missing."""
        for protocol in self._full_url.partition("://")[0].split("::"):
            try:
                fsspec.get_filesystem_class(protocol)
            except ValueError as error:
                reason = f"the protocol {protocol}:// is not known; known are {_KNOWN_PROTOCOLS} and fsspec's others"
                raise StoreRefused("open", self._url, reason) from error
            except ImportError as error:
                reason = f"the protocol {protocol}:// needs a package that is not installed: {error}"
                raise StoreRefused("open", self._url, reason) from error

    def _configure(self, filesystem: Any) -> None:
        """Last adjustments of a new filesystem object, for subclasses."""

    def _call(self, deadline_s: float, method: str, *args: Any, **kwargs: Any) -> Any:
        filesystem = self._filesystem()
        if filesystem.async_impl:
            call = getattr(filesystem, f"_{method}")
            return self._run(lambda: call(*args, **kwargs), deadline_s)
        return _in_thread(lambda: getattr(filesystem, method)(*args, **kwargs), deadline_s)

    def _run(self, call: Callable[[], Awaitable[T]], deadline_s: float) -> T:
        result: T = sync(self._filesystem().loop, call, timeout=deadline_s)
        return result

    @contextlib.contextmanager
    def _naming(self, operation: str, key: str, deadline_s: float) -> Iterator[None]:
        """Turn what filesystems raise into errors of the store that name the object."""
        try:
            yield
        except (ObjectExists, ObjectMissing, StoreUnavailable):
            raise
        except TimeoutError as error:
            reason = f"no answer within {deadline_s:g} s ({self._url})"
            raise StoreUnavailable(operation, key, reason) from error
        except PermissionError as error:
            raise StoreRefused(operation, key, f"access denied: {error} ({self._url})") from error
        except FileNotFoundError as error:
            if _code(error) == "NoSuchBucket":
                raise StoreRefused(operation, key, f"the bucket does not exist ({self._url})") from error
            raise ObjectMissing(key, self._url) from error
        except FileExistsError as error:
            raise ObjectExists(key) from error
        except Exception as error:  # client libraries raise their own roots: botocore, aiohttp, ssl
            reason = f"{type(error).__name__}: {error} ({self._url})"
            if type(error).__name__ in _NO_CREDENTIALS:
                raise StoreRefused(operation, key, f"access denied: {reason}") from error
            raise StoreUnavailable(operation, key, reason) from error


def _response(error: BaseException) -> dict[str, Any]:
    response = getattr(error, "response", None) or getattr(error.__cause__, "response", None)
    return response if isinstance(response, dict) else {}


def _code(error: BaseException) -> str:
    return str(_response(error).get("Error", {}).get("Code", ""))


def _status(error: BaseException) -> int:
    return int(_response(error).get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _not_honoured(error: BaseException) -> bool:
    """True when a server or filesystem does not know create-only writes at all."""
    if isinstance(error, NotImplementedError) or _status(error) == 501:
        return True
    return isinstance(error, OSError) and error.errno in _NOT_HONOURED


def _in_thread(call: Callable[[], T], deadline_s: float) -> T:
    """Run a blocking call in a daemon thread, so that a stuck one holds up neither us nor the interpreter's exit."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - handed to the caller, who raises it
            future.set_exception(error)

    threading.Thread(target=work, name="store-call", daemon=True).start()
    return future.result(timeout=deadline_s)

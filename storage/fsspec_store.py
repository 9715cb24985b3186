"""Any fsspec filesystem as a store: listings never cached, a deadline of our own on every call.

Nothing is ever written through an open file under the object's own name: closing one after an error would publish a
truncated object. A filesystem that can rename gets a temporary name first.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit, urlunsplit

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

from storage.deadlines import call_within
from storage.errors import ObjectExists, StorageError, StoreRefused, StoreUnavailable
from storage.object_keys import checked_name, inside
from storage.object_store import ObjectEntry
from storage.scrubbing import holds_secret, scrubbed, secrets_of_url
from storage.store_failures import failure_of, http_status, is_stale_credential, is_unsupported

__all__ = ["CreateAnswer", "FsspecStore", "url_without_credentials"]

T = TypeVar("T")
CreateAnswer = Literal["created", "exists", "unsupported"]

_log = logging.getLogger(__name__)

_PARALLEL_DELETES = 16
_KNOWN_PROTOCOLS = "file, s3, gs, az, memory"
_TEMPORARY = ".raysume-tmp-"
_TEMPORARY_NAME = re.compile(rf"{re.escape(_TEMPORARY)}[0-9a-f]{{16}}\Z")
_LAST_WORD_S = 5.0


def url_without_credentials(url: str) -> str:
    """``url`` without user name, password and query."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path.rstrip("/"), "", ""))


class FsspecStore:
    """Objects below ``url`` through fsspec; ``options`` go to the filesystem's constructor."""

    def __init__(self, url: str, options: dict[str, Any] | None = None, *, min_bytes_per_s: float = 2e6) -> None:
        self._full_url = url
        self._url = url_without_credentials(url)
        self._secrets = secrets_of_url(url)
        self._options = dict(options or {})
        self._min_bytes_per_s = min_bytes_per_s
        self._lock = threading.Lock()
        self._owner_pid = -1
        self._opened: Any = None
        self._root = ""
        self._was_reached = False

    @property
    def url(self) -> str:
        return self._url

    def put(self, key: str, data: bytes | memoryview, *, deadline_s: float = 60.0) -> None:
        checked_name(key, self._url)
        self._named("put", key, deadline_s, lambda: self._write(self._path(key), data, deadline_s))

    def create(self, key: str, data: bytes, *, deadline_s: float = 60.0) -> None:
        try:
            answer = self.try_create(key, data, deadline_s=deadline_s)
        except StoreRefused:  # some rights allow a plain put but no conditional one; without either the put says so
            answer = "unsupported"
        match answer:
            case "exists":
                raise ObjectExists(key)
            case "unsupported":
                # Not atomic, and need not be: commits rest on one writer and unique names. It stops a mistake.
                if any(entry.key == key for entry in self.list(key, deadline_s=deadline_s)):
                    raise ObjectExists(key)
                self.put(key, data, deadline_s=deadline_s)
            case "created":
                return

    def try_create(self, key: str, data: bytes, *, deadline_s: float = 60.0) -> CreateAnswer:
        """One create-only write and what the store made of it; nothing is written where it is unsupported."""
        checked_name(key, self._url)

        def create() -> CreateAnswer:
            try:
                self._create(self._path(key), data, deadline_s)
            except FileExistsError:
                return "exists"
            except (OSError, NotImplementedError) as error:
                if http_status(error) == 412:
                    return "exists"
                if is_unsupported(error):
                    return "unsupported"
                raise
            return "created"

        return self._named("create", key, deadline_s, create)

    def get(self, key: str, *, deadline_s: float = 60.0) -> bytes:
        return self._named("get", key, deadline_s, lambda: bytes(self._read(self._path(key), deadline_s)))

    def get_range(self, key: str, offset: int, length: int, *, deadline_s: float = 60.0) -> bytes:
        if length == 0:
            return b""
        part = self._named(
            "get_range", key, deadline_s, lambda: self._read_range(self._path(key), offset, length, deadline_s)
        )
        if len(part) != length:
            raise StoreUnavailable("get_range", key, f"{len(part)} of {length} bytes at offset {offset}")
        return bytes(part)

    def list(self, prefix: str, *, deadline_s: float = 60.0) -> list[ObjectEntry]:
        found = self._named("list", prefix, deadline_s, lambda: self._find(self._path(prefix), deadline_s))
        start = len(self._root) + 1
        entries = (
            ObjectEntry(key=str(item["name"])[start:], size=int(item["size"] or 0))
            for item in found
            if item.get("type") == "file" and not str(item["name"]).endswith("/") and not _is_temporary(item["name"])
        )
        return sorted((entry for entry in entries if entry.key.startswith(prefix)), key=lambda entry: entry.key)

    def delete(self, keys: Sequence[str], *, deadline_s: float = 60.0) -> None:
        for start in range(0, len(keys), _PARALLEL_DELETES):
            batch = tuple(keys[start : start + _PARALLEL_DELETES])
            self._named("delete", batch[0], deadline_s, partial(self._remove_keys, batch, deadline_s))

    def abort_uploads(self, prefix: str, *, older_than_s: float, deadline_s: float = 60.0) -> int:
        def abort() -> int:
            old = [
                str(item["name"])
                for item in self._find(self._path(prefix), deadline_s)
                if _is_temporary(item["name"]) and _age_s(item) >= older_than_s
            ]
            self._remove(old, deadline_s)
            return len(old)

        return self._named("abort_uploads", prefix, deadline_s, abort)

    def _write(self, path: str, data: bytes | memoryview, deadline_s: float) -> None:
        filesystem = self._filesystem()
        limit_s = deadline_s + len(data) / self._min_bytes_per_s
        if filesystem.async_impl or not _renames(filesystem):
            self._call(limit_s, "pipe_file", path, bytes(data))
            return
        folder, _, _ = path.rpartition("/")
        temporary = f"{folder}/{_TEMPORARY}{secrets.token_hex(8)}"
        try:
            self._call(deadline_s, "makedirs", folder, exist_ok=True)
            self._call(limit_s, "pipe_file", temporary, bytes(data))
            self._call(deadline_s, "mv", temporary, path)
        except BaseException:
            with contextlib.suppress(Exception):  # the failure of the write is the one to tell of
                self._call(_LAST_WORD_S, "rm_file", temporary)
            raise

    def _create(self, path: str, data: bytes, deadline_s: float) -> None:
        filesystem = self._filesystem()
        method = filesystem._pipe_file if filesystem.async_impl else filesystem.pipe_file
        if "mode" not in inspect.signature(method).parameters or _renames(filesystem):
            raise NotImplementedError
        self._call(deadline_s, "pipe_file", path, bytes(data), mode="create")

    def _read(self, path: str, deadline_s: float) -> bytes:
        content: bytes = self._call(deadline_s, "cat_file", path)
        return content

    def _read_range(self, path: str, offset: int, length: int, deadline_s: float) -> bytes:
        limit_s = deadline_s + length / self._min_bytes_per_s
        part: bytes = self._call(limit_s, "cat_file", path, start=offset, end=offset + length)
        return part

    def _find(self, path: str, deadline_s: float) -> Sequence[dict[str, Any]]:
        self._filesystem().invalidate_cache()
        folder = path.rpartition("/")[0]  # a prefix need not be a whole name
        try:
            found: dict[str, dict[str, Any]] = self._call(deadline_s, "find", folder, detail=True, withdirs=False)
        except FileNotFoundError:
            return []
        return tuple(item for item in found.values() if str(item["name"]).startswith(path))

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

    def _remove_keys(self, keys: Sequence[str], deadline_s: float) -> None:
        self._remove([self._path(key) for key in keys], deadline_s)

    def _path(self, key: str) -> str:
        inside(key, self._url)
        self._filesystem()
        return f"{self._root}/{key}"

    def _filesystem(self) -> Any:
        """The filesystem object of this process: one made before a fork has an event loop that no longer runs."""
        with self._lock:
            if self._opened is None or self._owner_pid != os.getpid():
                options = {"skip_instance_cache": True, "use_listings_cache": False, **self._options}
                self._check_protocol()
                filesystem, root = fsspec.core.url_to_fs(self._full_url, **options)
                self._opened, self._root, self._owner_pid = filesystem, root.rstrip("/"), os.getpid()
                self._configure(filesystem)
            return self._opened

    def _forget_credentials(self) -> None:
        """The next call opens the filesystem anew, and with it environment, credential files and provider chain."""
        with self._lock:
            self._opened = None

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
        return call_within(lambda _: getattr(filesystem, method)(*args, **kwargs), deadline_s)

    def _run(self, call: Callable[[], Awaitable[T]], limit_s: float) -> T:
        """``call`` on the filesystem's event loop; cancelled, and left behind if need be, after ``limit_s``."""

        async def bounded() -> T:
            return await asyncio.wait_for(call(), limit_s)

        future = asyncio.run_coroutine_threadsafe(bounded(), self._filesystem().loop)
        try:
            return future.result(limit_s + _LAST_WORD_S)
        finally:
            future.cancel()

    def _named(self, operation: str, key: str, deadline_s: float, call: Callable[[], T]) -> T:
        """What ``call`` returns; what it raises becomes an error of the store that names the object and no secret."""
        try:
            result = call()
        except StorageError:
            raise
        except Exception as error:  # noqa: BLE001 - client libraries raise their own roots: botocore, aiohttp, ssl
            failure, cause = self._failure(operation, key, deadline_s, error), error
        else:
            self._was_reached = True
            return result
        # Raised out here, so that an original that would print a secret is not even the context of the new one.
        if holds_secret(cause, *self._secrets):
            raise failure
        raise failure from cause

    def _failure(self, operation: str, key: str, deadline_s: float, error: Exception) -> StorageError:
        if isinstance(error, TimeoutError) and not http_status(error):
            return StoreUnavailable(operation, key, f"no answer within {deadline_s:g} s ({self._url})")
        text = scrubbed(str(error), *self._secrets)
        failure = failure_of(operation, key, error, self._url, text, was_reached=self._was_reached)
        if isinstance(failure, StoreRefused) or is_stale_credential(error):
            self._forget_credentials()
        return failure


def _is_temporary(path: str) -> bool:
    return _TEMPORARY_NAME.match(str(path).rpartition("/")[2]) is not None


def _age_s(item: dict[str, Any]) -> float:
    """Seconds since a listed file changed; what the filesystem does not tell counts as just now."""
    changed = item.get("mtime") or item.get("last_modified") or item.get("LastModified") or item.get("modified")
    if isinstance(changed, datetime):
        changed = changed.timestamp()
    return max(0.0, time.time() - changed) if isinstance(changed, int | float) else 0.0


def _renames(filesystem: Any) -> bool:
    """Whether moving is an operation of its own and not a copy, which would be seen half done."""
    if filesystem.async_impl or isinstance(filesystem, MemoryFileSystem):
        return False
    return type(filesystem).mv is not fsspec.AbstractFileSystem.mv

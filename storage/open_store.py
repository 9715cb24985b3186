"""Picks the store for a URL and wraps it in retries. The only place that knows which URL means which implementation.

Open a store in each process that needs one; a store object is not sent between processes.
"""

from __future__ import annotations

import re
import threading
from pathlib import Path

from storage.config import StoreConfig
from storage.errors import StoreRefused
from storage.fsspec_store import FsspecStore
from storage.local_store import LocalStore
from storage.memory_store import MemoryStore
from storage.object_store import ObjectStore
from storage.retrying import RetryingStore
from storage.s3_store import S3Store

__all__ = ["open_store"]

_memory_stores: dict[str, MemoryStore] = {}
_memory_lock = threading.Lock()
# A slash forgotten: without this it would be a directory of that name.
_ONE_SLASH = re.compile(r"(?:s3a?|file|gs|gcs|az|abfs|memory):/(?!/)")


def open_store(url: str, config: StoreConfig | None = None, *, keeps_parts: bool = False) -> ObjectStore:
    """The store at ``url``: a path, ``file://``, ``s3://``, ``memory://NAME`` (one per process), or any of fsspec's.

    ``keeps_parts``: for one who puts again what the store did not take; what is left for good is swept by age.
    """
    config = config or StoreConfig()
    return RetryingStore(
        _open(url, config), retries=config.retries, deadline_s=config.deadline_s, keeps_parts=keeps_parts
    )


def _open(url: str, config: StoreConfig) -> ObjectStore:
    scheme, separator, rest = url.partition("://")
    if not url.strip() or "\0" in url:
        raise StoreRefused("open", repr(url), "expected a directory or a URL")
    if not separator:
        if _ONE_SLASH.match(url):
            meant = url.replace(":/", ":///" if url.startswith("file") else "://", 1)
            raise StoreRefused("open", url, f"is {meant} meant? As a path write ./{url}")
        return LocalStore(_at_home(url), min_bytes_per_s=config.min_bytes_per_s)
    match scheme:
        case "file":
            return LocalStore(rest, min_bytes_per_s=config.min_bytes_per_s)
        case "memory":
            with _memory_lock:
                return _memory_stores.setdefault(rest.strip("/"), MemoryStore(rest.strip("/")))
        case "s3" | "s3a":
            return S3Store(url, config)
        case "http" | "https":
            # fsspec takes a server that cannot be reached for an empty one.
            raise StoreRefused("open", f"{scheme}://...", "web servers can be neither listed nor written to")
        case _:
            return FsspecStore(url, min_bytes_per_s=config.min_bytes_per_s)


def _at_home(path: str) -> Path:
    """A path as a shell would take it: what begins with ``~`` lies in a home directory, not in one named ``~``."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise StoreRefused("open", path, f"{error}; as a path write ./{path}") from error

"""Checks before the first worker starts, in seconds: path, permission, space, what the store honours.

Says what is wrong and what to do; a store without create-only writes is told once and works by fencing alone.
"""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

from orchestrator.config import RunConfig
from orchestrator.errors import ConfigError
from storage.errors import ObjectExists, StorageError
from storage.object_store import ObjectStore

__all__ = ["StoreFacts", "check_before_start"]

_log = logging.getLogger(__name__)
_PROBE = "preflight/"
_JOB_COPY = "/runtime_resources/working_dir_files/"
MIN_FREE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFacts:
    """What the store was seen to do."""

    honours_create: bool
    free_bytes: int | None


def check_before_start(store: ObjectStore, config: RunConfig, nonce: str) -> StoreFacts:
    """Write, read, list and delete a probe object; raises ConfigError naming the URL and the operation that failed."""
    if config.checkpoint.keep < 3:
        _log.warning(
            "checkpoint.keep is %d: with fewer than 3 a corrupt newest Checkpoint leaves little to fall back to",
            config.checkpoint.keep,
        )
    if _JOB_COPY in config.run.url:
        _log.warning(
            "run.url %s lies in Ray's temporary copy of the job's working directory, which Ray deletes and other "
            "machines do not see: give an absolute path or a URL",
            config.run.url,
        )
    key = f"{_PROBE}{nonce}"
    body = nonce.encode()
    try:
        honours_create = _probe(store, key, body)
    except StorageError as error:
        hint = "check run.url, its permissions and the credentials in the environment"
        raise ConfigError(store.url, (f"run.url {store.url} cannot be used: {error}; {hint}",)) from error
    if not honours_create:
        _log.info(
            "%s does not honour create-only writes: commits rest on one writer, unique names and fencing", store.url
        )
    return StoreFacts(honours_create=honours_create, free_bytes=_check_space(store.url))


def _probe(store: ObjectStore, key: str, body: bytes) -> bool:
    store.put(key, body, deadline_s=20.0)
    try:
        if store.get(key, deadline_s=20.0) != body:
            raise StorageError(f"{key} reads back other bytes than were written")
        if key not in {entry.key for entry in store.list(_PROBE, deadline_s=20.0)}:
            raise StorageError(f"{key} is missing in a listing right after its put")
        try:
            store.create(key, body, deadline_s=20.0)
        except ObjectExists:
            return True
        return False
    finally:
        store.delete([key], deadline_s=20.0)


def _check_space(url: str) -> int | None:
    path = Path(url.removeprefix("file://"))
    if not path.is_dir():
        return None
    free = shutil.disk_usage(path).free
    if free < MIN_FREE_BYTES:
        text = f"run.url {url} has {free >> 20} MiB free, at least {MIN_FREE_BYTES >> 20} MiB are needed"
        raise ConfigError(url, (text,))
    return free

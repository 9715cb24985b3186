"""Checks before the first worker starts, in seconds: path, permission, space, what the store honours.

Says what is wrong and what to do. What a store does not honour is told once and changes nothing: a Run on it works by
one writer, unique names and fencing alone.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from orchestrator.config import RunConfig
from orchestrator.errors import ConfigError, cannot_start
from storage.errors import StorageError
from storage.object_store import ObjectStore
from storage.store_facts import StoreFacts, learn_store

__all__ = ["check_before_start"]

_log = logging.getLogger(__name__)
_JOB_COPY = "/runtime_resources/working_dir_files/"
_WORST_SKEW_S = 30.0
MIN_FREE_BYTES = 256 << 20


def check_before_start(store: ObjectStore, config: RunConfig) -> StoreFacts:
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
    try:
        facts = learn_store(store)
    except StorageError as error:
        hint = "check run.url, its permissions and the credentials in the environment"
        raise cannot_start(store.url, f"run.url {store.url} cannot be used: {error}; {hint}", error) from error
    _tell(facts)
    _check_space(store.url)
    return facts


def _tell(facts: StoreFacts) -> None:
    _log.info("%s", facts.text())
    if not facts.honours_create:
        _log.info(
            "%s does not honour create-only writes: commits rest on one writer, unique names and fencing", facts.url
        )
    if "no" in (facts.fresh_after_put, facts.fresh_after_delete, facts.fresh_after_overwrite):
        _log.warning(
            "%s shows changes late: a driver that starts right after another may go on from an older Checkpoint",
            facts.url,
        )
    if facts.clock_skew_s is not None and abs(facts.clock_skew_s) > _WORST_SKEW_S:
        _log.warning(
            "the clock of %s is %+.0f s ahead of this machine's: signed requests are refused from 15 minutes on; "
            "set the clocks by NTP",
            facts.url,
            facts.clock_skew_s,
        )


def _check_space(url: str) -> None:
    path = Path(url.removeprefix("file://"))
    if not path.is_dir():
        return
    free = shutil.disk_usage(path).free
    if free < MIN_FREE_BYTES:
        text = f"run.url {url} has {free >> 20} MiB free, at least {MIN_FREE_BYTES >> 20} MiB are needed"
        raise ConfigError(url, (text,))

"""Deletes what is no longer needed: Checkpoints that retention gave up, void ones, and Shards no Commit names.

A Checkpoint is un-committed before its first byte goes. Objects whose names are not ours are never touched.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping, Sequence

from storage.commit_log import CommitLog
from storage.keys import (
    MANIFESTS,
    SHARDS,
    Attempt,
    StepKey,
    manifest_key,
    parse_shard_key,
    parse_step_key,
    shard_prefix,
)
from storage.manifest import Commit
from storage.object_store import ObjectStore

__all__ = ["sweep", "sweep_orphans", "sweep_void"]

logger = logging.getLogger(__name__)


def sweep(store: ObjectStore, log: CommitLog, commits: Sequence[Commit]) -> None:
    """Delete these Checkpoints, one after the other; dying half-way leaves orphans, never a broken Checkpoint."""
    for commit in commits:
        log.uncommit(commit.step_key)
        num_objects = len(_delete_objects(store, commit.step_key))
        logger.info("deleted checkpoint of step %d (%d objects)", commit.step, num_objects)


def sweep_void(store: ObjectStore, log: CommitLog, live_attempt: Attempt) -> list[Commit]:
    """Delete Commits of older Attempts that are no longer history, once ``live_attempt`` has made the newest Commit."""
    history = log.commits()
    if not history or history[-1].step_key.attempt != live_attempt:
        return []
    kept = {commit.step_key for commit in history}
    void = [
        commit
        for commit in log.all_commits()
        if commit.step_key not in kept and commit.attempt.number < live_attempt.number
    ]
    # Oldest Attempt first: deleting a newer one's Commit first would make the older Commits it voided real again.
    void.sort(key=lambda commit: (commit.attempt.number, -commit.step))
    sweep(store, log, void)
    return void


def sweep_orphans(
    store: ObjectStore,
    log: CommitLog,
    live_attempt: Attempt,
    *,
    seen_at_s: MutableMapping[StepKey, float],
    grace_s: float,
    now_s: float,
) -> list[str]:
    """Delete Shards and Manifests of Attempts older than ``live_attempt`` that no Commit names; returns their keys.

    An orphan goes once it has been seen for ``grace_s``. Stores tell no age we could trust across machines, so the
    caller keeps ``seen_at_s`` (times on its monotonic clock) between calls.
    """
    orphans = _orphans(store, live_attempt)
    # Asked after the listing: what was committed in between is no orphan.
    scan = log.scan()
    orphans -= {commit.step_key for commit in scan.commits}
    # A Commit that cannot be read may still be repaired: its bytes stay.
    orphans -= {key for name in scan.unreadable if (key := parse_step_key(name)) is not None}
    for key in [key for key in seen_at_s if key not in orphans]:
        del seen_at_s[key]
    deleted: list[str] = []
    for key in sorted(orphans):
        if now_s - seen_at_s.setdefault(key, now_s) >= grace_s:
            deleted += _delete_objects(store, key)
            del seen_at_s[key]
    if deleted:
        logger.info("deleted %d objects that no commit names", len(deleted))
    return deleted


def _orphans(store: ObjectStore, live_attempt: Attempt) -> set[StepKey]:
    shards = (parse_shard_key(entry.key) for entry in store.list(SHARDS))
    keys = {parsed[0] for parsed in shards if parsed is not None}
    manifests = ((entry.key, parse_step_key(entry.key)) for entry in store.list(MANIFESTS))
    keys |= {key for name, key in manifests if key is not None and manifest_key(key) == name}
    return {key for key in keys if key.attempt.number < live_attempt.number}


def _delete_objects(store: ObjectStore, key: StepKey) -> list[str]:
    names = [entry.key for entry in store.list(shard_prefix(key)) if parse_shard_key(entry.key) is not None]
    names.append(manifest_key(key))
    store.delete(names)
    return names

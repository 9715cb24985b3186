"""Deletes what is no longer needed: Checkpoints that retention gave up, void ones, and Shards no Commit names.

A Checkpoint is un-committed before its first byte goes. Objects whose names are not ours are never touched.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, MutableMapping, Sequence

from storage.commit_log import CommitLog
from storage.keys import (
    MANIFESTS,
    SHARDS,
    VERIFIED,
    Attempt,
    StepKey,
    parse_record_key,
    parse_shard_key,
    parse_step_key,
    shard_prefix,
    verified_key,
)
from storage.manifest import Commit
from storage.object_store import ObjectStore

__all__ = ["sweep", "sweep_orphans", "sweep_uploads", "sweep_void"]

logger = logging.getLogger(__name__)


def sweep(store: ObjectStore, log: CommitLog, commits: Sequence[Commit]) -> None:
    """Delete these Checkpoints, one after the other; dying half-way leaves orphans, never a broken Checkpoint."""
    for key in dict.fromkeys(commit.step_key for commit in commits):
        log.uncommit(key)
        num_objects = len(_delete_objects(store, log, key))
        logger.info("deleted checkpoint of step %d (%d objects)", key.step, num_objects)


def sweep_void(
    store: ObjectStore, log: CommitLog, live_attempt: Attempt, in_use: Collection[StepKey] = ()
) -> list[Commit]:
    """Delete Commits of older Attempts that are no longer history, once ``live_attempt`` has made the newest Commit.

    Those ``in_use`` stay: ranks may be reading them.
    """
    history = log.commits()
    if not history or history[-1].step_key.attempt != live_attempt:
        return []
    kept = {commit.step_key for commit in history} | set(in_use)
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
    """Delete Shards and Manifests that no Commit names and none will, and what says that they were verified; returns
    the keys of the former.

    Those are the ones of Attempts older than ``live_attempt``, which need not have committed anything, and its own of
    steps before its newest Commit. An orphan goes once it has been seen for ``grace_s``: the driver of an older Attempt
    may still be about to commit it. ``live_attempt``'s own driver never is, so its earlier Attempts' go at once. Stores
    tell no age we could trust across machines, so the caller keeps ``seen_at_s`` (times on its monotonic clock).
    """
    present = _step_keys(store)
    # Asked after the listing: what was committed in between is no orphan.
    scan = log.scan()
    committed = {commit.step_key for commit in scan.commits}
    # A Commit that cannot be read may still be repaired: its bytes stay.
    committed |= {key for name in scan.unreadable if (key := parse_step_key(name)) is not None}
    newest = max((key.step for key in committed if key.attempt == live_attempt), default=-1)
    orphans = {key for key in present - committed if _is_over(key, live_attempt, newest)}
    for key in [key for key in seen_at_s if key not in orphans]:
        del seen_at_s[key]
    deleted: list[str] = []
    for key in sorted(orphans):
        is_ours = key.attempt.nonce == live_attempt.nonce and key.attempt.number < live_attempt.number
        if is_ours or now_s - seen_at_s.setdefault(key, now_s) >= grace_s:
            deleted += _delete_objects(store, log, key)
            seen_at_s.pop(key, None)
    if deleted:
        logger.info("deleted %d objects that no commit names", len(deleted))
    return deleted


def sweep_uploads(store: ObjectStore, *, older_than_s: float) -> None:
    """Remove what puts of any object of the Run that nobody will finish left: begun longer ago than one may take."""
    store.abort_uploads("", older_than_s=older_than_s)


def _is_over(key: StepKey, live_attempt: Attempt, newest_step: int) -> bool:
    if key.attempt == live_attempt:
        # Ranks ship their Snapshots in step order, so a step that was overtaken by a Commit is never made whole.
        return key.step < newest_step
    return key.attempt.number < live_attempt.number


def _step_keys(store: ObjectStore) -> set[StepKey]:
    shards = (parse_shard_key(entry.key) for entry in store.list(SHARDS))
    keys = {parsed[0] for parsed in shards if parsed is not None}
    for folder in (MANIFESTS, VERIFIED):
        records = (parse_record_key(entry.key, folder) for entry in store.list(folder))
        keys |= {record.step_key for record in records if record is not None}
    return keys


def _delete_objects(store: ObjectStore, log: CommitLog, key: StepKey) -> list[str]:
    # Manifests last: while one is left, an interrupted sweep is seen and taken up again.
    names = [entry.key for entry in store.list(shard_prefix(key)) if parse_shard_key(entry.key) is not None]
    names += log.manifest_keys(key)
    store.delete([verified_key(key), *names])
    return names

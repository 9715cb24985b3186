"""Chooses the one RestorePlan of an Attempt from the commit log, and takes unusable Checkpoints out of use.

No Shard is read here: existence and size are seen in one listing; the reader checks every digest. An error of the store
is never taken for "no Checkpoint".
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from pydantic import ValidationError

from storage.codec import digest128
from storage.commit_log import CommitLog
from storage.errors import CorruptCheckpoint, MemoryUnreadable, ObjectMissing, StorageError
from storage.events import utc_text
from storage.history import uncommitted_steps
from storage.keys import COMMITS, SHARDS, Attempt
from storage.manifest import Commit, Manifest
from storage.object_store import ObjectStore
from storage.sources import RestorePlan, ShardLocation

__all__ = ["plan_of", "plan_restore", "read_manifest"]

logger = logging.getLogger(__name__)


def plan_restore(
    log: CommitLog,
    *,
    attempt: Attempt,
    step: int | None = None,
    allow_partial: bool = False,
    clock: Callable[[], float] = time.time,
) -> RestorePlan | None:
    """The plan for ``attempt``: from the newest usable Commit, or from exactly ``step``.

    None says that the Run has never committed anything. A Checkpoint found bad is quarantined; without ``step`` the
    previous one is taken. Raises ObjectMissing for an absent ``step`` and StorageError when every Commit is unusable.
    """
    # Commits first: listed the other way round, a Commit made in between would seem to lack its Shards.
    candidates = log.commits()
    shards = log.store.list(SHARDS)
    sizes = {entry.key: entry.size for entry in shards}
    for cut_off in uncommitted_steps(log.store, shards):
        logger.warning("step %d (%s) is passed over: it has shards but no commit", cut_off.step, cut_off.stem)
    if step is not None:
        candidates = _exactly(log, step, candidates)
    for commit in reversed(candidates):
        try:
            manifest = _checked_manifest(log, commit, sizes)
        except CorruptCheckpoint as error:
            log.quarantine(commit.step_key, error.key, error.reason, utc_text(clock()))
            logger.warning("step %d is quarantined: %s: %s", commit.step, error.key, error.reason)
            if step is not None:
                raise
            continue
        return _plan(log, attempt, commit, manifest, allow_partial)
    _refuse_a_silent_fresh_start(log)
    return None


def plan_of(log: CommitLog, commit: Commit, *, attempt: Attempt) -> RestorePlan:
    """The plan that reads exactly ``commit``. Nothing is quarantined: raises CorruptCheckpoint."""
    return _plan(log, attempt, commit, log.read_manifest(commit), allow_partial=False)


def read_manifest(plan: RestorePlan, store: ObjectStore | None, *, deadline_s: float = 120.0) -> Manifest:
    """The Manifest that ``plan`` names, checked against the digest in the plan.

    One from memory comes with its own, and needs no ``store``. Raises CorruptCheckpoint, or MemoryUnreadable.
    """
    if plan.memory is not None:
        try:
            return _parsed(plan, "the plan", plan.memory.manifest)
        except CorruptCheckpoint as error:
            raise MemoryUnreadable(plan.step, 0, "the restore plan", error.reason) from error
    if store is None:
        raise StorageError(f"step {plan.step}: the plan names {plan.manifest_key}, and no store to read it from")
    key = plan.manifest_key
    try:
        data = store.get(key, deadline_s=deadline_s)
    except ObjectMissing as error:
        raise CorruptCheckpoint(plan.step, key, "the Manifest is missing") from error
    return _parsed(plan, key, data)


def _parsed(plan: RestorePlan, key: str, data: bytes) -> Manifest:
    if len(data) != plan.manifest_bytes or digest128(data) != plan.manifest_digest:
        raise CorruptCheckpoint(
            plan.step,
            key,
            f"hash mismatch: {digest128(data)} of {len(data)} bytes, committed {plan.manifest_digest} of "
            f"{plan.manifest_bytes}",
        )
    try:
        manifest = Manifest.model_validate_json(data)
    except ValidationError as error:
        raise CorruptCheckpoint(plan.step, key, f"the Manifest is not valid: {error}") from error
    if manifest.step_key != plan.source:
        raise CorruptCheckpoint(plan.step, key, f"this is the Manifest of {manifest.step_key.stem}")
    return manifest


def _exactly(log: CommitLog, step: int, commits: list[Commit]) -> list[Commit]:
    found = [commit for commit in commits if commit.step == step]
    if not found:
        available = ", ".join(str(commit.step) for commit in commits) or "none"
        raise ObjectMissing(f"checkpoint of step {step}", f"{log.store.url} (usable steps: {available})")
    return found


def _checked_manifest(log: CommitLog, commit: Commit, sizes: Mapping[str, int]) -> Manifest:
    manifest = log.read_manifest(commit)
    for shard in manifest.shards:
        size = sizes.get(shard.key)
        if size is None:
            raise CorruptCheckpoint(commit.step, shard.key, "missing file", shard.rank)
        if size != shard.size:
            raise CorruptCheckpoint(commit.step, shard.key, f"{size} bytes, committed {shard.size}", shard.rank)
    return manifest


def _plan(log: CommitLog, attempt: Attempt, commit: Commit, manifest: Manifest, allow_partial: bool) -> RestorePlan:
    return RestorePlan(
        attempt=attempt,
        source=commit.step_key,
        root_url=log.store.url,
        manifest_key=commit.manifest_key,
        manifest_bytes=commit.manifest_bytes,
        manifest_digest=commit.manifest_digest,
        shards=tuple(
            ShardLocation(rank=shard.rank, tier="object-storage", location=shard.key) for shard in manifest.shards
        ),
        allow_partial=allow_partial,
    )


def _refuse_a_silent_fresh_start(log: CommitLog) -> None:
    """Starting at step 0 where work was committed would throw it away unseen."""
    scan, quarantined = log.scan(), log.quarantined()
    if not scan.commits and not scan.unreadable and not quarantined:
        return
    reasons = [f"step {key.step}: {record.key}: {record.reason}" for key, record in sorted(quarantined.items())]
    reasons += [f"{key}: unreadable record" for key in scan.unreadable]
    raise StorageError(
        f"{log.store.url} has Checkpoints under {COMMITS} but none is usable ({'; '.join(reasons) or 'all void'}); "
        "repair the store, or start a new run at another url"
    )

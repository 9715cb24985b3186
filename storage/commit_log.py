"""The record of which Checkpoints exist: append, fence, list, take out of use.

Which Checkpoint exists is asked here and nowhere else, never of a listing of Shards. One process per Run appends.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import ValidationError

from storage.codec import digest128
from storage.errors import CommitRefused, CorruptCheckpoint, ObjectExists, ObjectMissing, StorageError
from storage.keys import (
    COMMITS,
    QUARANTINE,
    SHARDS,
    StepKey,
    commit_key,
    manifest_key,
    parse_shard_key,
    parse_step_key,
    quarantine_key,
)
from storage.manifest import AttemptRecord, Commit, Manifest, QuarantineRecord
from storage.object_store import ObjectEntry, ObjectStore

__all__ = ["CommitLog", "CommitScan", "StoredManifest", "effective_history", "uncommitted_steps"]

logger = logging.getLogger(__name__)


class StoredManifest(NamedTuple):
    """Where a Manifest was written and what a Commit must say of it."""

    key: str
    num_bytes: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitScan:
    """Everything under commits/: the valid records, and the keys of records of ours that cannot be read."""

    commits: tuple[Commit, ...]
    unreadable: tuple[str, ...]


def effective_history(commits: Iterable[Commit], quarantined: Iterable[StepKey] = ()) -> list[Commit]:
    """The Commits that are the Run's history, by step.

    A newer Attempt that went on from step b made every older Attempt's Commit beyond b void, also when its own Commits
    are quarantined by now. Of one step the highest Attempt counts.
    """
    unusable = set(quarantined)
    by_attempt: dict[int, list[Commit]] = {}
    for commit in commits:
        by_attempt.setdefault(commit.attempt.number, []).append(commit)
    history: dict[int, Commit] = {}
    limit: int | None = None
    for number in sorted(by_attempt, reverse=True):
        for commit in sorted(by_attempt[number], key=lambda commit: commit.step_key, reverse=True):
            if commit.step_key in unusable or (limit is not None and commit.step > limit):
                continue
            history.setdefault(commit.step, commit)
        bases = [commit.base_step for commit in by_attempt[number]]
        limit = min(bases) if limit is None else min(limit, *bases)
    return [history[step] for step in sorted(history)]


class CommitLog:
    """The Commits, Manifests and quarantine records of one Run. ``run_id`` None accepts the records of any Run.

    Listings are always fresh; only the content of Commits, which never changes under its name, is remembered.
    """

    def __init__(self, store: ObjectStore, run_id: str | None) -> None:
        self.store = store
        self.run_id = run_id
        self._known: dict[str, Commit] = {}
        self._warned: set[str] = set()

    def commits(self) -> list[Commit]:
        """The effective history without quarantined Checkpoints, oldest step first."""
        return effective_history(self.scan().commits, self.quarantined_keys())

    def all_commits(self) -> list[Commit]:
        """Every valid Commit, void and quarantined ones too, by step and Attempt."""
        return list(self.scan().commits)

    def latest(self) -> Commit | None:
        """The newest Commit of the effective history."""
        commits = self.commits()
        return commits[-1] if commits else None

    def scan(self) -> CommitScan:
        """Read commits/; what is foreign or unreadable is left out and named in one warning."""
        commits: list[Commit] = []
        foreign: list[str] = []
        unreadable: list[str] = []
        for entry in self.store.list(COMMITS):
            step_key = parse_step_key(entry.key)
            if step_key is None or commit_key(step_key) != entry.key:
                foreign.append(entry.key)
                continue
            try:
                commits.append(self._read(entry, step_key))
            except ObjectMissing:  # un-committed since the listing
                continue
            except ValueError:
                unreadable.append(entry.key)
        self._warn_once(foreign + unreadable)
        return CommitScan(
            commits=tuple(sorted(commits, key=lambda commit: commit.step_key)), unreadable=tuple(unreadable)
        )

    def append(self, commit: Commit) -> None:
        """Write ``commit``, the last write of a save. Raises CommitRefused when a newer Attempt has committed."""
        self._check_run(commit.run_id, f"Commit of step {commit.step}")
        key, content = commit_key(commit.step_key), commit.model_dump_json().encode()
        for entry in self.store.list(COMMITS):
            other = parse_step_key(entry.key)
            if other is None or other.attempt == commit.step_key.attempt:
                continue
            if other.attempt.number >= commit.attempt.number:
                raise CommitRefused(
                    f"step {commit.step} of attempt {commit.step_key.attempt.label} is not committed: attempt "
                    f"{other.attempt.label} has committed step {other.step}; another driver owns the run, stop this one"
                )
        try:
            self.store.create(key, content)
        except ObjectExists as error:
            if self.store.get(key) != content:
                raise CommitRefused(f"{key} exists already with other content; it stays as it is") from error

    def write_manifest(self, manifest: Manifest) -> StoredManifest:
        """Store ``manifest``. It is real only once a Commit names it."""
        self._check_run(manifest.run_id, f"Manifest of step {manifest.step}")
        key, content = manifest_key(manifest.step_key), manifest.model_dump_json().encode()
        self.store.put(key, content)
        return StoredManifest(key, len(content), digest128(content))

    def read_manifest(self, commit: Commit) -> Manifest:
        """The Manifest that ``commit`` names, its digest checked. Raises CorruptCheckpoint, also when it is missing."""
        key = commit.manifest_key
        try:
            content = self.store.get(key)
        except ObjectMissing as error:
            raise CorruptCheckpoint(commit.step, key, "missing file") from error
        if len(content) != commit.manifest_bytes:
            raise CorruptCheckpoint(commit.step, key, f"{len(content)} bytes, committed {commit.manifest_bytes}")
        found = digest128(content)
        if found != commit.manifest_digest:
            raise CorruptCheckpoint(commit.step, key, f"hash mismatch: {found}, committed {commit.manifest_digest}")
        try:
            manifest = Manifest.model_validate_json(content)
        except ValidationError as error:
            # The bytes are those that were committed: another version's format, not damage. Never quarantined.
            raise StorageError(f"{key} is whole but in a format this version cannot read: {error}") from error
        if manifest.step_key != commit.step_key or manifest.run_id != commit.run_id:
            raise CorruptCheckpoint(commit.step, key, f"it describes {manifest.step_key.stem} of {manifest.run_id}")
        return manifest

    def quarantine(self, step_key: StepKey, object_key: str, reason: str, time_utc: str) -> None:
        """Take a Checkpoint out of use for good, saying which object failed and why."""
        record = QuarantineRecord(
            step=step_key.step,
            attempt=AttemptRecord.of(step_key.attempt),
            time_utc=time_utc,
            key=object_key,
            reason=reason,
        )
        self.store.put(quarantine_key(step_key), record.model_dump_json().encode())

    def quarantined_keys(self) -> list[StepKey]:
        """Which Checkpoints are out of use; the names of the records say it, whatever their content."""
        keys = (parse_step_key(entry.key) for entry in self.store.list(QUARANTINE))
        return [key for key in keys if key is not None]

    def quarantined(self) -> dict[StepKey, QuarantineRecord]:
        """Every quarantine record by Checkpoint."""
        return {key: self._read_quarantine(key) for key in self.quarantined_keys()}

    def uncommit(self, step_key: StepKey) -> None:
        """Make a Checkpoint cease to exist. Its bytes may be deleted afterwards, never before."""
        self.store.delete([commit_key(step_key)])

    def _read(self, entry: ObjectEntry, step_key: StepKey) -> Commit:
        known = self._known.get(entry.key)
        if known is not None:
            return known
        commit = Commit.model_validate_json(self.store.get(entry.key))
        if commit.step_key != step_key or self.run_id not in (None, commit.run_id):
            raise ValueError(f"{entry.key} holds the Commit of {commit.step_key.stem} of run {commit.run_id}")
        self._known[entry.key] = commit
        return commit

    def _read_quarantine(self, key: StepKey) -> QuarantineRecord:
        name = quarantine_key(key)
        try:
            return QuarantineRecord.model_validate_json(self.store.get(name))
        except ValidationError as error:
            self._warn_once([name])
            return QuarantineRecord(
                step=key.step,
                attempt=AttemptRecord.of(key.attempt),
                time_utc="",
                key=name,
                reason=f"the quarantine record itself is unreadable: {error.error_count()} errors",
            )

    def _check_run(self, run_id: str, what: str) -> None:
        if self.run_id not in (None, run_id):
            raise CommitRefused(f"{what} belongs to run {run_id}, this log is that of run {self.run_id}")

    def _warn_once(self, keys: list[str]) -> None:
        new = [key for key in keys if key not in self._warned]
        if new:
            self._warned.update(new)
            logger.warning("%s: ignored, not a valid record of this run: %s", self.store.url, ", ".join(new))


def uncommitted_steps(store: ObjectStore, shards: Iterable[ObjectEntry] | None = None) -> list[StepKey]:
    """Steps that have Shards but no Commit: saves that were cut off. ``shards`` spares a second listing of Shards."""
    entries = store.list(SHARDS) if shards is None else shards
    present = {parsed[0] for entry in entries if (parsed := parse_shard_key(entry.key)) is not None}
    committed = {parse_step_key(entry.key) for entry in store.list(COMMITS)}
    return sorted(present - committed)

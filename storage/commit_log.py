"""The record of which Checkpoints exist: append, fence, list, take out of use.

Which Checkpoint exists is asked here and nowhere else, never of a listing of Shards. One process per Run appends; each
process writes under names of its own (a writer nonce), so a restarted one overwrites nothing. Fencing does not need a
create-only store: see `CommitLog.append`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from pydantic import ValidationError

from storage.codec import digest128
from storage.commit_bytes import commit_from_bytes, commit_to_bytes
from storage.errors import (
    CommitRefused,
    CorruptCheckpoint,
    ObjectExists,
    ObjectMissing,
    StorageError,
    StoreUnavailable,
)
from storage.history import effective_history, writer_of
from storage.keys import (
    COMMITS,
    MANIFESTS,
    QUARANTINE,
    StepKey,
    commit_key,
    manifest_key,
    new_nonce,
    parse_record_key,
    quarantine_key,
)
from storage.manifest import AttemptRecord, Commit, Manifest, QuarantineRecord
from storage.merge import manifest_problem
from storage.object_store import ObjectEntry, ObjectStore
from storage.ordered import in_order

__all__ = [
    "MAX_MANIFEST_BYTES",
    "MAX_RECORD_BYTES",
    "CommitLog",
    "CommitScan",
    "StoredManifest",
]

logger = logging.getLogger(__name__)

T = TypeVar("T", Commit, Manifest)

MAX_MANIFEST_BYTES = 256 << 20  # some four million chunks listed one by one; checked before anything is parsed
_SHOWN = 8
_PARALLEL, _FEW = 16, 4  # fewer are read one after another: threads would cost more
MAX_RECORD_BYTES = 64 << 10  # a Commit or quarantine record; a real one has under 2 KiB


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


class CommitLog:
    """The Commits, Manifests and quarantine records of one Run. ``run_id`` None accepts the records of any Run.

    Listings are always fresh; only the content of Commits, which never changes under its name, is remembered. Commits
    of this log itself count before a listing shows them.
    ``writer`` stands in the names of all that this log writes and is its own: a fresh one for every writing process.
    """

    def __init__(self, store: ObjectStore, run_id: str | None, *, writer: str | None = None) -> None:
        self.store = store
        self.run_id = run_id
        self.writer = writer or new_nonce()
        self._known: dict[str, Commit] = {}
        self._own: set[str] = set()
        self._named: set[str] = set()  # Manifests of ours that a Commit may name: an append may fail and yet arrive
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
        listed = self.store.list(COMMITS)
        ours = [entry for entry in listed if parse_record_key(entry.key, COMMITS) is not None]
        ours += self._not_listed_yet({entry.key for entry in ours})
        commits, unreadable = list[Commit](), list[str]()
        for entry, found in self._read_all(ours):
            if isinstance(found, Commit):
                commits.append(found)
            elif isinstance(found, ValueError):
                unreadable.append(entry.key)  # what is missing was un-committed since the listing
        self._warn_once([entry.key for entry in listed if parse_record_key(entry.key, COMMITS) is None] + unreadable)
        return CommitScan(
            commits=tuple(sorted(commits, key=lambda commit: (commit.step_key, writer_of(commit)))),
            unreadable=tuple(unreadable),
        )

    def _not_listed_yet(self, listed: set[str]) -> list[ObjectEntry]:
        """Commits of our own that a late listing does not show. What another process un-committed is forgotten."""
        late = []
        for key in sorted(self._own - listed):
            try:
                late.append(ObjectEntry(key=key, size=len(self.store.get(key))))
            except ObjectMissing:
                self._own.discard(key)
        return late

    def append(self, commit: Commit) -> Commit:
        """Write ``commit``, the last write of a save; returns the Commit that counts. Raises CommitRefused.

        Refused when a newer Attempt, or another writer of this Attempt at a later step, has committed; an equal Commit
        of another writer is returned instead of written twice. After the write the log is listed once more: a Commit
        that a newer Attempt made void meanwhile is taken back. What remains possible without create-only writes: a
        writer that is stopped between the two listings leaves a void Commit until it runs again or a newer Attempt
        sweeps it. No reader takes it for history, so that it costs space, never a wrong resume.
        """
        self._check_run(commit.run_id, f"Commit of step {commit.step}")
        if commit.manifest_key != manifest_key(commit.step_key, self.writer):
            raise CommitRefused(f"step {commit.step}: {commit.manifest_key} is no Manifest of this writer's")
        for key in self._rivals(commit):
            twin = self._equal_twin(key, commit)
            if twin is not None:
                return twin
        self._named.add(commit.manifest_key)
        try:
            self.store.create(commit.object_key, commit_to_bytes(commit))
        except ObjectExists as error:
            stored = self._unless_changed(commit, error)
            self._own.add(commit.object_key)
            return stored
        self._own.add(commit.object_key)
        self._take_back_if_void(commit)
        return commit

    def _unless_changed(self, commit: Commit, cause: Exception) -> Commit:
        try:
            stored = commit_from_bytes(self.store.get(commit.object_key))
        except ValueError:
            stored = None
        if stored is None or not _says_the_same(stored, commit):
            raise CommitRefused(f"{commit.object_key} exists already with other content; it stays") from cause
        return stored

    def _rivals(self, commit: Commit) -> list[str]:
        """Keys of other writers' Commits of the same StepKey. Raises CommitRefused where ``commit`` comes too late."""
        twins = []
        for entry in self.store.list(COMMITS):
            record = parse_record_key(entry.key, COMMITS)
            if record is None or entry.key == commit.object_key:
                continue
            other = record.step_key
            if other.attempt == commit.step_key.attempt:
                if other.step > commit.step and record.writer != commit.writer:
                    raise CommitRefused(
                        f"step {commit.step} of attempt {other.attempt.label} is not committed: another process drives "
                        f"this attempt and has committed step {other.step}; stop this one"
                    )
                if other == commit.step_key:
                    twins.append(entry.key)
            elif other.attempt.number >= commit.attempt.number:
                raise CommitRefused(
                    f"step {commit.step} of attempt {commit.step_key.attempt.label} is not committed: attempt "
                    f"{other.attempt.label} has committed step {other.step}; another driver owns the run, stop this one"
                )
        return twins

    def _equal_twin(self, key: str, commit: Commit) -> Commit | None:
        """Another writer's Commit at ``key`` if it names the same Shards; None when it cannot be read."""
        try:
            twin = commit_from_bytes(self.store.get(key))
            theirs, ours = self.read_manifest(twin).shards, self.read_manifest(commit).shards
        except (ObjectMissing, ValueError, CorruptCheckpoint) as error:
            logger.warning("%s is of another process and cannot be read: %s", key, error)
            return None
        if theirs != ours:
            raise CommitRefused(
                f"step {commit.step} of attempt {commit.step_key.attempt.label} is not committed: {key} of another "
                "process names other Shards under the same keys; it stays"
            )
        return twin

    def _take_back_if_void(self, commit: Commit) -> None:
        try:
            commits = self.scan().commits
        except StoreUnavailable as error:
            # Durable already: the fence before the write let it pass.
            logger.warning("step %d is committed, the look after it failed: %s", commit.step, error)
            return
        newer = [other for other in commits if other.attempt.number > commit.attempt.number]
        if not newer or commit.step_key in {kept.step_key for kept in effective_history([*commits, commit])}:
            return
        self._own.discard(commit.object_key)
        self.store.delete([commit.object_key])
        raise CommitRefused(
            f"step {commit.step} of attempt {commit.step_key.attempt.label} is taken back: attempt "
            f"{newer[-1].step_key.attempt.label} committed step {newer[-1].step} meanwhile; another driver owns the run"
        )

    def write_manifest(self, manifest: Manifest) -> StoredManifest:
        """Store ``manifest``. It is real only once a Commit names it; one that a Commit may name is not overwritten."""
        self._check_run(manifest.run_id, f"Manifest of step {manifest.step}")
        key, content = manifest_key(manifest.step_key, self.writer), manifest.model_dump_json().encode()
        if len(content) > MAX_MANIFEST_BYTES:
            raise CommitRefused(
                f"step {manifest.step}: its Manifest has {len(content)} bytes, at most {MAX_MANIFEST_BYTES} can be read"
            )
        if key in self._named:
            content = self._unchanged(key, manifest)
        else:
            try:
                self.store.create(key, content)
            except ObjectExists:  # left by our own save that failed before its Commit
                self.store.put(key, content)
        return StoredManifest(key, len(content), digest128(content))

    def _unchanged(self, key: str, manifest: Manifest) -> bytes:
        content = self.store.get(key)
        if not _says_the_same(Manifest.model_validate_json(content), manifest):
            raise CommitRefused(f"step {manifest.step}: a Commit may name {key}, which has other content; it stays")
        return content

    def read_manifest(self, commit: Commit) -> Manifest:
        """The Manifest that ``commit`` names, its digest checked. Raises CorruptCheckpoint, also when it is missing."""
        key = commit.manifest_key
        if commit.manifest_bytes > MAX_MANIFEST_BYTES:
            raise CorruptCheckpoint(
                commit.step, key, f"committed with {commit.manifest_bytes} bytes, at most {MAX_MANIFEST_BYTES} are read"
            )
        sizes = {entry.key: entry.size for entry in self.store.list(MANIFESTS)}
        if sizes.get(key, 0) > commit.manifest_bytes:  # seen before a byte of it is held
            raise CorruptCheckpoint(commit.step, key, f"{sizes[key]} bytes, committed {commit.manifest_bytes}")
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
        problem = manifest_problem(manifest)
        if problem is not None:
            raise CorruptCheckpoint(commit.step, key, problem)
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
        records = (parse_record_key(entry.key, QUARANTINE) for entry in self.store.list(QUARANTINE))
        return [record.step_key for record in records if record is not None]

    def quarantined(self) -> dict[StepKey, QuarantineRecord]:
        """Every quarantine record by Checkpoint."""
        return {key: self._read_quarantine(key) for key in self.quarantined_keys()}

    def uncommit(self, step_key: StepKey) -> None:
        """Make a Checkpoint cease to exist, whoever committed it. Its bytes may be deleted afterwards, never before."""
        listed = [entry.key for entry in self.store.list(COMMITS) if _is_of(entry.key, COMMITS, step_key)]
        # By name too: some listings show a record only after a while.
        known = [key for key, commit in self._known.items() if commit.step_key == step_key]
        self._own.discard(commit_key(step_key, self.writer))
        self.store.delete(sorted({*listed, *known, commit_key(step_key, self.writer)}))

    def manifest_keys(self, step_key: StepKey) -> list[str]:
        """Every Manifest of ``step_key``, by whatever writer."""
        return [entry.key for entry in self.store.list(MANIFESTS) if _is_of(entry.key, MANIFESTS, step_key)]

    def _read_all(
        self, entries: Sequence[ObjectEntry]
    ) -> list[tuple[ObjectEntry, Commit | ObjectMissing | ValueError]]:
        """Each with its Commit or why there is none, in order; read side by side, for each costs a round trip."""
        num_unknown = sum(entry.key not in self._known for entry in entries)
        if num_unknown < _FEW:
            return [(entry, self._try_read(entry)) for entry in entries]
        with ThreadPoolExecutor(min(_PARALLEL, num_unknown), thread_name_prefix="commit-log") as pool:
            return list(in_order(self._try_read, entries, lambda entry: entry.size, pool))

    def _try_read(self, entry: ObjectEntry) -> Commit | ObjectMissing | ValueError:
        try:
            return self._read(entry)
        except (ObjectMissing, ValueError) as error:
            return error

    def _read(self, entry: ObjectEntry) -> Commit:
        known, record = self._known.get(entry.key), parse_record_key(entry.key, COMMITS)
        if known is not None:
            return known
        assert record is not None
        if entry.size > MAX_RECORD_BYTES:
            raise ValueError(f"{entry.key} has {entry.size} bytes, at most {MAX_RECORD_BYTES} are read")
        commit = commit_from_bytes(self.store.get(entry.key))
        if commit.step_key != record.step_key or self.run_id not in (None, commit.run_id):
            raise ValueError(f"{entry.key} holds the Commit of {commit.step_key.stem} of run {commit.run_id}")
        if commit.manifest_key != manifest_key(record.step_key, record.writer):
            raise ValueError(f"{entry.key} names {commit.manifest_key}, which is not its Manifest")
        self._known[entry.key] = commit
        return commit

    def _read_quarantine(self, key: StepKey) -> QuarantineRecord:
        name = quarantine_key(key)
        try:
            return QuarantineRecord.model_validate_json(self.store.get(name))
        except (ValidationError, ObjectMissing):
            self._warn_once([name])
            return QuarantineRecord(
                step=key.step,
                attempt=AttemptRecord.of(key.attempt),
                time_utc="",
                key=name,
                reason="the quarantine record itself is unreadable, or has another name",
            )

    def _check_run(self, run_id: str, what: str) -> None:
        if self.run_id not in (None, run_id):
            raise CommitRefused(f"{what} belongs to run {run_id}, this log is that of run {self.run_id}")

    def _warn_once(self, keys: list[str]) -> None:
        new = [key for key in keys if key not in self._warned]
        if new:
            self._warned.update(new)
            more = f" and {len(new) - _SHOWN} more" if len(new) > _SHOWN else ""
            names = ", ".join(key if key.isprintable() else ascii(key) for key in new[:_SHOWN]) + more
            logger.warning("%s: ignored, not a valid record of this run: %s", self.store.url, names)


def _says_the_same(stored: T, ours: T) -> bool:
    """Whether both say the same, whenever that was. As text: a loss that is no number does not equal itself."""
    return stored.model_copy(update={"time_utc": ours.time_utc}).model_dump_json() == ours.model_dump_json()


def _is_of(key: str, folder: str, step_key: StepKey) -> bool:
    record = parse_record_key(key, folder)
    return record is not None and record.step_key == step_key

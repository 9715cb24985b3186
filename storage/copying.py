"""Copies Checkpoints to another place so that a Run can go on from there: Shards, Manifest, the Commit last.

Digests are checked while copying; what is there and right is not sent again; what is there and different is never
replaced. Memory stays bounded: an object passes through a temporary file, read in parts.
"""

from __future__ import annotations

import json
import mmap
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import xxhash

from storage.commit_log import CommitLog
from storage.errors import CorruptCheckpoint, ObjectExists, ObjectMissing, StorageError
from storage.history import effective_history
from storage.keys import RUN, StepKey, shard_prefix
from storage.manifest import Commit
from storage.object_store import ObjectStore
from storage.verify import verify_commit

__all__ = ["CopyRefused", "CopyReport", "check_target", "copy_checkpoint", "copy_run_record"]

_PART_BYTES = 16 << 20


class CopyRefused(StorageError):
    """The target holds something that a copy would contradict or overwrite. Nothing of it was changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyReport:
    """What one Checkpoint took. ``was_there``: it was committed there already, whole."""

    key: StepKey
    objects_sent: int
    bytes_sent: int
    bytes_kept: int
    was_there: bool


def check_target(target: CommitLog, commits: Sequence[Commit]) -> None:
    """Refuse a place of another Run, and Checkpoints that could not be resumed from there. Reads only."""
    scan, out_of_use = target.scan(), set(target.quarantined_keys())
    url = target.store.url
    strangers = {other.run_id for other in scan.commits} - {commit.run_id for commit in commits}
    if strangers:
        raise CopyRefused(f"{url} holds checkpoints of run {', '.join(sorted(strangers))}; choose an empty place")
    for commit in commits:
        if commit.step_key in out_of_use:
            raise CopyRefused(f"step {commit.step} is quarantined in {url}: lift that first, or leave the step out")
    together = {commit.object_key: commit for commit in (*scan.commits, *commits)}
    real = {commit.object_key for commit in effective_history(together.values(), out_of_use)}
    void = [str(commit.step) for commit in commits if commit.object_key not in real]
    if void:
        raise CopyRefused(
            f"step {', '.join(void)} would be void in {url}: a newer attempt there went on from an earlier step"
        )


def copy_run_record(source: ObjectStore, target: ObjectStore, run_id: str) -> bool:
    """Take run.json along, so that the Run keeps its id and its clock. False where there is none, or it is there."""
    try:
        content = source.get(RUN)
    except ObjectMissing:
        return False
    try:
        there = target.get(RUN)
    except ObjectMissing:
        target.put(RUN, content)
        return True
    try:
        said = json.loads(there)["run_id"]
    except (ValueError, KeyError, TypeError) as error:
        raise CopyRefused(
            f"{target.url} has a {RUN} that cannot be read: {error}; remove it or choose another"
        ) from error
    if said != run_id:
        raise CopyRefused(f"{target.url} is the place of run {said}, not of {run_id}; choose an empty place")
    return False


def copy_checkpoint(
    source: CommitLog, target: CommitLog, commit: Commit, *, progress: Callable[[int], None] = lambda _: None
) -> CopyReport:
    """Copy one Checkpoint; ``progress`` is told the bytes dealt with, piece by piece.

    Raises CorruptCheckpoint when the source is not what was committed, CopyRefused rather than replacing anything.
    Stopped half-way it leaves a save without a Commit, which the next call completes.
    """
    manifest = source.read_manifest(commit)
    record = commit.object_key
    was_there = _is_there(target.store, record, source.store.get(record))
    sizes = {entry.key: entry.size for entry in target.store.list(shard_prefix(commit.step_key))}
    sent = sent_bytes = kept_bytes = 0
    for shard in manifest.shards:
        expected = _Expected(step=commit.step, key=shard.key, size=shard.size, digest=shard.digest, rank=shard.rank)
        if _is_kept(target.store, expected, sizes.get(shard.key), progress):
            kept_bytes += shard.size
            continue
        _send(source.store, target.store, expected, progress)
        sent, sent_bytes = sent + 1, sent_bytes + shard.size
    if not _is_there(target.store, commit.manifest_key, content := source.store.get(commit.manifest_key)):
        target.store.put(commit.manifest_key, content)
        sent, sent_bytes = sent + 1, sent_bytes + len(content)
    _commit_copy(source, target, commit, was_there=was_there)
    return CopyReport(
        key=commit.step_key,
        objects_sent=sent if was_there else sent + 1,
        bytes_sent=sent_bytes,
        bytes_kept=kept_bytes,
        was_there=was_there,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Expected:
    step: int
    key: str
    size: int
    digest: str
    rank: int

    def corrupt(self, reason: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(self.step, self.key, reason, self.rank)


def _commit_copy(source: CommitLog, target: CommitLog, commit: Commit, *, was_there: bool) -> None:
    """The last write: only when every object is seen at the target, with its size and its index."""
    report = verify_commit(target.store, target, commit, deep=False)
    if not report.is_good:
        problems = "; ".join(map(str, report.problems[:4]))
        raise CopyRefused(f"step {commit.step} is not committed in {target.store.url}, it did not arrive: {problems}")
    if was_there:
        return
    key = commit.object_key
    content = source.store.get(key)
    try:
        target.store.create(key, content)
    except ObjectExists as error:
        if target.store.get(key) != content:
            raise CopyRefused(f"{target.store.url} already holds another {key}; it stays as it is") from error


def _is_there(target: ObjectStore, key: str, content: bytes) -> bool:
    try:
        found = target.get(key)
    except ObjectMissing:
        return False
    if found != content:
        raise CopyRefused(f"{target.url} already holds another {key} ({len(found)} bytes); it stays as it is")
    return True


def _is_kept(target: ObjectStore, expected: _Expected, size: int | None, progress: Callable[[int], None]) -> bool:
    """Whether the object is at the target with the right size and digest."""
    if size is None:
        return False
    found = f"{size} bytes"
    if size == expected.size:
        digest = xxhash.xxh3_128()
        for part in _parts(target, expected):
            digest.update(part)
            progress(len(part))
        if digest.hexdigest() == expected.digest:
            return True
        found = f"digest {digest.hexdigest()}"
    raise CopyRefused(
        f"{target.url} already holds another {expected.key} ({found}, expected {expected.size} bytes, digest "
        f"{expected.digest}); it stays as it is: remove it, or choose another place"
    )


def _send(source: ObjectStore, target: ObjectStore, expected: _Expected, progress: Callable[[int], None]) -> None:
    with tempfile.TemporaryFile(prefix="raysume-copy-") as spool:
        _fetch_checked(source, expected, spool, progress)
        if not expected.size:
            target.put(expected.key, b"")
            return
        # Never closed, freed with the last view of it: a put that failed or hangs still holds some, and closing then
        # would raise BufferError in place of what went wrong.
        mapped = mmap.mmap(spool.fileno(), expected.size, access=mmap.ACCESS_READ)
        target.put(expected.key, memoryview(mapped))


def _fetch_checked(source: ObjectStore, expected: _Expected, spool: BinaryIO, progress: Callable[[int], None]) -> None:
    """The whole object into ``spool``, or CorruptCheckpoint: nothing unchecked is ever sent on."""
    listed = {entry.key: entry.size for entry in source.list(expected.key.rpartition("/")[0] + "/")}
    size = listed.get(expected.key)
    if size != expected.size:
        raise expected.corrupt("missing file" if size is None else f"{size} bytes, committed {expected.size}")
    digest = xxhash.xxh3_128()
    try:
        for part in _parts(source, expected):
            digest.update(part)
            spool.write(part)
            progress(len(part))
        spool.flush()
    except ObjectMissing as error:
        raise expected.corrupt("missing file") from error
    except OSError as error:
        raise CopyRefused(
            f"{expected.key} ({expected.size} bytes) cannot be held in {Path(tempfile.gettempdir())}: {error}; "
            "point TMPDIR to a directory with room for one shard"
        ) from error
    if digest.hexdigest() != expected.digest:
        raise expected.corrupt(f"hash mismatch: {digest.hexdigest()}, committed {expected.digest}")


def _parts(store: ObjectStore, expected: _Expected) -> Iterator[bytes]:
    for start in range(0, expected.size, _PART_BYTES):
        yield store.get_range(expected.key, start, min(_PART_BYTES, expected.size - start))

"""Copies: whole, checked, resumable, and never over something else. In-memory stores; the local disk once."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

import storage.copying
from storage.commit_log import CommitLog
from storage.copying import CopyRefused, check_target, copy_checkpoint, copy_run_record
from storage.errors import CorruptCheckpoint, StoreUnavailable
from storage.keys import Attempt, shard_key
from storage.local_store import LocalStore
from storage.manifest import Commit
from storage.memory_store import MemoryStore
from storage.object_store import ObjectStore
from storage.restore import plan_restore
from storage.verify import verify_commit
from tests.fakes.checkpoints import RUN, TIME, attempt, save


def log_of(store: ObjectStore) -> CommitLog:
    return CommitLog(store, None)


def copy_all(source: ObjectStore, target: ObjectStore) -> list[Commit]:
    commits = log_of(source).commits()
    check_target(log_of(target), commits)
    for commit in commits:
        copy_checkpoint(log_of(source), log_of(target), commit)
    return commits


class CountingStore(MemoryStore):
    """Counts writes; the one numbered ``fails_at`` fails instead, once."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.writes: list[str] = []
        self._fails_at = fails_at

    def put(self, key: str, data: bytes | memoryview, *, deadline_s: float = 60.0) -> None:
        self._count(key)
        super().put(key, data, deadline_s=deadline_s)

    def create(self, key: str, data: bytes, *, deadline_s: float = 60.0) -> None:
        self._count(key)
        super().create(key, data, deadline_s=deadline_s)

    def _count(self, key: str) -> None:
        if self._fails_at == len(self.writes):
            self._fails_at = None
            raise StoreUnavailable("put", key, "cut off")
        self.writes.append(key)


@pytest.mark.parametrize("part_bytes", [16 << 20, 100])
def test_a_copy_on_the_local_disk_is_whole_and_is_resumed_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    monkeypatch.setattr(storage.copying, "_PART_BYTES", part_bytes)
    source, target = MemoryStore(), LocalStore(tmp_path / "copy")
    save(source, 10)
    save(source, 20, by=attempt(2), base_step=10)
    for commit in copy_all(source, target):
        assert verify_commit(target, log_of(target), commit).is_good
    plan = plan_restore(CommitLog(target, RUN), attempt=Attempt(number=3, nonce="00000003"))
    assert plan is not None
    assert plan.step == 20


def test_shards_go_first_then_the_manifest_then_the_commit() -> None:
    source, target = MemoryStore(), CountingStore()
    save(source, 10)
    copy_all(source, target)
    assert [key.partition("/")[0] for key in target.writes] == ["shards", "shards", "manifests", "commits"]


def test_what_is_there_is_not_sent_again() -> None:
    source, target = MemoryStore(), CountingStore()
    commit = save(source, 10)
    copy_all(source, target)
    target.writes.clear()
    report = copy_checkpoint(log_of(source), log_of(target), commit)
    assert (target.writes, report.was_there, report.objects_sent, report.bytes_sent) == ([], True, 0, 0)
    assert report.bytes_kept == commit.stored_bytes


@pytest.mark.parametrize("fails_at", range(4))
def test_a_copy_cut_off_anywhere_leaves_no_checkpoint_and_the_next_one_completes_it(fails_at: int) -> None:
    source, target = MemoryStore(), CountingStore(fails_at)
    save(source, 10)
    with pytest.raises(StoreUnavailable):
        copy_all(source, target)
    assert log_of(target).all_commits() == []
    (commit,) = copy_all(source, target)
    assert verify_commit(target, log_of(target), commit).is_good
    assert len(set(target.writes)) == len(target.writes) == 4


@pytest.mark.parametrize("change", ["flip", "cut", "remove"])
def test_a_damaged_shard_is_found_while_copying_and_never_committed(change: str) -> None:
    source, target = MemoryStore(), MemoryStore()
    commit = save(source, 10)
    key = shard_key(commit.step_key, 1)
    content = bytearray(source.get(key))
    content[len(content) // 2] ^= 1
    match change:
        case "flip":
            source.put(key, bytes(content))
        case "cut":
            source.put(key, bytes(content[:-1]))
        case _:
            source.delete([key])
    with pytest.raises(CorruptCheckpoint, match=key):
        copy_all(source, target)
    assert log_of(target).all_commits() == []
    assert [entry.key for entry in target.list("shards/")] == [shard_key(commit.step_key, 0)]


@pytest.mark.parametrize("which", ["shard", "manifest", "commit"])
def test_nothing_different_is_overwritten(which: str) -> None:
    source, target = MemoryStore(), MemoryStore()
    commit = save(source, 10)
    key = {"shard": shard_key(commit.step_key, 1), "manifest": commit.manifest_key, "commit": commit.object_key}[which]
    target.put(key, source.get(key)[::-1])
    with pytest.raises(CopyRefused, match=key):
        copy_checkpoint(log_of(source), log_of(target), commit)
    assert target.get(key) == source.get(key)[::-1]


def test_the_place_of_another_run_is_refused() -> None:
    source, target = MemoryStore(), MemoryStore()
    save(source, 10)
    other = save(target, 10)
    stranger = other.model_copy(update={"run_id": "stranger"})
    target.put(other.object_key, stranger.model_dump_json().encode())
    with pytest.raises(CopyRefused, match="stranger"):
        copy_all(source, target)


def test_a_copy_that_would_be_void_or_is_quarantined_there_is_refused() -> None:
    source, target = MemoryStore(), MemoryStore()
    commit = save(source, 30)
    save(target, 20, by=attempt(2), base_step=10)
    with pytest.raises(CopyRefused, match="step 30 would be void"):
        copy_all(source, target)
    empty = MemoryStore()
    log_of(empty).quarantine(commit.step_key, "some/key", "flipped", TIME)
    with pytest.raises(CopyRefused, match="quarantined"):
        copy_all(source, empty)


def test_a_full_target_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    source = MemoryStore()
    save(source, 10)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreUnavailable, match="No space left on device"):
        copy_all(source, LocalStore(tmp_path))


def test_run_json_goes_along_once_and_names_the_run() -> None:
    source, target = MemoryStore(), MemoryStore()
    assert not copy_run_record(source, target, RUN)
    source.put("run.json", json.dumps({"run_id": RUN}).encode())
    assert copy_run_record(source, target, RUN)
    assert not copy_run_record(source, target, RUN)
    assert target.get("run.json") == source.get("run.json")
    for content in (b'{"run_id": "other"}', b"{", b"[]"):
        target.put("run.json", content)
        with pytest.raises(CopyRefused):
            copy_run_record(source, target, RUN)
        assert target.get("run.json") == content

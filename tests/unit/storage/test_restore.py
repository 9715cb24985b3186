"""Where to go on: cut-off saves, lost and flipped bytes, wrong places. On the in-memory store."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from storage.commit_log import CommitLog
from storage.errors import CorruptCheckpoint, ObjectMissing, StorageError, StoreRefused, StoreUnavailable
from storage.frames import num_rows, read_index, read_rows
from storage.keys import shard_key
from storage.memory_store import MemoryStore
from storage.object_store import ObjectEntry
from storage.restore import plan_restore
from storage.sources import RestorePlan
from tests.fakes.checkpoints import RUN, TIME, attempt, commit_parts, prepare, save, weights, write_shards


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore("restore")


def plan(store: MemoryStore, step: int | None = None) -> RestorePlan | None:
    return plan_restore(CommitLog(store, RUN), attempt=attempt(9), step=step, clock=lambda: 0.0)


def planned_step(store: MemoryStore) -> int:
    found = plan(store)
    assert found is not None
    return found.step


def flip_byte(store: MemoryStore, key: str, position: int) -> None:
    content = bytearray(store.get(key))
    content[position] ^= 1
    store.put(key, bytes(content))


def load(store: MemoryStore, chosen: RestorePlan) -> bytes:
    """Reads what a plan names as a rank would: manifest, index, frames, each checked."""
    log = CommitLog(store, RUN)
    commit = next(commit for commit in log.all_commits() if commit.step_key == chosen.source)
    raw = b""
    for record in log.read_manifest(commit).shards:

        def fetch(offset: int, length: int, key: str = record.key) -> bytes:
            return store.get_range(key, offset, length)

        for chunk in read_index(fetch, record, step=commit.step).chunks:
            raw += read_rows(chunk, 0, num_rows(chunk.sizes), fetch, step=commit.step, key=record.key, rank=record.rank)
    return raw


def test_a_run_that_never_committed_has_no_plan(store: MemoryStore) -> None:
    assert plan(store) is None


def test_the_plan_names_the_newest_commit_and_every_shard_of_it(store: MemoryStore) -> None:
    for step in (9, 10, 100, 99):
        save(store, step)
    chosen = plan(store)
    assert chosen is not None
    assert chosen.step == 100
    assert chosen.attempt == attempt(9)
    assert chosen.root_url == "memory://restore"
    assert [shard.location for shard in chosen.shards] == [shard_key(chosen.source, rank) for rank in (0, 1)]
    assert load(store, chosen) == weights(100, 16)


def test_shards_without_a_commit_are_passed_over_with_one_warning(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    save(store, 10)
    save(store, 20)
    write_shards(store, prepare(30))
    with caplog.at_level(logging.WARNING):
        assert planned_step(store) == 20
    assert len(caplog.records) == 1
    assert "step 30" in caplog.text
    assert "no commit" in caplog.text


def test_only_shards_and_no_commit_at_all_is_a_fresh_start(store: MemoryStore) -> None:
    write_shards(store, prepare(30))
    assert plan(store) is None


def test_lost_and_flipped_shards_are_quarantined_and_the_step_before_is_taken(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    commits = {step: save(store, step) for step in (10, 20, 30)}
    lost, flipped = shard_key(commits[30].step_key, 1), shard_key(commits[20].step_key, 0)
    store.delete([lost])
    flip_byte(store, flipped, 50)
    with caplog.at_level(logging.WARNING):
        second = plan(store)
    assert second is not None
    assert second.step == 20
    assert lost in caplog.text
    with pytest.raises(CorruptCheckpoint, match="hash mismatch") as caught:
        load(store, second)
    CommitLog(store, RUN).quarantine(second.source, caught.value.key, caught.value.reason, TIME)

    third = plan(store)
    assert third is not None
    assert third.step == 10
    assert load(store, third) == weights(10, 16)
    records = CommitLog(store, RUN).quarantined()
    assert records[commits[30].step_key].key == lost
    assert records[commits[30].step_key].reason == "missing file"
    assert records[commits[20].step_key].key == flipped
    assert "hash mismatch" in records[commits[20].step_key].reason


def test_what_is_quarantined_is_not_read_again() -> None:
    class Counting(MemoryStore):
        def get(self, key: str, *, deadline_s: float = 60.0) -> bytes:
            read.append(key)
            return super().get(key, deadline_s=deadline_s)

    read: list[str] = []
    counting = Counting()
    save(counting, 10)
    bad = save(counting, 20)
    flip_byte(counting, bad.manifest_key, 10)
    assert planned_step(counting) == 10
    read.clear()
    assert planned_step(counting) == 10
    assert bad.manifest_key not in read


@pytest.mark.parametrize("damage", ["truncate", "grow"])
def test_a_shard_of_the_wrong_size_is_quarantined(store: MemoryStore, damage: str) -> None:
    save(store, 10)
    key = shard_key(save(store, 20).step_key, 0)
    content = store.get(key)
    store.put(key, content[:-1] if damage == "truncate" else content + b"x")
    assert planned_step(store) == 10
    (record,) = CommitLog(store, RUN).quarantined().values()
    assert "committed" in record.reason


def test_an_exact_step_is_taken_or_refused_with_the_steps_there_are(store: MemoryStore) -> None:
    save(store, 10)
    save(store, 20)
    chosen = plan(store, step=10)
    assert chosen is not None
    assert chosen.step == 10
    with pytest.raises(ObjectMissing, match=r"step 15 .*memory://restore .*10, 20"):
        plan(store, step=15)


def test_an_exact_step_that_is_bad_does_not_fall_back(store: MemoryStore) -> None:
    save(store, 10)
    store.delete([shard_key(save(store, 20).step_key, 0)])
    with pytest.raises(CorruptCheckpoint, match="missing file"):
        plan(store, step=20)


def test_an_exact_step_in_an_empty_place_is_an_error_naming_it(store: MemoryStore) -> None:
    with pytest.raises(ObjectMissing, match=r"memory://restore .*none"):
        plan(store, step=20)


def test_when_every_commit_is_bad_the_run_does_not_start_over(store: MemoryStore) -> None:
    for step in (10, 20):
        store.delete([shard_key(save(store, step).step_key, 0)])
    with pytest.raises(StorageError, match=r"none is usable .*step 10: .*missing file; step 20: .*missing file"):
        plan(store)
    with pytest.raises(StorageError, match="none is usable"):
        plan(store)


def test_only_unreadable_commit_records_do_not_start_over(store: MemoryStore) -> None:
    commit = save(store, 10)
    store.put(commit.object_key, b"{torn")
    with pytest.raises(StorageError, match="unreadable record"):
        plan(store)


@pytest.mark.parametrize("error", [StoreRefused("list", "commits/", "access denied"), StoreUnavailable("l", "c", "?")])
@pytest.mark.parametrize("prefix", ["commits/", "shards/", "quarantine/"])
def test_an_error_of_the_store_is_never_an_empty_run(error: StoreUnavailable, prefix: str) -> None:
    class Failing(MemoryStore):
        def list(self, wanted: str, *, deadline_s: float = 60.0) -> list[ObjectEntry]:  # type: ignore[override]
            if wanted == prefix:
                raise error
            return super().list(wanted, deadline_s=deadline_s)

    with pytest.raises(type(error)):
        plan(Failing())


class _Dies(MemoryStore):
    """Dies before its ``survives``-th write; writes are whole or not at all, as every store promises."""

    def __init__(self, base: MemoryStore, survives: int) -> None:
        super().__init__()
        self._left = 1 << 30
        for entry in base.list(""):
            self.put(entry.key, base.get(entry.key))
        self._left = survives

    def _count(self) -> None:
        if self._left == 0:
            raise KeyboardInterrupt
        self._left -= 1

    def put(self, key: str, data: bytes | memoryview, *, deadline_s: float = 60.0) -> None:
        self._count()
        super().put(key, data, deadline_s=deadline_s)

    def create(self, key: str, data: bytes, *, deadline_s: float = 60.0) -> None:
        self._count()
        super().create(key, data, deadline_s=deadline_s)

    def delete(self, keys: Sequence[str], *, deadline_s: float = 60.0) -> None:
        self._count()
        super().delete(keys, deadline_s=deadline_s)


@pytest.mark.parametrize("survives", range(5))
def test_a_save_killed_at_any_write_leaves_the_newest_commit_readable(store: MemoryStore, survives: int) -> None:
    save(store, 10)
    parts = prepare(20, world_size=2)
    assert survives <= len(parts.shards) + 2
    dying = _Dies(store, survives)
    try:
        write_shards(dying, parts)
        commit_parts(CommitLog(dying, RUN), parts)
        finished = True
    except KeyboardInterrupt:
        finished = False
    assert finished == (survives == 4)
    dying._left = 1 << 30
    chosen = plan(dying)
    assert chosen is not None
    assert chosen.step == (20 if finished else 10)
    assert load(dying, chosen) == weights(chosen.step, 16)
    assert CommitLog(dying, RUN).quarantined() == {}


def test_a_commit_that_fails_once_leaves_the_step_uncommitted_and_can_be_repeated(store: MemoryStore) -> None:
    save(store, 10)
    parts = prepare(20)
    dying = _Dies(store, 3)
    write_shards(dying, parts)
    with pytest.raises(KeyboardInterrupt):
        commit_parts(CommitLog(dying, RUN), parts)
    dying._left = 1 << 30
    assert planned_step(dying) == 10
    commit_parts(CommitLog(dying, RUN), parts)
    assert planned_step(dying) == 20

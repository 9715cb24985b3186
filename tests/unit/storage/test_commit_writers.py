"""Several processes that write for one Run: unique names, fencing without create-only. On the in-memory store."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from storage.commit_log import MAX_MANIFEST_BYTES, MAX_RECORD_BYTES, CommitLog
from storage.errors import CommitRefused, CorruptCheckpoint, StoreUnavailable
from storage.history import effective_history
from storage.keys import StepKey, commit_key, manifest_key
from storage.manifest import Manifest
from storage.memory_store import MemoryStore
from storage.object_store import ObjectEntry
from storage.sweeper import sweep
from tests.fakes.checkpoints import RUN, TIME, WRITER, SaveParts, attempt, commit_parts, prepare, save, write_shards

FIRST, SECOND = "00000001", "00000002"


class LaxStore(MemoryStore):
    """A store that does not honour create-only writes, and runs ``then`` once, just after the next Commit."""

    then: Callable[[], object] | None = None

    def create(self, key: str, data: bytes, *, deadline_s: float = 60.0) -> None:
        self.put(key, data, deadline_s=deadline_s)
        if key.startswith("commits/") and self.then is not None:
            then, self.then = self.then, None
            then()


class LateStore(MemoryStore):
    """A store whose listings show nothing that was written since ``is_late`` was set."""

    def __init__(self) -> None:
        super().__init__()
        self.is_late = False
        self._shown: set[str] = set()

    def put(self, key: str, data: bytes | memoryview, *, deadline_s: float = 60.0) -> None:
        super().put(key, data, deadline_s=deadline_s)
        if not self.is_late:
            self._shown.add(key)

    def list(self, prefix: str, *, deadline_s: float = 60.0) -> list[ObjectEntry]:
        return [entry for entry in super().list(prefix, deadline_s=deadline_s) if entry.key in self._shown]

    def create(self, key: str, data: bytes, *, deadline_s: float = 60.0) -> None:
        self.put(key, data, deadline_s=deadline_s)


@pytest.fixture
def store() -> LaxStore:
    return LaxStore()


def writing(store: MemoryStore, writer: str = WRITER) -> CommitLog:
    return CommitLog(store, RUN, writer=writer)


def written(store: MemoryStore, step: int, **how: object) -> SaveParts:
    parts = prepare(step, **how)  # type: ignore[arg-type]
    write_shards(store, parts)
    return parts


def names(store: MemoryStore) -> list[str]:
    return [entry.key for folder in ("commits/", "manifests/") for entry in store.list(folder)]


def test_two_logs_never_write_one_name(store: LaxStore) -> None:
    logs = [CommitLog(store, RUN) for _ in range(2)]
    keys = [log.write_manifest(prepare(10).manifest()).key for log in logs]
    assert len({log.writer for log in logs} | {WRITER}) == 3
    assert len(set(keys)) == 2


def test_a_restarted_coordinator_touches_no_record_of_the_one_before(store: LaxStore) -> None:
    first = commit_parts(writing(store, FIRST), written(store, 10))
    before = {key: store.get(key) for key in names(store)}
    second = commit_parts(writing(store, SECOND), written(store, 20))
    assert (first.writer, second.writer) == (FIRST, SECOND)
    assert {key: store.get(key) for key in before} == before
    assert [commit.step for commit in writing(store).commits()] == [10, 20]


def test_a_step_that_the_process_before_committed_is_not_committed_twice(store: LaxStore) -> None:
    parts = written(store, 10)
    first = commit_parts(writing(store, FIRST), parts)
    log = writing(store, SECOND)
    stored = log.write_manifest(parts.manifest())
    again = first.model_copy(update={"manifest_key": stored.key, "time_utc": "later"})
    assert log.append(again) == first
    assert log.all_commits() == [first]


def test_the_same_step_with_other_shards_is_refused_and_the_first_stays(store: LaxStore) -> None:
    first = commit_parts(writing(store, FIRST), written(store, 10, rows_per_rank=8))
    with pytest.raises(CommitRefused, match=r"w00000001\.json of another process names other Shards"):
        commit_parts(writing(store, SECOND), prepare(10, rows_per_rank=4))
    assert writing(store).all_commits() == [first]


def test_a_coordinator_that_was_replaced_cannot_commit_an_earlier_step(store: LaxStore) -> None:
    commit_parts(writing(store, SECOND), written(store, 30))
    with pytest.raises(CommitRefused, match=r"another process drives this attempt and has committed step 30"):
        commit_parts(writing(store, FIRST), written(store, 20))
    commit_parts(writing(store, FIRST), written(store, 40))
    assert [commit.step for commit in writing(store).commits()] == [30, 40]


def test_of_two_commits_of_one_step_the_first_writer_counts_in_any_order(store: LaxStore) -> None:
    parts = written(store, 10)
    twins = [commit_parts(writing(LaxStore(), writer), parts) for writer in (SECOND, FIRST)]
    for order in (twins, twins[::-1]):
        assert [commit.writer for commit in effective_history(order)] == [FIRST]


def test_all_records_of_a_step_are_uncommitted_quarantined_and_swept_together(store: LaxStore) -> None:
    parts = written(store, 10)
    others = LaxStore()
    commit_parts(writing(others, FIRST), parts)
    first = commit_parts(writing(store, SECOND), parts)
    for entry in others.list(""):
        store.put(entry.key, others.get(entry.key))
    newest = save(store, 20)
    log = writing(store)
    assert len(log.all_commits()) == 3
    log.quarantine(first.step_key, "x", "y", TIME)
    assert log.commits() == [newest]
    sweep(store, log, [first])
    assert log.all_commits() == [newest]
    assert not [key for key in names(store) if "0000000010" in key]
    assert store.list("shards/step-0000000010/") == []


def test_a_commit_that_a_newer_attempt_made_void_meanwhile_is_taken_back(store: LaxStore) -> None:
    save(store, 10)
    store.then = lambda: save(store, 15, by=attempt(2), base_step=10)
    with pytest.raises(CommitRefused, match=r"step 20 .* is taken back: attempt a000002-00000002 committed step 15"):
        commit_parts(writing(store), written(store, 20))
    assert [(commit.step, commit.attempt.number) for commit in writing(store).all_commits()] == [(10, 1), (15, 2)]


def test_a_commit_that_a_newer_attempt_went_on_from_stays(store: LaxStore) -> None:
    """A driver that was stopped between its write and its look: others may have built on what it wrote."""
    store.then = lambda: save(store, 25, by=attempt(2), base_step=20)
    commit_parts(writing(store), written(store, 20))
    assert [commit.step for commit in writing(store).commits()] == [20, 25]


def test_a_failed_look_after_the_write_does_not_undo_the_commit() -> None:
    class Away(MemoryStore):
        lists = 0

        def list(self, prefix: str, *, deadline_s: float = 60.0) -> list[ObjectEntry]:
            self.lists += prefix == "commits/"
            if self.lists == 2:
                raise StoreUnavailable("list", prefix, "away")
            return super().list(prefix, deadline_s=deadline_s)

    store = Away()
    commit = commit_parts(writing(store), written(store, 10))
    assert store.lists == 2
    assert writing(store).commits() == [commit]


def test_a_committed_manifest_is_never_overwritten(store: LaxStore) -> None:
    log = writing(store)
    parts = written(store, 10)
    commit = commit_parts(log, parts)
    content = store.get(commit.manifest_key)
    again = log.write_manifest(parts.manifest().model_copy(update={"time_utc": "later"}))
    assert again.digest == commit.manifest_digest
    with pytest.raises(CommitRefused, match="a Commit may name manifests/"):
        log.write_manifest(prepare(10, rows_per_rank=4).manifest())
    assert store.get(commit.manifest_key) == content


def test_a_commit_sent_twice_is_the_same_also_when_its_loss_is_no_number() -> None:
    store = MemoryStore()
    log, parts = writing(store), written(store, 10)
    commit = commit_parts(log, parts).model_copy(update={"loss": float("nan")})
    store.delete([commit.object_key])
    state = parts.manifest().model_copy(update={"shared_state": {"loss": float("nan"), "best": float("inf")}})
    stored = writing(MemoryStore()).write_manifest(state)
    log.append(commit)
    assert log.append(commit.model_copy(update={"time_utc": "later"})).time_utc == TIME
    other = writing(store, SECOND)
    assert other.write_manifest(state).digest == stored.digest
    assert repr(Manifest.model_validate_json(store.get(manifest_key(commit.step_key, SECOND)))) == repr(state)


def test_a_manifest_left_by_a_save_that_failed_before_its_commit_is_replaced() -> None:
    store = MemoryStore()
    log = writing(store)
    log.write_manifest(prepare(10, rows_per_rank=4).manifest())
    parts = written(store, 10)
    commit = commit_parts(log, parts)
    assert log.read_manifest(commit) == parts.manifest()


def test_a_commit_must_name_a_manifest_of_its_own(store: LaxStore) -> None:
    commit = commit_parts(writing(store, FIRST), written(store, 10))
    with pytest.raises(CommitRefused, match="no Manifest of this writer's"):
        writing(store, SECOND).append(commit)
    foreign = commit.model_copy(update={"manifest_key": manifest_key(StepKey(step=20, attempt=attempt()))})
    store.put(commit_key(commit.step_key, SECOND), foreign.model_dump_json().encode())
    assert writing(store).scan().unreadable == (commit_key(commit.step_key, SECOND),)


def test_an_absurdly_large_record_is_not_read(store: LaxStore) -> None:
    commit = commit_parts(writing(store), written(store, 10))
    big = commit.model_dump_json().encode() + b" " * MAX_RECORD_BYTES
    store.put(commit.object_key, big)
    assert writing(store).scan().unreadable == (commit.object_key,)
    with pytest.raises(CorruptCheckpoint, match="at most"):
        writing(store).read_manifest(commit.model_copy(update={"manifest_bytes": MAX_MANIFEST_BYTES + 1}))


def test_a_manifest_grown_since_its_commit_is_refused_before_it_is_read() -> None:
    class Counting(MemoryStore):
        got: list[str] = []  # noqa: RUF012

        def get(self, key: str, *, deadline_s: float = 60.0) -> bytes:
            self.got.append(key)
            return super().get(key, deadline_s=deadline_s)

    store = Counting()
    commit = commit_parts(writing(store), written(store, 10))
    store.put(commit.manifest_key, store.get(commit.manifest_key) + b" ")
    store.got.clear()
    with pytest.raises(CorruptCheckpoint, match="bytes, committed"):
        writing(store).read_manifest(commit)
    assert store.got == []


def test_a_commit_of_its_own_counts_before_a_late_listing_shows_it() -> None:
    store = LateStore()
    log = writing(store)
    commit_parts(log, written(store, 10))
    store.is_late = True
    newest = commit_parts(log, written(store, 20))
    assert log.latest() == newest
    log.uncommit(newest.step_key)
    assert [commit.step for commit in log.commits()] == [10]


def test_a_commit_of_its_own_that_somebody_else_took_away_does_not_count() -> None:
    store = LateStore()
    log = writing(store)
    store.is_late = True
    commit = commit_parts(log, written(store, 10))
    store.delete([commit.object_key])
    assert log.commits() == []

"""Which Checkpoints exist: order, fencing, history across Attempts, foreign files. On the in-memory store."""

from __future__ import annotations

import logging
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.commit_log import CommitLog
from storage.errors import (
    CommitRefused,
    CorruptCheckpoint,
    ObjectExists,
    ObjectMissing,
    StorageError,
    StoreUnavailable,
)
from storage.history import effective_history, uncommitted_steps
from storage.keys import StepKey, commit_key
from storage.manifest import Commit
from storage.memory_store import MemoryStore
from tests.fakes.checkpoints import RUN, TIME, WRITER, attempt, commit_parts, prepare, save, write_shards


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def log(store: MemoryStore) -> CommitLog:
    return CommitLog(store, RUN, writer=WRITER)


def steps(log: CommitLog) -> list[int]:
    return [commit.step for commit in log.commits()]


def test_an_empty_store_has_no_commits(log: CommitLog) -> None:
    assert log.commits() == []
    assert log.latest() is None


def test_latest_is_numeric_not_alphabetic(store: MemoryStore, log: CommitLog) -> None:
    for step in (9, 10, 99, 100):
        save(store, step)
    assert steps(log) == [9, 10, 99, 100]
    latest = log.latest()
    assert latest is not None
    assert latest.step == 100


def test_a_step_beyond_ten_digits_of_padding_still_sorts_by_number(store: MemoryStore, log: CommitLog) -> None:
    for step in (9_999_999_999, 7):
        save(store, step)
    assert steps(log) == [7, 9_999_999_999]


def test_a_long_lived_log_sees_commits_of_others_at_once(store: MemoryStore, log: CommitLog) -> None:
    save(store, 10)
    assert steps(log) == [10]
    save(store, 20)
    assert steps(log) == [10, 20]
    CommitLog(store, RUN).uncommit(StepKey(step=20, attempt=attempt()))
    assert steps(log) == [10]


def test_shards_without_a_commit_are_no_checkpoint_and_are_reported(store: MemoryStore, log: CommitLog) -> None:
    save(store, 20)
    write_shards(store, prepare(30))
    store.put("shards/notes.txt", b"not ours")
    assert steps(log) == [20]
    assert uncommitted_steps(store) == [StepKey(step=30, attempt=attempt())]


def test_two_attempts_at_one_step_do_not_mix(store: MemoryStore, log: CommitLog) -> None:
    cut_off = prepare(20, world_size=2)
    store.put(*next(iter(cut_off.shards.items())))
    commit = save(store, 20, by=attempt(2), world_size=1)
    manifest = log.read_manifest(commit)
    assert [shard.key for shard in manifest.shards] == ["shards/step-0000000020/a000002-00000002/rank-00000.shard"]
    assert all(store.get(shard.key) for shard in manifest.shards)


def test_a_newer_attempt_voids_what_an_older_one_committed_beyond_its_base(store: MemoryStore, log: CommitLog) -> None:
    for step in (10, 20, 30, 40):
        save(store, step)
    save(store, 25, by=attempt(2), base_step=20)
    assert steps(log) == [10, 20, 25]
    assert len(log.all_commits()) == 5


def test_of_one_step_the_highest_attempt_counts(store: MemoryStore, log: CommitLog) -> None:
    save(store, 20)
    save(store, 20, by=attempt(2), base_step=10)
    latest = log.latest()
    assert latest is not None
    assert latest.attempt.number == 2
    assert steps(log) == [20]


def test_quarantining_a_newer_attempt_does_not_revive_what_it_voided(store: MemoryStore, log: CommitLog) -> None:
    for step in (10, 20, 30):
        save(store, step)
    newer = save(store, 25, by=attempt(2), base_step=10)
    log.quarantine(newer.step_key, "shards/x", "hash mismatch", TIME)
    assert steps(log) == [10]


def test_a_quarantined_commit_is_out_of_use_and_its_reason_is_kept(store: MemoryStore, log: CommitLog) -> None:
    save(store, 10)
    bad = save(store, 20)
    log.quarantine(bad.step_key, "shards/x.shard", "missing file", TIME)
    assert steps(log) == [10]
    record = CommitLog(store, RUN).quarantined()[bad.step_key]
    assert (record.key, record.reason) == ("shards/x.shard", "missing file")


def test_an_unreadable_quarantine_record_still_counts(store: MemoryStore, log: CommitLog) -> None:
    bad = save(store, 20)
    store.put(f"quarantine/{bad.step_key.stem}.json", b"{")
    assert steps(log) == []
    assert "unreadable" in log.quarantined()[bad.step_key].reason


def test_a_file_named_much_like_a_quarantine_record_ends_no_command(store: MemoryStore, log: CommitLog) -> None:
    bad = save(store, 20)
    store.put(f"quarantine/{bad.step_key.stem}.w{WRITER}.json", b"{}")
    assert "has another name" in log.quarantined()[bad.step_key].reason


def test_foreign_and_broken_files_are_ignored_with_one_warning(
    store: MemoryStore, log: CommitLog, caplog: pytest.LogCaptureFixture
) -> None:
    good = save(store, 10)
    broken = commit_key(StepKey(step=20, attempt=attempt()))
    renamed = commit_key(StepKey(step=30, attempt=attempt()))
    other_run = good.model_copy(update={"run_id": "other", "step": 40})
    store.put("commits/.DS_Store", b"")
    store.put("commits/old/step-0000000050.a000001-00000001.json", good.model_dump_json().encode())
    store.put(broken, b'{"version": 1')
    store.put(renamed, good.model_dump_json().encode())
    store.put(commit_key(other_run.step_key), other_run.model_dump_json().encode())
    with caplog.at_level(logging.WARNING):
        assert steps(log) == [10]
        assert steps(log) == [10]
    assert len(caplog.records) == 1
    for name in (".DS_Store", "commits/old/", broken, renamed, commit_key(other_run.step_key)):
        assert name in caplog.text
    assert set(log.scan().unreadable) == {broken, renamed, commit_key(other_run.step_key)}


def test_a_crowd_of_foreign_files_is_named_in_part(
    store: MemoryStore, log: CommitLog, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(1000):
        store.put(f"commits/{number:04d}", b"")
    with caplog.at_level(logging.WARNING):
        assert steps(log) == []
    [record] = caplog.records
    assert record.getMessage().endswith(", commits/0007 and 992 more")


def test_a_fenced_off_attempt_cannot_commit(store: MemoryStore, log: CommitLog) -> None:
    save(store, 10, by=attempt(2))
    parts = prepare(20, by=attempt(1))
    write_shards(store, parts)
    with pytest.raises(CommitRefused, match="a000002-00000002 has committed step 10"):
        commit_parts(log, parts)
    assert steps(log) == [10]


def test_an_equal_number_with_another_nonce_is_another_driver(store: MemoryStore, log: CommitLog) -> None:
    from storage.keys import Attempt

    save(store, 10)
    with pytest.raises(CommitRefused, match="another driver"):
        commit_parts(log, prepare(20, by=Attempt(number=1, nonce="ffffffff")))


def test_appending_the_same_commit_again_is_no_error_but_other_content_is(store: MemoryStore, log: CommitLog) -> None:
    commit = save(store, 10)
    log.append(commit)
    with pytest.raises(CommitRefused, match="other content"):
        log.append(commit.model_copy(update={"loss": 1.0}))
    assert log.all_commits() == [commit]


def test_a_commit_is_created_not_overwritten(store: MemoryStore, log: CommitLog) -> None:
    commit = save(store, 10)
    with pytest.raises(ObjectExists):
        store.create(commit.object_key, b"")
    assert log.latest() == commit


def test_another_runs_records_are_refused(store: MemoryStore) -> None:
    with pytest.raises(CommitRefused, match="belongs to run run"):
        commit_parts(CommitLog(store, "other"), prepare(10))
    assert store.list("") == []


def test_a_log_without_a_run_reads_any_run(store: MemoryStore) -> None:
    save(store, 10)
    assert [commit.step for commit in CommitLog(store, None).commits()] == [10]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda _: None, "missing file"),
        (lambda content: content[:-1], "bytes, committed"),
        (lambda content: content[:40] + bytes([content[40] ^ 1]) + content[41:], "hash mismatch"),
    ],
)
def test_a_damaged_manifest_is_named(store: MemoryStore, log: CommitLog, damage: object, reason: str) -> None:
    commit = save(store, 10)
    damaged = damage(store.get(commit.manifest_key))  # type: ignore[operator]
    store.delete([commit.manifest_key])
    if damaged is not None:
        store.put(commit.manifest_key, damaged)
    with pytest.raises(CorruptCheckpoint, match=reason) as caught:
        log.read_manifest(commit)
    assert caught.value.key == commit.manifest_key


def test_a_manifest_of_a_later_format_is_not_called_corrupt(store: MemoryStore, log: CommitLog) -> None:
    from storage.codec import digest128

    commit = save(store, 10)
    content = store.get(commit.manifest_key).replace(b'"version":1', b'"version":9')
    store.put(commit.manifest_key, content)
    with pytest.raises(StorageError, match="format this version cannot read") as caught:
        log.read_manifest(commit.model_copy(update={"manifest_digest": digest128(content)}))
    assert not isinstance(caught.value, CorruptCheckpoint)


@settings(deadline=None)
@given(
    lives=st.lists(
        st.tuples(st.integers(0, 60), st.lists(st.integers(1, 30), max_size=4, unique=True)), min_size=1, max_size=5
    )
)
def test_history_is_what_following_the_attempts_one_by_one_gives(lives: list[tuple[int, list[int]]]) -> None:
    template = save(MemoryStore(), 1)
    commits: list[Commit] = []
    expected: dict[int, int] = {}
    for number, (base, distances) in enumerate(lives, start=1):
        if not distances:
            continue  # an Attempt that committed nothing leaves no trace in the log
        expected = {step: owner for step, owner in expected.items() if step <= base}
        for distance in distances:
            expected[base + distance] = number
            update = {"step": base + distance, "base_step": base, "attempt": {"number": number, "nonce": "00000000"}}
            commits.append(Commit.model_validate(template.model_dump() | update))
    history = effective_history(reversed(commits))
    assert {commit.step: commit.attempt.number for commit in history} == expected
    assert [commit.step for commit in history] == sorted(expected)


class Crowded(MemoryStore):
    """Once ``is_armed``, answers reads of Commits only when ``number`` of them are asked for at the same time."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._barrier = threading.Barrier(number)
        self.is_armed = False
        self.most = 0
        self.failing: dict[str, Exception] = {}
        self._now = 0
        self._lock = threading.Lock()

    def get(self, key: str, *, deadline_s: float = 60.0) -> bytes:
        if not self.is_armed or not key.startswith("commits/"):
            return super().get(key, deadline_s=deadline_s)
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        try:
            self._barrier.wait(10.0)
            if key in self.failing:
                raise self.failing[key]
            return super().get(key, deadline_s=deadline_s)
        finally:
            with self._lock:
                self._now -= 1


def crowd(number: int, at_once: int) -> tuple[Crowded, list[str]]:
    store = Crowded(at_once)
    for step in range(1, number + 1):
        save(store, step)
    store.is_armed = True
    return store, [entry.key for entry in store.list("commits/")]


def test_commits_are_read_side_by_side_sixteen_at_most_and_stay_in_order() -> None:
    store, _ = crowd(32, 16)
    log = CommitLog(store, RUN)
    assert steps(log) == list(range(1, 33))
    assert store.most == 16
    store.get = pytest.fail  # type: ignore[method-assign, assignment]
    assert steps(log) == list(range(1, 33)), "what is known is not read again"


def test_a_commit_that_goes_or_is_damaged_while_many_are_read_is_left_out() -> None:
    store, keys = crowd(16, 16)
    store.failing = {keys[3]: ObjectMissing(keys[3])}
    store.put(keys[5], b"{}")
    scan = CommitLog(store, RUN).scan()
    assert [commit.step for commit in scan.commits] == [step for step in range(1, 17) if step not in (4, 6)]
    assert scan.unreadable == (keys[5],)


def test_a_store_that_fails_one_of_many_reads_fails_the_scan_with_its_own_error() -> None:
    store, keys = crowd(16, 16)
    store.failing = {keys[9]: StoreUnavailable("get", keys[9], "503")}
    with pytest.raises(StoreUnavailable, match="503"):
        CommitLog(store, RUN).scan()

"""Records of what was verified: written, read, and gone with their Checkpoint. On the in-memory store."""

from __future__ import annotations

import pytest

from storage.commit_log import CommitLog
from storage.keys import VERIFIED, StepKey, verified_key
from storage.manifest import AttemptRecord
from storage.memory_store import MemoryStore
from storage.object_store import ObjectStore
from storage.pruning import PruneWish, prune
from storage.sweeper import sweep, sweep_orphans
from storage.verified import VerifiedRecord, read_verified, verified_keys, verified_records, write_verified
from storage.verify import verify_commit
from tests.fakes.checkpoints import RUN, attempt, save


def record_of(key: StepKey, **changes: object) -> VerifiedRecord:
    record = VerifiedRecord(
        step=key.step, attempt=AttemptRecord.of(key.attempt), time_utc="2026-01-01T00:00:00Z", by="digests"
    )
    return record.model_copy(update=changes)


def test_a_record_is_read_as_it_was_written_infinity_included() -> None:
    store = MemoryStore()
    key = save(store, 10).step_key
    record = record_of(key, by="load", loss=float("inf"), expected=0.1 + 0.2)
    write_verified(store, record)
    assert read_verified(store, key) == record
    assert verified_keys(store) == {key}
    assert verified_records(store, [key]) == {key: record}


def test_what_cannot_be_read_is_no_record() -> None:
    store = MemoryStore()
    key, other = save(store, 10).step_key, save(store, 20).step_key
    store.put(verified_key(key), b"{}")
    store.put(verified_key(other), record_of(key).model_dump_json().encode())
    store.put(f"{VERIFIED}notes.txt", b"")
    assert read_verified(store, key) is None
    assert read_verified(store, other) is None
    assert verified_records(store, [key, other]) == {}
    assert verified_keys(store) == {key, other}


def test_a_newer_releases_record_with_more_fields_is_read() -> None:
    store = MemoryStore()
    key = save(store, 10).step_key
    content = record_of(key).model_dump_json()[:-1] + ',"later":1}'
    store.put(verified_key(key), content.encode())
    assert read_verified(store, key) == record_of(key)


def _swept(store: ObjectStore) -> None:
    log = CommitLog(store, RUN)
    sweep(store, log, log.commits()[:1])


def _pruned(store: ObjectStore) -> None:
    prune(store, PruneWish(keep=1), now_s=0.0)


@pytest.mark.parametrize("delete", [_swept, _pruned])
def test_a_record_goes_with_its_checkpoint_and_no_other(delete: object) -> None:
    assert callable(delete)
    store = MemoryStore()
    keys = [save(store, step).step_key for step in (10, 20)]
    for key in keys:
        write_verified(store, record_of(key))
    delete(store)
    assert verified_keys(store) == {keys[1]}
    log = CommitLog(store, RUN)
    assert [commit.step for commit in log.commits()] == [20]
    assert verify_commit(store, log, log.commits()[0]).is_good


def test_a_record_that_was_written_after_its_checkpoint_had_gone_is_swept() -> None:
    store = MemoryStore()
    log = CommitLog(store, RUN)
    gone = save(store, 10).step_key
    save(store, 20)
    sweep(store, log, log.commits()[:1])
    write_verified(store, record_of(gone))
    sweep_orphans(store, log, attempt(2), seen_at_s={}, grace_s=0.0, now_s=0.0)
    assert verified_keys(store) == frozenset()

"""Verifying committed Checkpoints one by one. Real: store in memory, records, digests; scripted: the load."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from orchestrator.verifier import Verifier
from storage.commit_log import CommitLog
from storage.errors import CorruptCheckpoint, ManifestMismatch, StoreUnavailable
from storage.keys import StepKey
from storage.memory_store import MemoryStore
from storage.sweeper import sweep
from storage.verified import read_verified, verified_keys
from tests.fakes.checkpoints import RUN, attempt, save
from tests.fakes.verifier_ports import ScriptedLoad
from workers.load_finding import LoadFinding, LoadPort

NOW = "2026-01-02T00:00:00Z"
GOOD = LoadFinding(loss=2.5, expected=2.5)


def make_verifier(store: MemoryStore, load: LoadPort | str = "no load here", *, free: int = 4 << 30) -> Verifier:
    open_load: Callable[[], LoadPort] | str = load if isinstance(load, str) else lambda: load
    return Verifier(store, RUN, open_load=open_load, now_utc=lambda: NOW, free_bytes=lambda: free)


def flip(store: MemoryStore, key: str) -> None:
    content = bytearray(store.get(key))
    content[len(content) // 3] ^= 1
    store.put(key, bytes(content))


def shard_of(store: MemoryStore, key: StepKey) -> str:
    log = CommitLog(store, RUN)
    commit = next(commit for commit in log.commits() if commit.step_key == key)
    return log.read_manifest(commit).shards[1].key


def test_the_unverified_are_the_usable_ones_without_a_record_newest_first() -> None:
    store = MemoryStore()
    keys = [save(store, step).step_key for step in (10, 20, 30, 40)]
    CommitLog(store, RUN).quarantine(keys[1], "-", "by hand", NOW)
    verifier = make_verifier(store)
    assert tuple(verifier.unverified()) == (keys[3], keys[2], keys[0])
    assert all(verifier.unverified().values()), "how long one may take depends on its bytes"
    assert verifier.verify(keys[2]) is not None
    assert tuple(verifier.unverified()) == (keys[3], keys[0])


def test_good_digests_are_recorded_with_the_reason_why_nothing_was_loaded() -> None:
    store = MemoryStore()
    key = save(store, 10).step_key
    verdict = make_verifier(store).verify(key)
    record = read_verified(store, key)
    assert verdict is not None
    assert record is not None
    assert (verdict.problem, verdict.by) == (None, "digests")
    assert verdict.bytes_read > 0
    assert (record.by, record.note, record.time_utc, record.loss) == ("digests", "no load here", NOW, None)


def test_a_load_with_its_probe_is_recorded() -> None:
    store = MemoryStore()
    key = save(store, 10).step_key
    load = ScriptedLoad(GOOD)
    make_verifier(store, load).verify(key)
    record = read_verified(store, key)
    assert record is not None
    assert (record.by, record.loss, record.expected, record.note) == ("load", 2.5, 2.5, None)
    assert load.steps == [10]


def test_damage_is_told_with_its_object_and_leaves_no_record_and_nothing_is_loaded() -> None:
    store = MemoryStore()
    key = save(store, 10).step_key
    shard = shard_of(store, key)
    flip(store, shard)
    load = ScriptedLoad(GOOD)
    verdict = make_verifier(store, load).verify(key)
    assert verdict is not None
    assert verdict.problem is not None
    assert verdict.problem[0] == shard
    assert verified_keys(store) == frozenset()
    assert load.steps == []
    assert CommitLog(store, RUN).quarantined_keys() == [], "that is the driver's to do"


@pytest.mark.parametrize(
    "error", [CorruptCheckpoint(10, "manifests/x", "its probe gives another loss"), ManifestMismatch(10, ("lr",))]
)
def test_what_the_load_finds_wrong_is_a_problem(error: Exception) -> None:
    store = MemoryStore()
    key = save(store, 10).step_key
    verdict = make_verifier(store, ScriptedLoad(error)).verify(key)
    assert verdict is not None
    assert verdict.problem is not None
    assert verdict.by == "load"
    assert any(word in verdict.problem[1] for word in ("another loss", "lr"))
    assert verified_keys(store) == frozenset()


def test_it_is_told_whether_there_is_another_one() -> None:
    store = MemoryStore()
    keys = [save(store, 10).step_key]
    verifier = make_verifier(store, ScriptedLoad(ManifestMismatch(10, ("lr",))))
    alone = verifier.verify(keys[0])
    keys.append(save(store, 20).step_key)
    one_of_two = verifier.verify(keys[1])
    assert alone is not None
    assert one_of_two is not None
    assert (alone.is_only, one_of_two.is_only) == (True, False)


def test_a_program_that_cannot_load_says_nothing_against_the_checkpoint() -> None:
    store = MemoryStore()
    keys = [save(store, step).step_key for step in (10, 20)]
    asked: list[int] = []

    def refuse() -> LoadPort:
        asked.append(1)
        raise ImportError("no transformers")

    verifier = Verifier(store, RUN, open_load=refuse, now_utc=lambda: NOW, free_bytes=lambda: 4 << 30)
    for key in keys:
        verdict = verifier.verify(key)
        assert verdict is not None
        assert (verdict.problem, verdict.by) == (None, "digests")
        assert "no transformers" in (verdict.note or "")
    assert asked == [1], "it is not tried again"
    third = save(store, 30).step_key
    broken = make_verifier(store, ScriptedLoad(RuntimeError("mat1 and mat2"))).verify(third)
    assert broken is not None
    assert (broken.problem, broken.by) == (None, "digests")
    assert "mat1 and mat2" in (broken.note or "")


def test_a_state_too_large_for_this_hosts_free_memory_is_not_loaded() -> None:
    store = MemoryStore()
    keys = [save(store, step).step_key for step in (10, 20)]
    load = ScriptedLoad(GOOD, state_bytes=(1 << 30) + 1)
    verdict = make_verifier(store, load).verify(keys[0])
    assert verdict is not None
    assert verdict.by == "digests"
    assert "1073741825 bytes is more than 25% of the 4294967296" in (verdict.note or "")
    assert load.steps == []
    load.state_bytes = 1 << 30
    make_verifier(store, load).verify(keys[1])
    assert load.steps == [20]


def test_a_host_that_is_short_of_memory_is_not_given_a_process_to_load_with() -> None:
    store = MemoryStore()
    key = save(store, 10).step_key
    asked: list[int] = []

    def load() -> LoadPort:
        asked.append(1)
        return ScriptedLoad(GOOD)

    short = Verifier(store, RUN, open_load=load, now_utc=lambda: NOW, free_bytes=lambda: 1 << 30)
    verdict = short.verify(key)
    assert verdict is not None
    assert (verdict.by, verdict.problem, asked) == ("digests", None, [])
    assert "1073741824 bytes of memory free" in (verdict.note or "")


def test_a_store_that_is_away_proves_nothing() -> None:
    store = MemoryStore()
    key = save(store, 10).step_key
    with pytest.raises(StoreUnavailable):
        make_verifier(store, ScriptedLoad(StoreUnavailable("get", "x", "away"))).verify(key)
    assert verified_keys(store) == frozenset()


def test_a_checkpoint_that_retention_deletes_meanwhile_is_no_failure() -> None:
    store = MemoryStore()
    keys = [save(store, step).step_key for step in (10, 20)]

    class Deleting(ScriptedLoad):
        def check(self, plan: object, store: object) -> LoadFinding:  # noqa: ARG002
            log = CommitLog(memory, RUN)
            sweep(memory, log, log.commits()[:1])
            raise CorruptCheckpoint(10, "shards/x", "missing file")

    memory = store
    assert make_verifier(store, Deleting(GOOD)).verify(keys[0]) is None
    assert verified_keys(store) == frozenset()
    assert make_verifier(store).verify(keys[0]) is None
    assert make_verifier(store).verify(StepKey(step=99, attempt=attempt(1))) is None

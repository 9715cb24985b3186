"""Verifying a committed Checkpoint: all that is wrong is listed with its key. On the in-memory store."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import storage.shard_writer
import storage.verify
from storage.codec import Encoding, encode
from storage.commit_log import CommitLog
from storage.config import StoreConfig
from storage.errors import StoreUnavailable
from storage.keys import shard_key
from storage.levels import LevelTable
from storage.manifest import Commit
from storage.memory_store import MemoryStore
from storage.verify import SHARDS_AT_ONCE, VerifyReport, verify_commit
from tests.fakes.checkpoints import RUN, SaveParts, commit_parts, prepare, save, write_shards

RECORD_HALF = (
    *("keys", "errors", "config", "manifest", "levels", "codec", "frames", "events", "lease"),
    *("object_store", "open_store", "commit_log", "merge", "restore", "retention", "sweeper", "verify"),
)


def verify(store: MemoryStore, commit: Commit, deep: bool = True) -> VerifyReport:
    return verify_commit(store, CommitLog(store, RUN), commit, deep=deep)


def flip(store: MemoryStore, key: str, position: int) -> None:
    content = bytearray(store.get(key))
    content[position % len(content)] ^= 1
    store.put(key, bytes(content))


@pytest.mark.parametrize("deep", [True, False])
def test_a_good_checkpoint_has_no_problems(deep: bool) -> None:
    store = MemoryStore()
    report = verify(store, save(store, 10, world_size=3), deep)
    assert report.is_good
    assert report.problems == ()
    assert report.num_shards == 3


def test_small_windows_see_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.verify, "_WINDOW_BYTES", 7)
    store = MemoryStore()
    commit = save(store, 10)
    assert verify(store, commit).is_good
    flip(store, shard_key(commit.step_key, 0), 20)
    assert not verify(store, commit).is_good


@settings(max_examples=50, deadline=None)
@given(position=st.integers(0, 10**9), rank=st.integers(0, 1))
def test_a_flipped_bit_anywhere_is_found_and_its_object_named(position: int, rank: int) -> None:
    store = MemoryStore()
    commit = save(store, 10)
    key = shard_key(commit.step_key, rank)
    flip(store, key, position)
    report = verify(store, commit)
    assert not report.is_good
    assert {(problem.key, problem.rank) for problem in report.problems} == {(key, rank)}


def test_every_problem_is_listed_not_only_the_first() -> None:
    store = MemoryStore()
    commit = save(store, 10, world_size=4)
    keys = [shard_key(commit.step_key, rank) for rank in range(4)]
    store.delete([keys[0]])
    store.put(keys[1], store.get(keys[1])[:-1])
    flip(store, keys[2], 5)
    report = verify(store, commit)
    reasons = {problem.key: problem.reason for problem in report.problems if "whole object" not in problem.reason}
    assert set(reasons) == set(keys[:3])
    assert reasons[keys[0]] == "missing file"
    assert "committed" in reasons[keys[1]]
    assert "frame 0 (rows 0 to 8) of w: hash mismatch" in reasons[keys[2]]


def test_a_bad_manifest_is_the_one_problem() -> None:
    store = MemoryStore()
    commit = save(store, 10)
    flip(store, commit.manifest_key, 30)
    (problem,) = verify(store, commit).problems
    assert problem.key == commit.manifest_key
    assert "hash mismatch" in str(problem)


def test_an_exchanged_shard_is_found_without_reading_it_all() -> None:
    store = MemoryStore()
    commit = save(store, 10)
    store.put(shard_key(commit.step_key, 0), store.get(shard_key(commit.step_key, 1)))
    assert not verify(store, commit, deep=False).is_good


def save_parts(store: MemoryStore, parts: SaveParts) -> Commit:
    write_shards(store, parts)
    return commit_parts(CommitLog(store, RUN), parts)


def test_an_object_that_is_not_the_one_committed_is_found_though_all_frames_agree() -> None:
    store, parts = MemoryStore(), prepare(10, world_size=1)
    (receipt,) = parts.receipts
    other = receipt.model_copy(update={"shard": receipt.shard.model_copy(update={"digest": "0" * 32})})
    (problem,) = verify(store, save_parts(store, replace(parts, receipts=(other,)))).problems
    assert "hash mismatch of the whole object" in problem.reason
    assert "every frame agrees with the Shard's own index: the record is wrong" in problem.reason


def test_where_record_and_footer_disagree_it_is_said_which_one_the_bytes_agree_with() -> None:
    store, parts = MemoryStore(), prepare(10, world_size=1)
    (receipt,) = parts.receipts
    shard = receipt.shard.model_copy(update={"index_digest": "0" * 32})
    commit = save_parts(store, replace(parts, receipts=(receipt.model_copy(update={"shard": shard}),)))
    (problem,) = verify(store, commit, deep=False).problems
    assert "holds together: the record is of other bytes" in problem.reason


@pytest.mark.parametrize("distance", [5, 24, 60])
def test_a_damaged_footer_is_told_from_a_wrong_record(distance: int) -> None:
    store = MemoryStore()
    commit = save(store, 10, world_size=1)
    key = shard_key(commit.step_key, 0)
    flip(store, key, len(store.get(key)) - distance)
    (problem,) = verify(store, commit, deep=False).problems
    assert "the Shard is wrong, not the record" in problem.reason


def test_a_damaged_frame_blames_the_shard() -> None:
    store = MemoryStore()
    commit = save(store, 10, world_size=1)
    flip(store, shard_key(commit.step_key, 0), 5)
    assert "the Shard's own index disagrees too: the Shard is wrong" in verify(store, commit).problems[-1].reason


def test_a_layout_stored_as_a_rule_is_checked_rank_by_rank() -> None:
    store = MemoryStore()
    commit = save(store, 10, world_size=70)
    assert b'"first_rank"' in store.get(commit.manifest_key)
    assert verify(store, commit).is_good
    keys = [shard_key(commit.step_key, rank) for rank in (68, 69)]
    parts = [store.get(key) for key in keys]
    if len(parts[0]) == len(parts[1]):
        store.put(keys[0], parts[1])
    else:
        store.delete([keys[0]])
    assert {problem.rank for problem in verify(store, commit, deep=False).problems} == {68}


def test_a_chunk_that_the_manifest_names_but_the_shard_lacks_is_found() -> None:
    store, parts = MemoryStore(), prepare(10, world_size=1)
    (receipt,) = parts.receipts
    other = receipt.model_copy(update={"tensors": receipt.tensors | {"v": receipt.tensors["w"]}})
    (problem,) = verify(store, save_parts(store, replace(parts, receipts=(other,))), deep=False).problems
    assert "the chunk of v at (0, 0) of (8, 16) (float32) is not in it" in problem.reason


def test_a_chunk_that_decodes_to_other_bytes_than_were_captured_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def lying(raw: bytes, itemsize: int, encoding: Encoding, level: int) -> bytes:
        return encode(bytes(len(raw)), itemsize, encoding, level)

    monkeypatch.setattr(storage.shard_writer, "encode", lying)
    store = MemoryStore()
    commit = save(store, 10, world_size=1)
    (problem,) = verify(store, commit).problems
    assert "w decodes to" in problem.reason


def test_an_unreachable_store_is_no_verdict() -> None:
    class Failing(MemoryStore):
        def get_range(self, key: str, offset: int, length: int, *, deadline_s: float = 60.0) -> bytes:
            raise StoreUnavailable("get_range", key, f"{offset} {length} {deadline_s}")

    store = Failing()
    commit = save(store, 10)
    with pytest.raises(StoreUnavailable):
        verify(store, commit)


class WatchedStore(MemoryStore):
    """Counts reads that are under way at once, and their bytes. ``at_first``: so many wait for each other."""

    def __init__(self, at_first: int = 1) -> None:
        super().__init__()
        self._together = threading.Barrier(at_first)
        self._lock = threading.Lock()
        self._lengths: list[int] = []
        self.most_reads = self.most_bytes = self.num_reads = 0

    def get_range(self, key: str, offset: int, length: int, *, deadline_s: float = 60.0) -> bytes:
        with self._lock:
            self.num_reads += 1
            is_first = self.num_reads <= self._together.parties
            self._lengths.append(length)
            self.most_reads = max(self.most_reads, len(self._lengths))
            self.most_bytes = max(self.most_bytes, sum(self._lengths))
        try:
            if is_first:
                self._together.wait(30.0)
            return super().get_range(key, offset, length, deadline_s=deadline_s)
        finally:
            with self._lock:
                self._lengths.remove(length)


def test_shards_are_read_side_by_side_but_never_more_than_allowed() -> None:
    store = WatchedStore(at_first=SHARDS_AT_ONCE)
    commit = save(store, 10, world_size=3 * SHARDS_AT_ONCE)
    assert verify(store, commit).num_shards == 3 * SHARDS_AT_ONCE
    assert store.most_reads == SHARDS_AT_ONCE

    alone = WatchedStore()
    commit = save(alone, 10, world_size=6)
    report = verify_commit(alone, CommitLog(alone, RUN), commit, at_once=lambda: 1)
    assert report.is_good
    assert alone.most_reads == 1


def test_how_many_at_once_is_asked_again_as_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.verify, "_LOOK_S", 0.01)
    store = WatchedStore(at_first=2)
    commit = save(store, 10, world_size=12)
    answers = iter([1, 1, 2])
    report = verify_commit(store, CommitLog(store, RUN), commit, at_once=lambda: next(answers, 2))
    assert report.is_good
    assert store.most_reads == 2


def test_the_bytes_of_all_reads_under_way_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    store = WatchedStore(at_first=2)
    commit = save(store, 10, world_size=12)
    largest = max(shard.size for shard in CommitLog(store, RUN).read_manifest(commit).shards)
    monkeypatch.setattr(storage.verify, "_MOST_BYTES", 2 * largest)
    assert verify(store, commit).is_good
    assert 1 < store.most_reads <= 3, "small ones may be three"
    assert store.most_bytes <= 2 * largest


def test_reads_side_by_side_come_in_time_by_the_slowest_link_that_one_alone_is_waited_for() -> None:
    window, store = storage.verify._WINDOW_BYTES, StoreConfig()
    limit_s = store.deadline_s + window / store.min_bytes_per_s
    assert SHARDS_AT_ONCE * window / store.min_bytes_per_s < limit_s


def test_an_error_of_the_store_ends_the_other_reads_and_is_the_one_that_is_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Breaking(WatchedStore):
        def get_range(self, key: str, offset: int, length: int, *, deadline_s: float = 60.0) -> bytes:
            content = super().get_range(key, offset, length, deadline_s=deadline_s)
            if key == self.bad:
                raise StoreUnavailable("get_range", key, "away")
            assert ended.wait(30.0), "nobody said that it is over"
            return content

        bad = ""

    class Ended(threading.Event):
        def set(self) -> None:
            super().set()
            ended.set()

    ended = threading.Event()
    store = Breaking(at_first=SHARDS_AT_ONCE)
    commit = save(store, 10, world_size=3 * SHARDS_AT_ONCE)
    store.bad = shard_key(commit.step_key, 2)
    monkeypatch.setattr(storage.verify, "threading", SimpleNamespace(Event=Ended))
    with pytest.raises(StoreUnavailable, match="away"):
        verify(store, commit)
    assert store.num_reads == SHARDS_AT_ONCE, "no read began after it"


def test_the_record_half_loads_neither_torch_nor_ray() -> None:
    imports = ", ".join(f"storage.{name}" for name in RECORD_HALF)
    code = f"import sys, {imports}; print('torch' in sys.modules, 'ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize(
    ("name", "dtype", "level"),
    [
        ("model.layers.0.weight", "float32", "L1"),
        ("optim.layers.0.weight.exp_avg", "float32", "L2"),
        ("optim.layers.0.weight.exp_avg_sq", "bfloat16", "L2"),
        ("optim.layers.0.weight.step", "float32", "L1"),
        ("optim.layers.0.weight.exp_avg", "int8", "L1"),
        ("model.optim.exp_avg", "float32", "L1"),
        ("rng.cpu", "uint8", "L1"),
        ("tracker.ema.weight", "float32", "L1"),
        ("something nobody thought of", "float32", "L1"),
    ],
)
def test_only_optimizer_moments_are_anything_but_lossless(name: str, dtype: str, level: str) -> None:
    assert LevelTable().treatment(name, dtype).level == level

"""Commits, retention and sweeping as one sequence of writes, watched at every single one. On stores without Ray.

Cases: B07 (the cleaner never races a save), B08 (the first save with retention in a place that does not exist yet).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

from orchestrator.committer import Committer
from storage.commit_log import CommitLog
from storage.config import CheckpointConfig
from storage.errors import CommitRefused
from storage.keys import Attempt, StepKey, shard_key
from storage.local_store import LocalStore
from storage.memory_store import MemoryStore
from storage.merge import StepMerge
from storage.object_store import ObjectEntry, ObjectStore
from storage.verify import verify_commit
from tests.fakes.checkpoints import RUN, attempt, prepare, write_shards

SAME_DRIVER = Attempt(number=2, nonce=attempt(1).nonce)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def make(store: ObjectStore, clock: Clock | None = None, **config: object) -> Committer:
    return Committer(
        run_id=RUN,
        store=store,
        config=CheckpointConfig.model_validate({"every_steps": 10, **config}),
        metadata={},
        now_utc=lambda: "2026-01-01T00:00:00Z",
        monotonic=clock or Clock(),
    )


def save(
    committer: Committer,
    store: ObjectStore,
    step: int,
    *,
    by: Attempt | None = None,
    base_step: int = 0,
    metric: float | None = None,
) -> None:
    parts = prepare(step, by=by)
    write_shards(store, parts)
    committer.commit(parts.receipts, base_step=base_step, loss=None, metric=metric, ledger=None)
    committer.retain()


def steps(store: ObjectStore) -> list[int]:
    return [commit.step for commit in CommitLog(store, RUN).commits()]


def step_folders(store: ObjectStore) -> set[str]:
    return {entry.key.split("/")[1] for entry in store.list("shards/")}


class Watched(MemoryStore):
    """After every write and every single deletion: is there a committed Checkpoint, and is each of them whole?"""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[int]] = []

    def _look(self) -> None:
        log = CommitLog(self, RUN)
        commits = log.commits()
        for commit in commits:
            assert verify_commit(self, log, commit).problems == ()
        if commits or self.seen:
            self.seen.append([commit.step for commit in commits])

    def put(self, key: str, data: bytes | memoryview, *, deadline_s: float = 60.0) -> None:
        super().put(key, data, deadline_s=deadline_s)
        self._look()

    def create(self, key: str, data: bytes, *, deadline_s: float = 60.0) -> None:
        super().create(key, data, deadline_s=deadline_s)
        self._look()

    def delete(self, keys: Sequence[str], *, deadline_s: float = 60.0) -> None:
        for key in keys:
            super().delete([key], deadline_s=deadline_s)
            self._look()


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_at_every_instant_a_committed_checkpoint_exists_and_all_of_them_are_whole(keep: int) -> None:
    store = Watched()
    committer = make(store, keep=keep, orphan_grace_s=0)
    for step, metric in ((10, 3.0), (20, 1.0), (30, 2.0), (40, None)):
        save(committer, store, step, metric=metric)
    write_shards(store, prepare(50))  # cut off
    again = make(store, keep=keep, orphan_grace_s=0)
    again.sweep_dead(attempt(2))
    for step in (35, 45, 55):
        save(again, store, step, by=attempt(2), base_step=30)
    assert all(store.seen)
    assert store.seen[-1][-1] == 55
    assert len(store.seen[-1]) <= keep + 1


def test_a_save_that_was_cut_off_leaves_the_one_before_it_and_goes_at_the_next_start() -> None:
    store = Watched()
    first = make(store, keep=1)
    save(first, store, 10)
    half = prepare(20)
    store.put(shard_key(half.key, 0), half.shards[shard_key(half.key, 0)])
    second = make(store, keep=1, orphan_grace_s=0)
    plan, _ = second.choose_plan(attempt(2), None, False, None)
    assert plan is not None
    assert plan.step == 10  # training goes on with step 11
    second.sweep_dead(attempt(2))
    assert step_folders(store) == {"step-0000000010"}
    assert all(store.seen)


def test_the_first_save_with_retention_in_a_directory_that_does_not_exist(tmp_path: Path) -> None:
    root = tmp_path / "not" / "there" / "yet"
    store = LocalStore(str(root))
    committer = make(store, keep=2)
    for step in (10, 20, 30):
        save(committer, LocalStore(str(root)), step)
    assert steps(store) == [20, 30]
    assert step_folders(store) == {"step-0000000020", "step-0000000030"}


def test_the_best_and_one_of_each_window_outlive_the_newest() -> None:
    store = MemoryStore()
    times = iter(f"2026-01-01T{hour:02d}:{minute:02d}:00Z" for hour in range(6) for minute in (0, 0, 30, 30))
    committer = Committer(
        run_id=RUN,
        store=store,
        config=CheckpointConfig(every_steps=10, keep=1, archive_every_h=2),
        metadata={},
        now_utc=lambda: next(times),
        monotonic=Clock(),
    )
    for number in range(1, 13):
        save(committer, store, number * 10, metric=0.1 if number == 3 else 1.0)
    assert steps(store) == [10, 30, 50, 90, 120]


def test_a_missing_shard_is_named_and_nothing_is_committed() -> None:
    store = MemoryStore()
    parts = prepare(10)
    write_shards(store, parts)
    store.delete([shard_key(parts.key, 1)])
    with pytest.raises(
        CommitRefused, match=r"step 10 .* is not committed: rank 1: shards/.*/rank-00001\.shard is missing"
    ):
        make(store).commit(parts.receipts, base_step=0, loss=None, metric=None, ledger=None)
    assert steps(store) == []


def test_a_short_shard_is_named_with_both_sizes() -> None:
    store = MemoryStore()
    parts = prepare(10)
    write_shards(store, parts)
    key = shard_key(parts.key, 0)
    store.put(key, parts.shards[key][:-1])
    with pytest.raises(CommitRefused, match=rf"rank 0: .* has {len(parts.shards[key]) - 1} bytes, its Receipt says"):
        make(store).commit(parts.receipts, base_step=0, loss=None, metric=None, ledger=None)


class Lagging(MemoryStore):
    """Shards are listed only after ``is_caught_up``."""

    is_caught_up = False

    def list(self, prefix: str, *, deadline_s: float = 60.0) -> list[ObjectEntry]:
        entries = super().list(prefix, deadline_s=deadline_s)
        return entries if self.is_caught_up or not prefix.startswith("shards/") else []


def test_a_listing_that_lags_blocks_no_commit_but_a_missing_shard_still_does(caplog: pytest.LogCaptureFixture) -> None:
    store = Lagging()
    parts = prepare(10)
    write_shards(store, parts)
    with caplog.at_level(logging.WARNING):
        make(store).commit(parts.receipts, base_step=0, loss=None, metric=None, ledger=None)
    assert "its listing lags: 2 of 2 shards" in caplog.text
    assert steps(store) == [10]
    later = prepare(20)
    write_shards(store, later)
    store.delete([shard_key(later.key, 0)])
    with pytest.raises(CommitRefused, match=r"rank 0: .* is missing"):
        make(store).commit(later.receipts, base_step=0, loss=None, metric=None, ledger=None)


def test_what_ranks_are_reading_is_not_swept_until_their_attempt_commits() -> None:
    """A Commit of the Attempt before may still arrive after the plan was chosen, and retention follows every Commit."""
    store = MemoryStore()
    committer = make(store, keep=1)
    save(committer, store, 10)
    plan, _ = committer.choose_plan(SAME_DRIVER, None, False, None)
    assert plan is not None
    save(committer, store, 20)
    assert steps(store) == [10, 20]
    assert step_folders(store) == {"step-0000000010", "step-0000000020"}
    save(committer, store, 15, by=SAME_DRIVER, base_step=10)
    assert steps(store) == [15]
    assert step_folders(store) == {"step-0000000015"}


def test_what_earlier_attempts_of_this_driver_left_goes_at_once_and_of_others_after_the_grace() -> None:
    store, clock = MemoryStore(), Clock()
    committer = make(store, clock, orphan_grace_s=100)
    for cut_off in (prepare(10, by=attempt(1)), prepare(20, by=Attempt(number=1, nonce="feedbeef"))):
        write_shards(store, cut_off)
    committer.sweep_dead(SAME_DRIVER)  # nobody has ever committed
    assert step_folders(store) == {"step-0000000020"}
    clock.now_s = 100.0
    committer.sweep_dead(SAME_DRIVER)
    assert step_folders(store) == set()


def test_a_step_that_a_commit_of_the_same_attempt_overtook_is_swept_and_a_later_one_is_not() -> None:
    store, clock = MemoryStore(), Clock()
    committer = make(store, clock, orphan_grace_s=100)
    for cut_off in (prepare(10), prepare(30)):
        write_shards(store, cut_off)
    save(committer, store, 20)
    clock.now_s = 100.0
    committer.retain()
    assert step_folders(store) == {"step-0000000020", "step-0000000030"}


def test_unfinished_uploads_of_the_dead_are_removed_once_no_keeper_can_be_at_them() -> None:
    class Uploads(MemoryStore):
        asked: tuple[str, float] | None = None

        def abort_uploads(self, prefix: str, *, older_than_s: float, deadline_s: float = 60.0) -> int:  # noqa: ARG002
            self.asked = (prefix, older_than_s)
            return 1

    store = Uploads()
    make(store, orphan_grace_s=0, max_outage_s=1800).sweep_dead(attempt(2))
    assert store.asked == ("", 1800.0)


def test_few_kept_checkpoints_are_accepted_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        make(MemoryStore(), keep=3)
        assert caplog.text == ""
        make(MemoryStore(), keep=2)
    assert "checkpoint.keep is 2" in caplog.text


def test_a_folded_step_commits_as_its_receipts_do() -> None:
    parts = prepare(10)
    merge = StepMerge()
    for receipt in parts.receipts[::-1]:
        merge.add(receipt)
    store = MemoryStore()
    write_shards(store, parts)
    make(store).commit(merge, base_step=0, loss=None, metric=None, ledger=None)
    log = CommitLog(store, RUN)
    (commit,) = log.commits()
    assert commit.step_key == StepKey(step=10, attempt=attempt())
    assert log.read_manifest(commit).tensors == parts.manifest().tensors
    assert all(not receipt.tensors for receipt in merge.receipts)

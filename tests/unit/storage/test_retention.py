"""Which Checkpoints go, and in which order their objects go. On the in-memory store."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.commit_log import CommitLog
from storage.keys import StepKey, manifest_key, shard_key
from storage.manifest import Commit
from storage.memory_store import MemoryStore
from storage.retention import choose_deletions
from storage.sweeper import sweep, sweep_orphans, sweep_void
from tests.fakes.checkpoints import RUN, TIME, attempt, prepare, save, write_shards

TEMPLATE = save(MemoryStore(), 1)


def commits_with(metrics: Sequence[float | None]) -> list[Commit]:
    return [
        TEMPLATE.model_copy(update={"step": step, "metric": metric}) for step, metric in enumerate(metrics, start=1)
    ]


@settings(deadline=None)
@given(
    metrics=st.lists(st.none() | st.floats(allow_nan=True, allow_infinity=True), max_size=12), keep=st.integers(1, 5)
)
def test_the_newest_and_the_best_are_kept_and_never_all_go(metrics: list[float | None], keep: int) -> None:
    commits = commits_with(metrics)
    gone = choose_deletions(commits[::-1], keep, None)
    kept = [commit for commit in commits if commit not in gone]
    assert kept[-keep:] == commits[-keep:]
    scored = [metric for metric in metrics if metric is not None and metric == metric]
    if scored:
        assert min(scored) in [commit.metric for commit in kept]
    assert len(kept) <= keep + 1
    assert bool(kept) == bool(commits)
    assert [commit.step for commit in gone] == sorted(commit.step for commit in gone)


TIMES = st.datetimes(datetime(2026, 1, 1), datetime(2026, 1, 20)).map(lambda time: time.isoformat() + "Z")


@settings(deadline=None)
@given(
    saves=st.lists(st.tuples(TIMES | st.just("never"), st.none() | st.floats(0, 1)), min_size=1, max_size=25),
    keep=st.integers(1, 4),
    archive_every_h=st.floats(0.5, 200),
)
def test_what_is_archived_once_stays_whatever_the_clock_does_and_the_newest_and_best_stay_too(
    saves: list[tuple[str, float | None]], keep: int, archive_every_h: float
) -> None:
    """Saves one by one, each followed by retention, as in a run; the times jump as they like."""
    present: list[Commit] = []
    archived: set[int] = set()
    for step, (time_utc, metric) in enumerate(saves, start=1):
        present.append(TEMPLATE.model_copy(update={"step": step, "metric": metric, "time_utc": time_utc}))
        gone = choose_deletions(present, keep, archive_every_h=archive_every_h)
        newest = present[-keep:]
        present = [commit for commit in present if commit not in gone]
        assert present[-len(newest) :] == newest
        alone = {commit.step for commit in present} - {commit.step for commit in newest}
        assert archived <= {commit.step for commit in present}
        scored = [commit for commit in present if commit.metric is not None]
        best = min((m for _, m in saves[:step] if m is not None), default=None)
        assert best is None or best in [commit.metric for commit in scored]
        archived |= {step for step in alone if saves[step - 1][1] is None}


def test_one_checkpoint_of_each_window_is_kept_for_good_in_utc() -> None:
    times = ["23:59:00+00:00", "20:30:00-05:00", "02:00:00+00:00", "12:00:00+00:00", "13:00:00+00:00"]
    commits = [
        TEMPLATE.model_copy(update={"step": step, "time_utc": f"2026-01-{2 if step in (3, 4, 5) else 1:02d}T{time}"})
        for step, time in enumerate(times, start=1)
    ]  # the second is 01:30 of the second day in UTC
    assert [commit.step for commit in choose_deletions(commits, 1, archive_every_h=24)] == [3, 4]


def test_a_given_best_is_kept() -> None:
    commits = commits_with([None] * 5)
    assert [commit.step for commit in choose_deletions(commits, 2, commits[1])] == [1, 3]


def test_keeping_none_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        choose_deletions(commits_with([1.0]), 0, None)


class Recorded(MemoryStore):
    """Remembers the order of deletions and may die at the ``dies_at``-th."""

    def __init__(self, dies_at: int = 0) -> None:
        super().__init__()
        self.deleted: list[str] = []
        self.dies_at = dies_at

    def delete(self, keys: Sequence[str], *, deadline_s: float = 60.0) -> None:
        for key in keys:
            if len(self.deleted) + 1 == self.dies_at:
                raise KeyboardInterrupt
            self.deleted.append(key)
            super().delete([key], deadline_s=deadline_s)


def test_a_checkpoint_is_uncommitted_before_its_bytes_go() -> None:
    store = Recorded()
    log = CommitLog(store, RUN)
    doomed, kept = save(store, 10), save(store, 20)
    left = {entry.key for entry in store.list("") if "0000000020" in entry.key}
    sweep(store, log, [doomed])
    assert store.deleted[0].startswith("commits/")
    assert {entry.key for entry in store.list("")} == left
    assert log.commits() == [kept]


@pytest.mark.parametrize("dies_at", range(1, 5))
def test_dying_while_sweeping_leaves_no_checkpoint_without_its_bytes(dies_at: int) -> None:
    store = Recorded(dies_at)
    log = CommitLog(store, RUN)
    doomed = save(store, 10)
    save(store, 20)
    with pytest.raises(KeyboardInterrupt):
        sweep(store, log, [doomed])
    names = {entry.key for entry in store.list("")}
    for commit in log.commits():
        assert {shard.key for shard in log.read_manifest(commit).shards} <= names
    assert log.commits()[-1].step == 20


def sweep_at(store: MemoryStore, seen: dict[StepKey, float], now_s: float, live: int = 2) -> list[str]:
    log = CommitLog(store, RUN)
    return sweep_orphans(store, log, attempt(live), seen_at_s=seen, grace_s=100.0, now_s=now_s)


def test_orphans_of_older_attempts_go_after_the_grace_and_nothing_else_does() -> None:
    store = MemoryStore()
    save(store, 10)
    orphan = prepare(20)
    write_shards(store, orphan)
    store.put(manifest_key(orphan.key), b"{}")
    write_shards(store, prepare(30, by=attempt(2)))
    foreign = ["shards/notes.txt", "shards/step-0000000020/README", "manifests/old.json", "data/x"]
    foreign.append(f"shards/step-0000000020/{orphan.key.attempt.label}/mine.txt")
    for name in foreign:
        store.put(name, b"precious")
    before = {entry.key for entry in store.list("")}
    seen: dict[StepKey, float] = {}
    assert sweep_at(store, seen, 0.0) == []
    assert sweep_at(store, seen, 99.0) == []
    assert {entry.key for entry in store.list("")} == before
    gone = {*orphan.shards, manifest_key(orphan.key)}
    assert set(sweep_at(store, seen, 100.0)) == gone
    assert {entry.key for entry in store.list("")} == before - gone
    assert seen == {}


def test_an_orphan_that_is_committed_in_time_stays() -> None:
    store = MemoryStore()
    write_shards(store, prepare(20))
    seen: dict[StepKey, float] = {}
    sweep_at(store, seen, 0.0)
    save(store, 20)
    assert sweep_at(store, seen, 1000.0) == []
    assert seen == {}


def test_shards_of_quarantined_and_unreadable_commits_stay() -> None:
    store = MemoryStore()
    bad, torn = save(store, 10), save(store, 20)
    CommitLog(store, RUN).quarantine(bad.step_key, "x", "y", TIME)
    store.put(f"commits/{torn.step_key.stem}.json", b"{")
    seen: dict[StepKey, float] = {}
    sweep_at(store, seen, 0.0)
    assert sweep_at(store, seen, 1000.0) == []
    assert store.get(shard_key(torn.step_key, 0))


def test_void_commits_go_once_the_live_attempt_has_committed() -> None:
    store = Recorded()
    log = CommitLog(store, RUN)
    for step in (10, 20, 30):
        save(store, step)
    bad = save(store, 25, by=attempt(2), base_step=10)
    log.quarantine(bad.step_key, "x", "y", TIME)
    assert sweep_void(store, log, attempt(3)) == []
    save(store, 15, by=attempt(3), base_step=10)
    assert [commit.step for commit in log.commits()] == [10, 15]
    assert [commit.step for commit in sweep_void(store, log, attempt(3))] == [30, 20, 25]
    assert [commit.step for commit in log.all_commits()] == [10, 15]
    assert [commit.step for commit in log.commits()] == [10, 15]


LOOKALIKES = st.sampled_from(
    [
        "shards/step-0000000010/a000001-00000001/rank-000000.shard",
        "shards/step-0000000010/a000001-00000001/rank-00000.shard.tmp",
        "shards/step-0000000010/a000001-00000001/old/rank-00000.shard",
        "shards/step-0000000010/a000001-0000000g/rank-00000.shard",
        "shards/step-10/a000001-00000001/rank-00000.shard",
        "manifests/step-0000000010.a000001-00000001.json.bak",
        "manifests/step-0000000010.a000001-00000001.w123.json",
        "manifests/copy of step-0000000010.a000001-00000001.json",
        "manifests/old/step-0000000010.a000001-00000001.json",
        "commits/step-0000000010.a000001-00000001.json~",
        "step-0000000010.a000001-00000001.json",
    ]
)
PART = st.text("abcdefghijklmnopqrstuvwxyz0123456789-._", min_size=1, max_size=12).filter(lambda part: part.strip("."))
FOREIGN = LOOKALIKES | st.builds(
    "/".join, st.tuples(st.sampled_from(["shards", "manifests", "commits", "quarantine", "data"]), PART, PART)
)


@settings(deadline=None)
@given(names=st.sets(FOREIGN, min_size=1, max_size=6))
def test_files_that_are_not_ours_are_never_touched(names: set[str]) -> None:
    store = MemoryStore()
    log = CommitLog(store, RUN)
    doomed = save(store, 10)
    write_shards(store, prepare(20))
    store.put(manifest_key(prepare(20).key, "abcdef01"), b"{}")
    for name in names:
        store.put(name, name.encode())
    sweep(store, log, [doomed])
    sweep_at(store, {}, 0.0)
    sweep_orphans(store, log, attempt(2), seen_at_s={}, grace_s=0.0, now_s=0.0)
    sweep_void(store, log, attempt(2))
    assert {entry.key: store.get(entry.key) for entry in store.list("")} == {name: name.encode() for name in names}


@settings(deadline=None)
@given(dies_at=st.integers(1, 12))
def test_dying_at_any_deletion_of_void_and_old_checkpoints_leaves_history_whole(dies_at: int) -> None:
    store = Recorded(dies_at)
    log = CommitLog(store, RUN)
    for step in (10, 20, 30):
        save(store, step)
    save(store, 15, by=attempt(2), base_step=10)
    with contextlib.suppress(KeyboardInterrupt):
        sweep_void(store, log, attempt(2))
    store.dies_at = 0
    again = CommitLog(store, RUN)
    assert [commit.step for commit in again.commits()] == [10, 15]
    names = {entry.key for entry in store.list("")}
    for commit in again.all_commits():
        assert {commit.manifest_key, *(shard.key for shard in again.read_manifest(commit).shards)} <= names
    sweep_orphans(store, again, attempt(2), seen_at_s={}, grace_s=0.0, now_s=0.0)
    sweep_void(store, again, attempt(2))
    left = {entry.key.split("/")[1] for entry in store.list("shards/")}
    assert left == {"step-0000000010", "step-0000000015"}

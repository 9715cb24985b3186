"""Pruning by hand: the preview and the deed are the same, and a usable Checkpoint always stays."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from storage.commit_log import CommitLog
from storage.manifest import Commit
from storage.memory_store import MemoryStore
from storage.overlay_store import OverlayStore
from storage.pruning import PruneResult, PruneWish, prune
from storage.verify import verify_commit
from tests.fakes.checkpoints import TIME, attempt, prepare, save, write_shards

HOUR = 3600.0
SAVED_S = datetime.fromisoformat(TIME).timestamp()
NOW_S = SAVED_S + 2 * HOUR


def keys(store: MemoryStore) -> list[str]:
    return [entry.key for entry in store.list("")]


def steps(commits: tuple[Commit, ...]) -> list[int]:
    return [commit.step for commit in commits]


def tree() -> MemoryStore:
    """Attempt 1 committed 10, 20 (best) and 30, which is void; attempt 2 went on from 20 and committed 40 and 50."""
    store = MemoryStore()
    for step, metric in ((10, 3.0), (20, 1.0), (30, 2.0)):
        save(store, step, metric=metric)
    write_shards(store, prepare(35))
    for step in (40, 50):
        save(store, step, by=attempt(2), base_step=20)
    write_shards(store, prepare(60, by=attempt(2)))
    return store


@pytest.mark.parametrize(
    "wish",
    [
        PruneWish(keep=1),
        PruneWish(keep=2, orphans=True),
        PruneWish(void=True),
        PruneWish(orphans=True),
        PruneWish(keep=1, older_than_s=HOUR),
        PruneWish(archive_every_h=1.0, void=True, orphans=True),
    ],
)
def test_the_preview_changes_nothing_and_says_what_the_deed_does(wish: PruneWish) -> None:
    store = tree()
    before = keys(store)
    preview = prune(OverlayStore(store), wish, now_s=NOW_S)
    assert keys(store) == before
    assert prune(store, wish, now_s=NOW_S) == preview
    assert not preview.is_empty
    for commit in preview.kept:
        assert verify_commit(store, CommitLog(store, None), commit).is_good
    assert CommitLog(store, None).commits() == list(preview.kept)


def test_keep_spares_the_newest_and_the_best() -> None:
    result = prune(tree(), PruneWish(keep=1), now_s=NOW_S)
    assert (steps(result.doomed), steps(result.kept)) == ([10, 40], [20, 50])


def test_the_last_checkpoint_is_never_deleted() -> None:
    store = MemoryStore()
    save(store, 10)
    result = prune(store, PruneWish(keep=1, older_than_s=0.0, void=True, orphans=True), now_s=NOW_S)
    assert (result.is_empty, steps(result.kept)) == (True, [10])


def test_nothing_younger_than_asked_goes() -> None:
    assert prune(tree(), PruneWish(older_than_s=3 * HOUR), now_s=NOW_S).is_empty
    assert steps(prune(tree(), PruneWish(older_than_s=HOUR), now_s=NOW_S).doomed) == [10, 40]


def test_void_ones_never_come_back_to_life_by_pruning_what_made_them_void() -> None:
    store = tree()
    save(store, 60, by=attempt(3), base_step=50)
    result = prune(store, PruneWish(keep=1), now_s=NOW_S)
    assert steps(result.void) == [30]
    assert steps(tuple(CommitLog(store, None).all_commits())) == [20, 60]


def test_an_archive_keeps_the_first_of_each_window() -> None:
    store = MemoryStore()
    for step in (10, 20, 30):
        save(store, step)
    assert steps(prune(store, PruneWish(keep=1, archive_every_h=1.0), now_s=NOW_S).doomed) == [20]


def orphans(result: PruneResult) -> list[int]:
    return [piece.key.step for piece in result.orphans]


def test_only_saves_that_can_no_longer_be_committed_are_orphans_and_only_after_the_grace() -> None:
    assert orphans(prune(tree(), PruneWish(orphans=True), now_s=NOW_S)) == [35]
    assert orphans(prune(tree(), PruneWish(orphans=True, grace_s=3 * HOUR), now_s=NOW_S)) == []
    store = tree()
    prune(store, PruneWish(orphans=True), now_s=NOW_S)
    left = {entry.key.split("/")[1] for entry in store.list("shards/")}
    assert "step-0000000060" in left
    assert "step-0000000035" not in left


def test_a_place_without_checkpoints_is_left_alone() -> None:
    store = MemoryStore()
    write_shards(store, prepare(10))
    before = keys(store)
    assert prune(store, PruneWish(keep=1, void=True, orphans=True), now_s=NOW_S) == PruneResult()
    assert keys(store) == before


def test_the_clock_of_the_tests_is_that_of_the_fakes() -> None:
    assert datetime.fromtimestamp(SAVED_S, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z") == TIME

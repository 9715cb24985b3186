"""What a place holds, on the in-memory store: standing, marks, saves that were cut off."""

from __future__ import annotations

from storage.commit_log import CommitLog
from storage.inventory import Inventory, best_of, fidelity_of, take_inventory
from storage.memory_store import MemoryStore
from tests.fakes.checkpoints import RUN, TIME, attempt, commit_parts, prepare, save, write_shards


def inventory_of(store: MemoryStore) -> Inventory:
    return take_inventory(CommitLog(store, None))


def standings(store: MemoryStore) -> dict[int, str]:
    return {step.key.step: step.standing for step in inventory_of(store).steps}


def test_each_commit_has_its_standing() -> None:
    store = MemoryStore()
    ten, *_ = [save(store, step) for step in (10, 20, 30)]
    save(store, 40, by=attempt(2), base_step=20)
    broken = save(store, 50, by=attempt(2), base_step=20)
    store.put(broken.object_key, b"{")
    CommitLog(store, RUN).quarantine(ten.step_key, "some/object", "flipped", TIME)
    assert standings(store) == {10: "quarantined", 20: "usable", 30: "void", 40: "usable", 50: "unreadable"}
    (quarantined,) = inventory_of(store).of("quarantined")
    assert quarantined.quarantine is not None
    assert quarantined.quarantine.reason == "flipped"


def test_newest_and_best_are_marked_and_differ() -> None:
    store = MemoryStore()
    for step, metric in ((10, 3.0), (20, 1.0), (30, 2.0)):
        save(store, step, metric=metric)
    steps = inventory_of(store).steps
    assert [step.key.step for step in steps if step.is_newest] == [30]
    assert [step.key.step for step in steps if step.is_best] == [20]


def test_the_newest_can_be_the_best_and_without_metrics_none_is() -> None:
    store = MemoryStore()
    commits = [save(store, 10, metric=3.0), save(store, 20, metric=1.0)]
    assert best_of(commits) == commits[-1]
    assert best_of([save(MemoryStore(), 10)]) is None


def test_what_an_archiving_run_keeps_is_marked() -> None:
    store = MemoryStore()
    for step in (10, 20, 30):
        save(store, step)
    steps = take_inventory(CommitLog(store, None), archive_every_h=1.0).steps
    assert [step.key.step for step in steps if step.is_archived] == [10]
    assert not any(step.is_archived for step in inventory_of(store).steps)


def test_shards_and_manifests_without_a_commit_are_a_save_that_was_cut_off() -> None:
    store = MemoryStore()
    save(store, 10)
    write_shards(store, prepare(20))
    parts = prepare(30)
    write_shards(store, parts)
    commit = commit_parts(CommitLog(store, RUN), parts)
    store.delete([commit.object_key])
    cut_off = inventory_of(store).cut_off
    assert [(save.key.step, len(save.keys)) for save in cut_off] == [(20, 2), (30, 3)]
    assert cut_off[0].stored_bytes == sum(len(content) for content in prepare(20).shards.values())


def test_an_unreadable_commit_keeps_its_shards_from_being_called_cut_off() -> None:
    store = MemoryStore()
    store.put(save(store, 10).object_key, b"")
    assert inventory_of(store).cut_off == ()


def test_a_foreign_place_is_empty() -> None:
    store = MemoryStore()
    store.put("commits/readme.txt", b"hello")
    store.put("data/part-0.parquet", b"")
    inventory = inventory_of(store)
    assert (inventory.steps, inventory.cut_off, inventory.history) == ((), (), [])


def test_fidelity_is_lossless_unless_a_tensor_says_otherwise() -> None:
    assert fidelity_of(prepare(10).manifest()) == "lossless"

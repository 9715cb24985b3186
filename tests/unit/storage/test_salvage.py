"""Which Levels of a damaged Checkpoint are whole. On the in-memory store."""

from __future__ import annotations

import pytest

from storage.commit_log import CommitLog
from storage.errors import StoreUnavailable
from storage.keys import shard_key
from storage.manifest import Commit
from storage.memory_store import MemoryStore
from storage.salvage import whole_levels
from tests.fakes.checkpoints import RUN
from tests.fakes.layered_checkpoints import damage_tensor, layered_save


def levels(store: MemoryStore, commit: Commit) -> set[str]:
    return set(whole_levels(store, CommitLog(store, RUN).read_manifest(commit)))


def test_a_good_checkpoint_has_all_its_levels() -> None:
    store = MemoryStore()
    assert levels(store, layered_save(store, 10, world_size=3)) == {"L1", "L2"}


@pytest.mark.parametrize(
    ("name", "left"), [("model.w", {"L2"}), ("optim.w.exp_avg", {"L1"}), ("optim.w.exp_avg_sq", {"L1"})]
)
def test_one_flipped_bit_costs_its_own_level_only(name: str, left: set[str]) -> None:
    store = MemoryStore()
    commit = layered_save(store, 10)
    damage_tensor(store, commit, name, rank=1)
    assert levels(store, commit) == left


@pytest.mark.parametrize("remove", [True, False])
def test_a_shard_that_is_gone_or_has_lost_its_end_takes_all_levels_with_it(remove: bool) -> None:
    store = MemoryStore()
    commit = layered_save(store, 10)
    key = shard_key(commit.step_key, 0)
    content = store.get(key)
    store.delete([key])
    if not remove:
        store.put(key, content[:-1])
    assert levels(store, commit) == set()


def test_an_outage_is_not_taken_for_damage() -> None:
    class Away(MemoryStore):
        def get_range(self, key: str, *_: object, **__: object) -> bytes:
            raise StoreUnavailable("get_range", key, "away")

    store = Away()
    commit = layered_save(store, 10)
    with pytest.raises(StoreUnavailable):
        levels(store, commit)

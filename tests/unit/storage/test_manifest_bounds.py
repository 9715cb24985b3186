"""What is absurd in a stored Manifest is refused by name before anything is built from it. On the in-memory store."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from storage.codec import digest128
from storage.commit_log import CommitLog
from storage.errors import CommitRefused, CorruptCheckpoint, StorageError
from storage.manifest import Commit, Manifest
from storage.memory_store import MemoryStore
from storage.merge import manifest_problem, merge_receipts
from tests.fakes.checkpoints import RUN, TIME, prepare, save

Change = Callable[[dict[str, Any]], object]


def rewritten(store: MemoryStore, commit: Commit, change: Change) -> Commit:
    """``commit`` of a Manifest that says otherwise, digest and size in order: as a faulty or hostile writer would."""
    content = json.loads(store.get(commit.manifest_key))
    change(content)
    return with_manifest(store, commit, json.dumps(content).encode())


def with_manifest(store: MemoryStore, commit: Commit, content: bytes) -> Commit:
    store.put(commit.manifest_key, content)
    return commit.model_copy(update={"manifest_bytes": len(content), "manifest_digest": digest128(content)})


def chunk(content: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = content["tensors"]["w"]["chunks"][1]
    return found


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda m: m["shards"].pop(), "lists 1 Shards that are not those of ranks 0 to 1"),
        (lambda m: m["shards"].reverse(), "not those of ranks 0 to 1 in order"),
        (lambda m: m["rank_states"].append({}), "the state of 3 ranks, the world size is 2"),
        (lambda m: m.update(world_size=1_000_000), "lists 2 Shards"),
        (lambda m: m["shards"][1].update(key=m["shards"][0]["key"]), "the Shard of rank 1 lies at"),
        (lambda m: m["shards"][1].update(key="shards/elsewhere"), "which is not its name"),
        (lambda m: chunk(m).update(rank=2), "has a chunk of rank 2, the world size is 2"),
        (lambda m: chunk(m).update(offsets=[0, 0]), "tensor w is covered twice: the chunks of rank 0"),
        (lambda m: chunk(m).update(offsets=[9, 0]), "reaches outside"),
        (lambda m: m["tensors"]["w"]["chunks"].pop(), "has a gap: 128 of 256"),
        (lambda m: m["tensors"]["w"].update(shape=[1 << 61, 1 << 61]), "elements, at most"),
        (
            lambda m: m["tensors"]["w"].update(
                shape=[10**9],
                chunks={"shape": [10**9], "dim": 0, "size": 1, "first_rank": 0, "rank_step": 0},
            ),
            "is cut into 1000000000 chunks, at most",
        ),
    ],
)
def test_a_manifest_that_cannot_be_is_named_and_counts_as_damaged(change: Change, complaint: str) -> None:
    store = MemoryStore()
    commit = rewritten(store, save(store, 10), change)
    with pytest.raises(CorruptCheckpoint, match=complaint) as caught:
        CommitLog(store, RUN).read_manifest(commit)
    assert caught.value.key == commit.manifest_key


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda m: chunk(m).update(offsets=[-1, 0]), "greater than or equal to 0"),
        (lambda m: chunk(m).update(sizes=[1 << 62, 1]), "less than 4611686018427387904"),
        (lambda m: chunk(m).update(sizes=[1] * 17), "at most 16 items"),
        (lambda m: m.update(world_size=10**9), "less than or equal to 1000000"),
        (lambda m: m["shards"][0].update(key="shards/../../etc/passwd"), "points outside the run"),
        (lambda m: m["shards"][0].update(key="/etc/passwd"), "points outside the run"),
        (lambda m: m["shards"][0].update(size=-5), "greater than or equal to 0"),
        (lambda m: m.update(rank_states="x" * 100), "valid array"),
    ],
)
def test_a_manifest_that_cannot_even_be_said_is_not_read(change: Change, complaint: str) -> None:
    store = MemoryStore()
    commit = rewritten(store, save(store, 10), change)
    with pytest.raises(StorageError, match=complaint):
        CommitLog(store, RUN).read_manifest(commit)


def test_bottomless_json_ends_in_an_error_of_ours() -> None:
    store = MemoryStore()
    commit = save(store, 10)
    content = store.get(commit.manifest_key)
    deep = content.replace(b'"shared_state":{', b'"shared_state":{"x":' + b"[" * 100_000 + b"]" * 100_000 + b",", 1)
    with pytest.raises(StorageError, match="recursion limit exceeded"):
        CommitLog(store, RUN).read_manifest(with_manifest(store, commit, deep))


def test_what_is_merged_is_what_may_be_read() -> None:
    manifest = merge_receipts(prepare(10, world_size=70).receipts, time_utc=TIME, metadata={}, ledger=None)
    assert manifest_problem(manifest) is None
    assert Manifest.model_validate_json(manifest.model_dump_json()) == manifest


def test_an_index_that_its_shard_cannot_hold_is_refused_at_the_commit() -> None:
    (receipt,) = prepare(10, world_size=1).receipts
    shard = receipt.shard.model_copy(update={"index_bytes": receipt.shard.size})
    with pytest.raises(CommitRefused, match="the index of rank 0 has"):
        merge_receipts([receipt.model_copy(update={"shard": shard})], time_utc=TIME, metadata={}, ledger=None)

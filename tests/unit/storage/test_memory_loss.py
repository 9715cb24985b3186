"""A Keeper in a process of its own is killed; its peer, a real Keeper too, is all that is left."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from storage.keeper_protocol import TransportAddress
from storage.transport_client import ReplicaClient
from tests.fakes.memory_bench import FIRST, KEY, SECOND, WAIT_S, MemoryBench, arrays, keep, manifest_of, read_arrays

TRAINED = 1.0


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[MemoryBench]:
    bench = MemoryBench(tmp_path)
    yield bench
    bench.close()


def live(directory: str, peer: TransportAddress, pipe: Connection) -> None:
    """A node's Keeper: keeps steps 1 to 3 of rank 0, says so, and waits to be killed."""
    keeper = MemoryBench(Path(directory)).keeper("a")
    for step in (1, 2, 3):
        keep(keeper, arrays(TRAINED * step), step=step, safe_step=step - 1, peer=peer)
        keeper.wait_replicated(FIRST, 0, step, WAIT_S)
    pipe.send(keeper.memory_report())
    pipe.recv()


def test_replicas_outlive_the_keeper_they_came_from_and_make_its_step_whole(bench: MemoryBench, tmp_path: Path) -> None:
    b = bench.keeper("b")
    keep(b, arrays(7.0), step=3, rank=1)
    assert b.wait_replicated(FIRST, 1, 3, WAIT_S).replicated_step == 3
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    (tmp_path / "other").mkdir()
    process = context.Process(target=live, args=(str(tmp_path / "other"), b.greet().address, theirs))
    process.start()
    try:
        assert ours.poll(60.0)
        lost = ours.recv()
    finally:
        process.kill()
        process.join(WAIT_S)
    held = {(facts.step, facts.rank): facts for facts in b.memory_report().generations if facts.is_replica}
    assert sorted(held) == [(2, 0), (3, 0)]
    receipts = {receipt.shard.rank: receipt for receipt in b.generation_receipts(FIRST, 3)}
    manifest = manifest_of(*receipts.values())
    client = ReplicaClient(b.memory_report().address, KEY, "run", deadline_s=WAIT_S)
    try:
        content = bytes(client.fetch(FIRST, 3, 0, 0, held[3, 0].num_bytes))
    finally:
        client.close()
    np.testing.assert_array_equal(read_arrays(content, receipts[0])["weight"], arrays(TRAINED * 3)["weight"])
    left = Path(next(facts.path for facts in lost.generations if facts.step == 3)).read_bytes()
    assert content == left[: len(content)]
    assert [shard.rank for shard in manifest.shards] == [0, 1]


def test_a_keeper_that_takes_its_place_begins_empty_and_gets_replicas_again(bench: MemoryBench) -> None:
    a, b = bench.keeper("a"), bench.keeper("b")
    keep(b, arrays(1), step=1, rank=1, peer=a.greet().address)
    assert b.wait_replicated(FIRST, 1, 1, WAIT_S).replicated_step == 1
    a.close()
    successor = bench.keeper("a")
    assert successor.memory_report().generations == ()
    keep(b, arrays(2), attempt=SECOND, step=2, rank=1, peer=successor.greet().address)
    assert b.wait_replicated(SECOND, 1, 2, WAIT_S).replicated_step == 2
    assert [facts.step for facts in successor.memory_report().generations] == [2]
    assert Path(successor.memory_report().generations[0].path).exists()

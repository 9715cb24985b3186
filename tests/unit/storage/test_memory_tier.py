"""Real Keepers, arenas and TCP over loopback in one process; only the object store is in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash

from tests.fakes.memory_bench import FIRST, WAIT_S, MemoryBench, arrays, keep, manifest_of, read_arrays, steps


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[MemoryBench]:
    bench = MemoryBench(tmp_path)
    yield bench
    bench.close()


def test_a_kept_snapshot_is_byte_equal_at_its_peer_and_both_make_one_manifest(bench: MemoryBench) -> None:
    a, b = bench.keeper("a"), bench.keeper("b")
    contents = {0: arrays(1.0), 1: arrays(5.0)}
    keep(a, contents[0], step=7, rank=0, peer=b.greet().address)
    keep(b, contents[1], step=7, rank=1, peer=a.greet().address)
    for keeper, rank in ((a, 0), (b, 1)):
        progress = keeper.wait_replicated(FIRST, rank, 7, WAIT_S)
        assert (progress.sealed_step, progress.replicated_step, progress.last_error) == (7, 7, None)
    for keeper in (a, b):
        held = keeper.memory_report().generations
        assert keeper.memory_report().address == keeper.greet().address
        receipts = {receipt.shard.rank: receipt for receipt in keeper.generation_receipts(FIRST, 7)}
        manifest = manifest_of(receipts[0], receipts[1])
        assert manifest.shared_state == {"lr": 0.1}
        assert manifest.tensors["weight"].shape == (1280, 1024)
        for facts in held:
            content = Path(facts.path).read_bytes()[: facts.num_bytes]
            assert manifest.shards[facts.rank].digest == xxhash.xxh3_128_hexdigest(content)
            found = read_arrays(content, receipts[facts.rank])
            np.testing.assert_array_equal(found["weight"], contents[facts.rank]["weight"])
            np.testing.assert_array_equal(found["bias"], contents[facts.rank]["bias"])
    assert a.generation_receipts(FIRST, 7)[0].shard == b.generation_receipts(FIRST, 7)[1].shard
    assert (steps(a, is_replica=False, rank=0), steps(a, is_replica=True, rank=1)) == ([(1, 7)], [(1, 7)])


def test_nothing_kept_goes_to_the_store_unless_it_is_shipped_too(bench: MemoryBench) -> None:
    keeper = bench.keeper("a")
    keep(keeper, arrays(1.0), step=7)
    assert keeper.wait_replicated(FIRST, 0, 7, WAIT_S).replicated_step == 7
    assert keeper.status().in_flight + keeper.status().staged == 0
    assert keeper.flush(WAIT_S)

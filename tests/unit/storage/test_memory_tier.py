"""Real Keepers, arenas and TCP over loopback in one process; only the object store is in memory."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import xxhash

from storage.buffer_map import BufferMap, map_buffer
from storage.config import CheckpointConfig, MemoryConfig
from storage.errors import StorageError
from storage.keeper import Keeper
from storage.keys import Attempt
from storage.loop_waits import wait_on_loop
from tests.fakes.gated_store import GatedStore
from tests.fakes.memory_bench import (
    FIRST,
    KEY,
    SECOND,
    WAIT_S,
    MemoryBench,
    arrays,
    ask,
    keep,
    manifest_of,
    read_arrays,
    steps,
)
from tests.fakes.recording_sink import RecordingSink
from tests.fakes.snapshot_writer import fill, lease_for, make_header, sealed
from tests.fakes.snapshot_writer import save as keep_shipped


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
    by_rank = [{r.shard.rank: r.shard for r in keeper.generation_receipts(FIRST, 7)} for keeper in (a, b)]
    assert by_rank[0] == by_rank[1]
    assert (steps(a, is_replica=False, rank=0), steps(a, is_replica=True, rank=1)) == ([(1, 7)], [(1, 7)])


def test_nothing_kept_goes_to_the_store_unless_it_is_shipped_too(bench: MemoryBench) -> None:
    keeper = bench.keeper("a")
    keep(keeper, arrays(1.0), step=7)
    assert keeper.wait_replicated(FIRST, 0, 7, WAIT_S).replicated_step == 7
    assert keeper.status().in_flight + keeper.status().staged == 0
    assert keeper.flush(WAIT_S)


def test_older_ones_go_when_a_newer_step_is_safe_and_no_sooner(bench: MemoryBench) -> None:
    a, b = bench.keeper("a"), bench.keeper("b")
    peer = b.greet().address
    for step in (1, 2, 3):
        keep(a, arrays(step), step=step, peer=peer)
        assert a.wait_replicated(FIRST, 0, step, WAIT_S).replicated_step == step
    assert steps(a, is_replica=False) == steps(b, is_replica=True) == [(1, 1), (1, 2), (1, 3)]
    assert ask(a, 1000, step=4) is None
    keep(a, arrays(4), step=4, safe_step=2, peer=peer)
    assert a.wait_replicated(FIRST, 0, 4, WAIT_S).replicated_step == 4
    assert steps(a, is_replica=False) == steps(b, is_replica=True) == [(1, 2), (1, 3), (1, 4)]


def test_generations_outlive_their_attempt_until_a_newer_one_has_a_safe_step(bench: MemoryBench) -> None:
    a, b = bench.keeper("a"), bench.keeper("b")
    peer = b.greet().address
    keep(a, arrays(1), step=1, peer=peer)
    a.wait_replicated(FIRST, 0, 1, WAIT_S)
    header, num_bytes = make_header(arrays(2), attempt=FIRST, step=2)
    late = ask(a, num_bytes, step=2)
    assert late is not None
    a.forget_attempts_before(2)
    with pytest.raises(StorageError, match="attempt 1 is over"):
        a.seal(replace(sealed(header, late, "0" * 16), keep=True, ship=False))
    keep(a, arrays(2), attempt=SECOND, step=2, peer=peer)
    assert a.wait_replicated(SECOND, 0, 2, WAIT_S).replicated_step == 2
    assert steps(a, is_replica=False) == steps(b, is_replica=True) == [(1, 1), (2, 2)]
    keep(a, arrays(3), attempt=SECOND, step=3, safe_step=2, peer=peer)
    assert a.wait_replicated(SECOND, 0, 3, WAIT_S).replicated_step == 3
    assert steps(a, is_replica=False) == steps(b, is_replica=True) == [(2, 2), (2, 3)]


def test_a_replica_of_an_attempt_that_is_over_is_refused(bench: MemoryBench) -> None:
    a, b = bench.keeper("a"), bench.keeper("b")
    keep(b, arrays(1), attempt=SECOND, step=1)
    keep(a, arrays(1), step=1, peer=b.greet().address)
    progress = a.wait_replicated(FIRST, 0, 1, WAIT_S)
    assert (progress.sealed_step, progress.replicated_step) == (1, -1)
    assert "attempt 2 has begun" in str(progress.last_error)
    assert steps(b, is_replica=True) == []


def test_a_lease_asked_ahead_may_be_sealed_for_a_later_step_but_not_an_earlier(bench: MemoryBench) -> None:
    keeper = bench.keeper("a")
    for step in (4, 5, 9):
        header, num_bytes = make_header(arrays(1), attempt=FIRST, step=step)
        lease = ask(keeper, num_bytes, step=5)
        assert lease is not None
        with map_buffer(lease.path, lease.num_bytes) as buffer:
            digest = fill(buffer, header, arrays(1))
        snapshot = replace(sealed(header, lease, digest), keep=True, ship=False)
        if step < 5:
            with pytest.raises(StorageError, match="rank 0 step 4: seals"):
                keeper.seal(snapshot)
            keeper.release([lease.lease_id])
        else:
            keeper.seal(snapshot)
    assert keeper.wait_replicated(FIRST, 0, 9, WAIT_S).replicated_step == 9
    assert steps(keeper, is_replica=False) == [(1, 5), (1, 9)]


def test_leases_whose_answers_got_lost_do_not_end_the_memory_tier(bench: MemoryBench) -> None:
    keeper = bench.keeper("a")
    leases = [ask(keeper, 1000, step=step) for step in (1, 2, 3)]
    assert None not in leases
    later = [ask(keeper, 1000, step=step) for step in range(4, 10)]
    assert None not in later


def test_a_dead_worker_loses_its_open_lease_and_keeps_what_it_sealed(bench: MemoryBench) -> None:
    keeper = bench.keeper("a")
    with subprocess.Popen(["sleep", "1000"]) as worker:
        header, num_bytes = make_header(arrays(1), attempt=FIRST, step=1)
        lease = ask(keeper, num_bytes, step=1, pid=worker.pid)
        assert lease is not None
        with map_buffer(lease.path, lease.num_bytes) as buffer:
            digest = fill(buffer, header, arrays(1))
        keeper.seal(replace(sealed(header, lease, digest), keep=True, ship=False))
        left_open = ask(keeper, num_bytes, step=2, pid=worker.pid)
        worker.kill()
    after = ask(keeper, num_bytes, attempt=SECOND, step=2)
    assert left_open is not None
    assert after is not None
    assert after.path == left_open.path
    assert steps(keeper, is_replica=False) == [(1, 1)]
    receipt = keeper.generation_receipts(FIRST, 1)[0]
    (facts,) = keeper.memory_report().generations
    found = read_arrays(Path(facts.path).read_bytes()[: facts.num_bytes], receipt)
    np.testing.assert_array_equal(found["weight"], arrays(1)["weight"])


def test_a_snapshot_shipped_and_kept_stays_until_both_are_done_with_it(bench: MemoryBench) -> None:
    store, sink = GatedStore(), RecordingSink()
    keeper = bench.keeper("a", store=store, sink=sink)
    shipped = keep(keeper, arrays(1), step=1, ship=True)
    assert shipped is not None
    store.wait_for_puts(1)
    paths = set()
    for step in range(2, 12):
        lease = keep(keeper, arrays(step), step=step, safe_step=step - 1)
        assert lease is not None
        paths.add(lease.path)
        assert keeper.wait_replicated(FIRST, 0, step, WAIT_S).replicated_step == step
    assert steps(keeper, is_replica=False) == [(1, 10), (1, 11)]
    assert shipped.path not in paths
    store.open_gate()
    assert keeper.flush(WAIT_S)
    assert [receipt.step for receipt in sink.receipts] == [1]
    stored = store.get(sink.receipts[0].shard.key)
    np.testing.assert_array_equal(read_arrays(stored, sink.receipts[0])["weight"], arrays(1)["weight"])
    reused = {keep(keeper, arrays(step), step=step, safe_step=step - 1).path for step in range(12, 16)}  # type: ignore[union-attr]
    assert shipped.path in reused


def test_a_kept_one_stays_when_its_shipping_is_over(bench: MemoryBench) -> None:
    keeper = bench.keeper("a")
    keep(keeper, arrays(1), step=1, ship=True)
    assert keeper.flush(WAIT_S)
    assert steps(keeper, is_replica=False) == [(1, 1)]
    keep(keeper, arrays(9), step=2)
    (facts,) = [facts for facts in keeper.memory_report().generations if facts.step == 1]
    receipt = keeper.generation_receipts(FIRST, 1)[0]
    found = read_arrays(Path(facts.path).read_bytes()[: facts.num_bytes], receipt)
    np.testing.assert_array_equal(found["weight"], arrays(1)["weight"])


def test_no_new_pages_are_taken_from_step_to_step(bench: MemoryBench) -> None:
    a, b = bench.keeper("a"), bench.keeper("b")
    files: list[set[int]] = []
    for step in range(1, 13):
        keep(a, arrays(step), step=step, safe_step=step - 1, peer=b.greet().address)
        assert a.wait_replicated(FIRST, 0, step, WAIT_S).replicated_step == step
        held = (*a.memory_report().generations, *b.memory_report().generations)
        files.append({os.stat(facts.path).st_ino for facts in held})
    assert len(set().union(*files)) <= 6
    assert b.status().arena_bytes <= 3 * (arrays(0)["weight"].nbytes + (1 << 20))


def test_an_index_longer_than_expected_still_makes_a_whole_object(bench: MemoryBench) -> None:
    a, b = bench.keeper("a"), bench.keeper("b")
    many = {f"layer.{number:05d}.bias": np.full((3,), number, dtype=np.float32) for number in range(3000)}
    for step in range(1, 6):
        assert keep(a, many, step=step, safe_step=step - 1, peer=b.greet().address) is not None
        assert a.wait_replicated(FIRST, 0, step, WAIT_S).replicated_step == step
        (receipt,) = a.generation_receipts(FIRST, step)
        view = a.memory.open_generation(FIRST, step, 0)
        assert view is not None
        assert len(view) == receipt.shard.size
        del view
    for keeper in (a, b):
        facts = next(facts for facts in keeper.memory_report().generations if facts.step == 5)
        (receipt,) = keeper.generation_receipts(FIRST, 5)
        found = read_arrays(Path(facts.path).read_bytes()[: facts.num_bytes], receipt)
        assert [found[name][0] for name in sorted(found)] == list(range(3000))


def test_a_buffer_that_grew_is_not_leased_to_who_has_mapped_it_shorter(bench: MemoryBench) -> None:
    keeper, mapped = bench.keeper("a"), BufferMap()
    many = {f"layer.{number:05d}.bias": np.full((3,), number, dtype=np.float32) for number in range(3000)}
    header, num_bytes = make_header(many, attempt=FIRST, step=1)
    lease = ask(keeper, num_bytes, step=1)
    assert lease is not None
    digest = fill(mapped.open(lease.path, num_bytes), header, many)
    keeper.seal(replace(sealed(header, lease, digest), keep=True, ship=False))
    assert keeper.wait_replicated(FIRST, 0, 1, WAIT_S).replicated_step == 1
    assert keep(keeper, arrays(1, rows=1), step=2) is not None
    small = ask(keeper, 1000, step=3, safe_step=2)
    assert small is not None
    keeper.release([small.lease_id])
    bigger, num_bytes = make_header(arrays(1, rows=num_bytes // 4096 + 160), attempt=FIRST, step=3)
    shipped = lease_for(keeper, bigger, num_bytes)
    assert shipped is not None
    assert len(mapped.open(shipped.path, num_bytes)) == num_bytes
    mapped.close()


def test_a_peer_without_room_refuses_with_sizes_and_training_goes_on(bench: MemoryBench) -> None:
    a, small = bench.keeper("a"), bench.keeper("small", generation_budget_bytes=1 << 20)
    for step in (1, 2, 3):
        assert keep(a, arrays(step), step=step, safe_step=step - 1, peer=small.greet().address) is not None
    progress = a.wait_replicated(FIRST, 0, 3, WAIT_S)
    assert (progress.sealed_step, progress.replicated_step) == (3, -1)
    assert "takes no replica" in str(progress.last_error)
    assert "0 of 1048576 are in use" in str(progress.last_error)
    assert a.status().memory_error == progress.last_error
    keep(a, arrays(4), step=4, safe_step=3, peer=bench.keeper("c").greet().address)
    progress = a.wait_replicated(FIRST, 0, 4, WAIT_S)
    assert (progress.replicated_step, progress.last_error, a.status().memory_error) == (4, None, None)


def test_a_node_without_room_leaves_the_snapshot_out_and_says_so(bench: MemoryBench) -> None:
    keeper = bench.keeper("a", generation_budget_bytes=4 << 20)
    assert keep(keeper, arrays(1), step=1) is not None
    assert keep(keeper, arrays(2), step=2) is None
    assert "no Snapshot in memory: rank 0 step 2" in str(keeper.status().memory_error)
    assert keep_shipped(keeper, arrays(2), attempt=FIRST, step=2) is not None
    assert keep(keeper, arrays(3), step=3, safe_step=3) is not None


def test_a_new_attempt_gets_room_from_what_it_did_not_begin_from(bench: MemoryBench) -> None:
    keeper = bench.keeper("a", generation_budget_bytes=10 << 20)
    for step in (1, 2, 3):
        assert keep(keeper, arrays(step), step=step) is not None
    assert keep(keeper, arrays(3), attempt=SECOND, step=3) is not None
    assert steps(keeper, is_replica=False) == [(1, 2), (2, 3)]


def test_a_failed_attempt_leaves_room_for_the_next_to_have_a_safe_step(bench: MemoryBench) -> None:
    keeper = bench.keeper("a", generation_budget_bytes=10 << 20)
    for number in range(1, 6):
        attempt = Attempt(number=number, nonce=f"{number:08x}")
        for step in (8, 9, 10):
            keep(keeper, arrays(step), attempt=attempt, step=step)
        assert (number, 8) in steps(keeper, is_replica=False)


def test_a_peer_that_dies_while_it_takes_a_replica_costs_the_replica_alone(bench: MemoryBench) -> None:
    slow = CheckpointConfig(encoding="raw", memory=MemoryConfig(bandwidth_bytes_per_s=4e6))
    a, b = bench.keeper("a", config=slow), bench.keeper("b")
    keep(a, arrays(1), step=1, peer=b.greet().address)
    wait_for_a_replica(b)
    b.close()
    progress = a.wait_replicated(FIRST, 0, 1, WAIT_S)
    assert (progress.sealed_step, progress.replicated_step) == (1, -1)
    assert progress.last_error is not None
    assert steps(a, is_replica=False) == [(1, 1)]
    assert keep(a, arrays(2), step=2) is not None
    assert a.wait_replicated(FIRST, 0, 2, WAIT_S).replicated_step == 2


def test_a_buffer_changed_after_its_seal_is_not_kept(bench: MemoryBench) -> None:
    keeper = bench.keeper("a")
    header, num_bytes = make_header(arrays(1), attempt=FIRST, step=1)
    lease = ask(keeper, num_bytes, step=1)
    assert lease is not None
    with map_buffer(lease.path, lease.num_bytes) as buffer:
        digest = fill(buffer, header, arrays(1))
        buffer[60] ^= 1
    keeper.seal(replace(sealed(header, lease, digest), keep=True, ship=False))
    progress = keeper.wait_replicated(FIRST, 0, 1, WAIT_S)
    assert (progress.sealed_step, progress.replicated_step) == (1, -1)
    assert "does not match its digest" in str(progress.last_error)
    assert steps(keeper, is_replica=False) == []


def test_sealing_to_be_neither_shipped_nor_kept_is_refused(bench: MemoryBench) -> None:
    keeper = bench.keeper("a")
    header, num_bytes = make_header(arrays(1), attempt=FIRST, step=1)
    lease = ask(keeper, num_bytes, step=1)
    assert lease is not None
    with pytest.raises(StorageError, match="neither shipped nor kept"):
        keeper.seal(replace(sealed(header, lease, ""), keep=False, ship=False))


def test_a_peer_with_another_key_takes_nothing(bench: MemoryBench) -> None:
    a, b = bench.keeper("a"), bench.keeper("b", key=bytes(32))
    keep(a, arrays(1), step=1, peer=b.greet().address)
    progress = a.wait_replicated(FIRST, 0, 1, WAIT_S)
    assert progress.replicated_step == -1
    assert "key" in str(progress.last_error)
    b.memory.set_key(KEY)
    keep(a, arrays(2), step=2, peer=b.greet().address)
    assert a.wait_replicated(FIRST, 0, 2, WAIT_S).replicated_step == 2


def test_close_leaves_no_thread_descriptor_or_file(bench: MemoryBench, tmp_path: Path) -> None:
    threads, descriptors = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    a, b = bench.keeper("a"), bench.keeper("b")
    keep(a, arrays(1), step=1, peer=b.greet().address)
    assert a.wait_replicated(FIRST, 0, 1, WAIT_S).replicated_step == 1
    assert a.status().generation_bytes == b.status().replica_bytes > 0
    for keeper in (a, b):
        keeper.close()
    assert [thread.name for thread in threading.enumerate() if thread not in threads] == []
    assert list(tmp_path.iterdir()) == []
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_any_number_waits_for_a_replica_on_one_event_loop(bench: MemoryBench) -> None:
    keeper = bench.keeper("a")

    async def wait_all() -> list[bool]:
        memory = keeper.memory
        waits = [wait_on_loop(memory.watch, partial(memory.is_decided, FIRST, rank, 1), WAIT_S) for rank in range(32)]
        tasks = [asyncio.create_task(wait) for wait in waits]
        await asyncio.sleep(0)
        for rank in range(32):
            keep(keeper, arrays(1, rows=1), step=1, rank=rank, world_size=32)
        return await asyncio.gather(*tasks)

    assert asyncio.run(wait_all()) == [True] * 32


def test_a_wait_ends_at_its_time_out(bench: MemoryBench) -> None:
    keeper = bench.keeper("a")
    memory = keeper.memory
    assert asyncio.run(wait_on_loop(memory.watch, partial(memory.is_decided, FIRST, 0, 1), 0.01)) is False
    assert keeper.wait_replicated(FIRST, 0, 1, 0.01).sealed_step == -1


def wait_for_a_replica(keeper: Keeper) -> None:
    """Until one is coming in."""
    for _ in range(20_000):
        if keeper.status().arena_bytes > 0:
            return
        threading.Event().wait(0.001)
    raise AssertionError("a replica should be coming in")

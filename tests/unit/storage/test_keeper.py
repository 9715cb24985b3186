from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash

from storage.buffer_map import map_buffer
from storage.config import CheckpointConfig
from storage.errors import StorageError, StoreRefused
from storage.keeper import Keeper
from storage.keeper_protocol import KEEPER_PROTOCOL_VERSION
from storage.keys import Attempt, StepKey, shard_key
from storage.memory_store import MemoryStore
from storage.object_store import ObjectStore
from tests.fakes.gated_store import GatedStore
from tests.fakes.recording_sink import RecordingSink
from tests.fakes.snapshot_writer import fill, lease_for, make_header, save, sealed

FIRST = Attempt(number=1, nonce="00000001")
SECOND = Attempt(number=2, nonce="00000002")
RAW = CheckpointConfig(encoding="raw")
WAIT_S = 20.0


def ones(value: float = 1.0) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    return {"weight": np.full((64, 32), value, dtype=np.float32), "nothing": np.zeros((0, 4), dtype=np.float32)}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """Makes Keepers and closes them; opens every gate first so that no uploader stays behind."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._made: list[tuple[Keeper, ObjectStore]] = []

    def keeper(
        self, store: ObjectStore, sink: RecordingSink, clock: Clock | None = None, budget_bytes: int = 1 << 24
    ) -> Keeper:
        keeper = Keeper(
            "run",
            "node",
            store,
            sink,
            RAW,
            self._directory / f"arena-{len(self._made)}",
            clock or Clock(),
            build_digest="build",
            budget_bytes=budget_bytes,
            resend_s=(0.001, 0.01),
        )
        self._made.append((keeper, store))
        return keeper

    def close(self) -> None:
        for keeper, store in self._made:
            if isinstance(store, GatedStore):
                store.open_gate()
            keeper.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()


def key(step: int, rank: int = 0, attempt: Attempt = FIRST) -> str:
    return shard_key(StepKey(step=step, attempt=attempt), rank)


def test_a_sealed_snapshot_becomes_a_shard_and_a_receipt_that_describes_it(bench: Bench) -> None:
    store, sink = MemoryStore(), RecordingSink()
    keeper = bench.keeper(store, sink)
    save(keeper, ones(3), attempt=FIRST, step=7, rank=1)
    assert keeper.flush(WAIT_S)
    (receipt,) = sink.receipts
    stored = store.get(key(7, rank=1))
    assert receipt.shard.key == key(7, rank=1)
    assert receipt.shard.size == len(stored)
    assert receipt.shard.digest == xxhash.xxh3_128_hexdigest(stored)
    assert (receipt.step_key, receipt.world_size) == (StepKey(step=7, attempt=FIRST), 2)
    assert receipt.tensors["weight"].shape == (128, 32)
    assert [(c.rank, c.offsets, c.sizes) for c in receipt.tensors["weight"].chunks] == [(1, (64, 0), (64, 32))]
    assert receipt.tensors["nothing"].chunks == ()
    assert (receipt.shared_state, receipt.rank_state, receipt.stall_s) == (None, {"rank": 1}, 0.25)
    assert ones(3)["weight"].tobytes() in stored


def test_rank_zero_alone_brings_the_shared_state(bench: Bench) -> None:
    sink = RecordingSink()
    keeper = bench.keeper(MemoryStore(), sink)
    save(keeper, ones(), attempt=FIRST, step=1, rank=0)
    assert keeper.flush(WAIT_S)
    assert sink.receipts[0].shared_state == {"lr": 0.1}


def test_values_changed_after_the_seal_never_reach_the_file(bench: Bench) -> None:
    store = GatedStore()
    keeper = bench.keeper(store, RecordingSink())
    arrays = ones(1)
    save(keeper, arrays, attempt=FIRST, step=7)
    arrays["weight"].fill(2)
    # A second save while the first is held up must not land in the first one's buffer either.
    save(keeper, arrays, attempt=FIRST, step=8)
    store.open_gate()
    assert keeper.flush(WAIT_S)
    stored = store.get(key(7))
    assert ones(1)["weight"].tobytes() in stored
    assert np.float32(2).tobytes() * 8 not in stored
    assert ones(2)["weight"].tobytes() in store.get(key(8))


def test_at_most_one_in_flight_and_one_staged_per_rank(bench: Bench) -> None:
    store, sink = GatedStore(), RecordingSink()
    keeper = bench.keeper(store, sink)
    taken = [step for step in range(1, 51) if save(keeper, ones(), attempt=FIRST, step=step)]
    store.wait_for_puts(1)
    assert taken == [1, 2]
    assert (keeper.status().in_flight, keeper.status().staged) == (1, 1)
    assert keeper.status().arena_bytes <= 2 * 65536
    assert store.begun == [key(1)]
    store.open_gate()
    assert keeper.flush(WAIT_S)
    assert save(keeper, ones(), attempt=FIRST, step=51) is not None
    assert keeper.flush(WAIT_S)
    assert [receipt.step for receipt in sink.receipts] == [1, 2, 51]
    assert keeper.status().arena_bytes <= 2 * 65536


def test_two_ranks_upload_at_the_same_time_and_a_third_waits(bench: Bench) -> None:
    store = GatedStore()
    keeper = bench.keeper(store, RecordingSink())
    for rank in range(3):
        header, num_bytes = make_header(ones(), attempt=FIRST, step=1, rank=rank, world_size=3)
        lease = lease_for(keeper, header, num_bytes)
        assert lease is not None
        with map_buffer(lease.path, num_bytes) as buffer:
            digest = fill(buffer, header, ones())
        keeper.seal(sealed(header, lease, digest))
    store.wait_for_puts(2)
    assert (keeper.status().in_flight, keeper.status().staged) == (2, 1)
    store.open_gate()
    assert keeper.flush(WAIT_S)
    assert len(store.list("shards/")) == 3


def test_a_blocked_store_holds_up_neither_lease_nor_seal_of_another_rank(bench: Bench) -> None:
    store = GatedStore()
    keeper = bench.keeper(store, RecordingSink())
    save(keeper, ones(), attempt=FIRST, step=1, rank=0)
    store.wait_for_puts(1)
    assert save(keeper, ones(), attempt=FIRST, step=1, rank=1) is not None


@pytest.mark.parametrize("error", [None, ConnectionError("coordinator is gone")])
def test_a_receipt_is_sent_until_it_is_acknowledged(bench: Bench, error: Exception | None) -> None:
    sink = RecordingSink(refusals=3, error=error)
    keeper = bench.keeper(MemoryStore(), sink)
    save(keeper, ones(), attempt=FIRST, step=4)
    assert keeper.flush(WAIT_S)
    assert sink.num_calls == 4
    assert [receipt.step for receipt in sink.receipts] == [4]
    assert keeper.status().unacknowledged == 0


def test_an_unacknowledged_receipt_keeps_no_buffer(bench: Bench) -> None:
    sink = RecordingSink(refusals=1 << 30)
    keeper = bench.keeper(MemoryStore(), sink)
    for step in range(1, 7):
        sink_calls = sink.num_calls
        while save(keeper, ones(), attempt=FIRST, step=step) is None:
            sink.wait_for_calls(sink_calls + 1)
            sink_calls = sink.num_calls
    assert keeper.flush(0.05) is False
    assert keeper.status().arena_bytes <= 2 * 65536


def test_a_newer_attempt_gives_up_unacknowledged_receipts_of_the_older(bench: Bench) -> None:
    sink = RecordingSink(refusals=1 << 30)
    keeper = bench.keeper(MemoryStore(), sink)
    save(keeper, ones(), attempt=FIRST, step=4)
    sink.wait_for_calls(2)
    keeper.forget_attempts_before(2)
    assert keeper.flush(WAIT_S)
    assert sink.receipts == []


def test_an_older_attempt_is_refused_by_lease_and_by_seal(bench: Bench) -> None:
    keeper = bench.keeper(MemoryStore(), RecordingSink())
    header, num_bytes = make_header(ones(), attempt=FIRST, step=1)
    lease = lease_for(keeper, header, num_bytes)
    assert lease is not None
    assert save(keeper, ones(), attempt=SECOND, step=1) is not None
    with pytest.raises(StorageError, match="seal by rank 0 at step 1: attempt 1 is over"):
        keeper.seal(sealed(header, lease, "0" * 16))
    with pytest.raises(StorageError, match="lease by rank 0 at step 1: attempt 1 is over"):
        lease_for(keeper, header, num_bytes)


def test_staged_and_in_flight_snapshots_of_an_older_attempt_come_to_nothing(bench: Bench) -> None:
    store, sink = GatedStore(), RecordingSink()
    keeper = bench.keeper(store, sink)
    for step in (1, 2):
        save(keeper, ones(), attempt=FIRST, step=step)
    store.wait_for_puts(1)
    assert save(keeper, ones(), attempt=SECOND, step=1) is not None
    store.wait_for_puts(2)
    store.open_gate()
    assert keeper.flush(WAIT_S)
    assert store.begun == [key(1), key(1, attempt=SECOND)]
    assert [receipt.step_key.attempt for receipt in sink.receipts] == [SECOND]
    assert sink.failures == []


def test_a_refused_put_is_reported_at_once_and_the_next_save_works(bench: Bench) -> None:
    store = GatedStore(StoreRefused("put", "shards/x", "403 for good"))
    sink = RecordingSink(refusals=1)
    keeper = bench.keeper(store, sink)
    save(keeper, ones(), attempt=FIRST, step=9, rank=1)
    assert keeper.flush(WAIT_S)
    ((attempt, step, rank, reason),) = sink.failures
    assert (attempt, step, rank) == (FIRST, 9, 1)
    assert "403 for good" in reason
    assert "step 9 rank 1" in str(keeper.status().last_error)
    save(keeper, ones(), attempt=FIRST, step=10, rank=1)
    assert keeper.flush(WAIT_S)
    assert [failure[1] for failure in sink.failures] == [9, 10]


def test_a_header_changed_after_the_seal_is_reported_and_stores_nothing(bench: Bench) -> None:
    store, sink = MemoryStore(), RecordingSink()
    keeper = bench.keeper(store, sink)
    header, num_bytes = make_header(ones(), attempt=FIRST, step=5)
    lease = lease_for(keeper, header, num_bytes)
    assert lease is not None
    with map_buffer(lease.path, num_bytes) as buffer:
        digest = fill(buffer, header, ones())
        buffer[40] ^= 1
    keeper.seal(sealed(header, lease, digest))
    assert keeper.flush(WAIT_S)
    assert "does not match its digest" in sink.failures[0][3]
    assert store.list("shards/") == []


def test_a_whole_header_of_another_step_is_reported_and_stores_nothing(bench: Bench) -> None:
    store, sink = MemoryStore(), RecordingSink()
    keeper = bench.keeper(store, sink)
    header, num_bytes = make_header(ones(), attempt=FIRST, step=5)
    lease = lease_for(keeper, header, num_bytes)
    assert lease is not None
    stale, _ = make_header(ones(), attempt=FIRST, step=4)
    with map_buffer(lease.path, num_bytes) as buffer:
        digest = fill(buffer, stale, ones())
    keeper.seal(sealed(header, lease, digest))
    assert keeper.flush(WAIT_S)
    assert "written after it was sealed" in sink.failures[0][3]
    assert store.list("shards/") == []


def test_a_seal_whose_answer_got_lost_may_be_repeated(bench: Bench) -> None:
    store, sink = MemoryStore(), RecordingSink()
    keeper = bench.keeper(store, sink)
    header, num_bytes = make_header(ones(), attempt=FIRST, step=5)
    lease = lease_for(keeper, header, num_bytes)
    assert lease is not None
    with map_buffer(lease.path, num_bytes) as buffer:
        snapshot = sealed(header, lease, fill(buffer, header, ones()))
    keeper.seal(snapshot)
    assert keeper.flush(WAIT_S)
    keeper.seal(snapshot)
    assert keeper.flush(WAIT_S)
    assert len(sink.receipts) == 1


def test_a_lease_released_unsealed_is_free_for_the_next_step(bench: Bench) -> None:
    keeper = bench.keeper(MemoryStore(), RecordingSink())
    paths = set()
    for step in range(1, 6):
        header, num_bytes = make_header(ones(), attempt=FIRST, step=step)
        lease = lease_for(keeper, header, num_bytes)
        assert lease is not None
        paths.add(lease.path)
        keeper.release([lease.lease_id])
    assert len(paths) == 1


def test_releasing_a_sealed_lease_does_not_lose_the_snapshot(bench: Bench) -> None:
    store, sink = GatedStore(), RecordingSink()
    keeper = bench.keeper(store, sink)
    lease = save(keeper, ones(), attempt=FIRST, step=1)
    assert lease is not None
    keeper.release([lease.lease_id, "unknown"])
    store.open_gate()
    assert keeper.flush(WAIT_S)
    assert [receipt.step for receipt in sink.receipts] == [1]


def test_more_than_the_budget_is_refused_with_both_numbers(bench: Bench) -> None:
    keeper = bench.keeper(MemoryStore(), RecordingSink(), budget_bytes=1 << 16)
    big = {"weight": np.zeros((1 << 16,), dtype=np.float32)}
    with pytest.raises(StorageError, match=r"rank 0 step 1: a Snapshot needs \d+ bytes .* of 65536 are in use"):
        save(keeper, big, attempt=FIRST, step=1)


def test_another_run_is_refused(bench: Bench) -> None:
    keeper = bench.keeper(MemoryStore(), RecordingSink())
    with pytest.raises(StorageError, match="Keeper of run run, not of other"):
        save(keeper, ones(), attempt=FIRST, step=1, run_id="other")


def test_it_expires_when_nobody_renews_it(bench: Bench) -> None:
    clock = Clock()
    keeper = bench.keeper(MemoryStore(), RecordingSink(), clock)
    keeper.renew(10.0)
    clock.now = 9.0
    assert not keeper.is_expired
    keeper.renew(10.0)
    clock.now = 18.0
    assert not keeper.is_expired
    clock.now = 19.0
    assert keeper.is_expired


def test_it_greets_with_what_a_new_driver_must_know(bench: Bench) -> None:
    greeting = bench.keeper(MemoryStore(), RecordingSink()).greet()
    assert (greeting.protocol_version, greeting.build_digest) == (KEEPER_PROTOCOL_VERSION, "build")
    assert (greeting.run_id, greeting.node_id, greeting.pid) == ("run", "node", os.getpid())


def test_flush_gives_up_at_its_timeout_while_the_store_is_blocked(bench: Bench) -> None:
    store = GatedStore()
    keeper = bench.keeper(store, RecordingSink())
    save(keeper, ones(), attempt=FIRST, step=1)
    assert keeper.flush(0.01) is False


def test_close_ends_every_thread_and_removes_the_arena(bench: Bench, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    keeper = bench.keeper(MemoryStore(), RecordingSink(refusals=1 << 30))
    save(keeper, ones(), attempt=FIRST, step=1)
    keeper.close()
    assert [thread for thread in threading.enumerate() if thread not in before] == []
    assert not (tmp_path / "arena-0").exists()
    with pytest.raises(StorageError, match="closed"):
        save(keeper, ones(), attempt=FIRST, step=2)

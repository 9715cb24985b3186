"""The Keeper while its store is away: what is kept, what is given up, what the coordinator hears.

Real: Keepers with their threads, spool files, shared memory. The store is an in-memory twin that fails when told to.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.config import StoreConfig
from storage.errors import StoreRefused
from storage.retrying import RetryingStore
from tests.fakes.flaky_store import FlakyStore
from tests.fakes.keeper_bench import (
    FIRST,
    SECOND,
    STATE_BYTES,
    WAIT_S,
    Clock,
    KeeperBench,
    assert_proves,
    key,
    save_waiting,
    shards_on,
    state,
)
from tests.fakes.recording_sink import RecordingSink
from tests.fakes.snapshot_writer import save


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[KeeperBench]:
    bench = KeeperBench(tmp_path)
    yield bench
    bench.close()


def test_a_store_that_gives_back_another_end_is_tried_again_before_any_receipt(bench: KeeperBench) -> None:
    store, sink = FlakyStore(spoil_puts=2), RecordingSink()
    keeper = bench.keeper(store, sink)
    save(keeper, state(5), attempt=FIRST, step=4)
    assert keeper.flush(WAIT_S)
    assert store.tried == [key(4)] * 3
    assert_proves(store, sink.receipts[0], 5)
    assert keeper.status().retries == 2
    assert "index has digest" in str(keeper.status().last_error)


def test_while_the_store_is_away_the_newest_is_kept_and_older_ones_are_given_up(bench: KeeperBench) -> None:
    store, sink, clock = FlakyStore(is_away=True), RecordingSink(), Clock()
    keeper = bench.keeper(store, sink, clock=clock)
    for step in (10, 20, 30):
        save_waiting(keeper, state(step), step=step)
        store.wait_for_tries(key(step), 2)
        clock.now += 60.0
    assert keeper.flush(0.0) is False
    assert keeper.status().failing_for_s >= 120.0
    assert keeper.status().superseded == 2
    store.come_back()
    assert keeper.flush(WAIT_S)
    assert [receipt.step for receipt in sink.receipts] == [30]
    assert_proves(store, sink.receipts[0], 30)
    assert [(step, reason.split(":")[0]) for _, step, _, reason in sink.failures] == [
        (10, "superseded by step 20 while the store was away"),
        (20, "superseded by step 30 while the store was away"),
    ]
    assert keeper.status().failing_for_s == 0.0
    assert shards_on(bench.spool) == ["step-0000000030.a000001-00000001.rank-00000.shard"]


def test_a_delay_is_told_with_how_long_the_store_has_been_failing(bench: KeeperBench) -> None:
    store, sink, clock = FlakyStore(is_away=True), RecordingSink(), Clock()
    keeper = bench.keeper(store, sink, clock=clock)
    save(keeper, state(1), attempt=FIRST, step=10, rank=1)
    sink.wait_for_delays(1)
    attempt, step, rank, reason, failing_for_s = sink.delays[0]
    assert (attempt, step, rank, failing_for_s) == (FIRST, 10, 1, 0.0)
    assert "503 for the sixth time" in reason
    assert sink.failures == []


def test_an_upload_that_runs_into_its_deadline_is_told_of_while_retries_are_left(bench: KeeperBench) -> None:
    store, sink, clock = FlakyStore(is_away=True), RecordingSink(), Clock()
    answer = threading.Event()

    def pause(_: float) -> None:
        answer.wait(WAIT_S)  # the first try has failed; five more are to come
        store.come_back()

    patient = RetryingStore(store, retries=5, deadline_s=0.0, sleep=pause)
    config = bench.config.model_copy(update={"store": StoreConfig(deadline_s=1e-9)})
    keeper = bench.keeper(patient, sink, config=config, clock=clock)
    save(keeper, state(1), attempt=FIRST, step=10)
    sink.wait_for_delays(1)
    assert (store.tried, sink.delays[0][1], sink.receipts) == ([key(10)], 10, [])
    assert keeper.status().failing_for_s > 0.0
    answer.set()
    assert keeper.flush(WAIT_S)
    assert keeper.status().failing_for_s == 0.0
    assert [receipt.step for receipt in sink.receipts] == [10]


def test_a_hiccup_that_a_retry_cures_is_not_told(bench: KeeperBench) -> None:
    store, sink = FlakyStore(is_away=True), RecordingSink()
    patient = RetryingStore(store, retries=5, sleep=lambda _: store.come_back())
    keeper = bench.keeper(patient, sink)
    save(keeper, state(1), attempt=FIRST, step=10)
    assert keeper.flush(WAIT_S)
    assert (sink.delays, [receipt.retries for receipt in sink.receipts]) == ([], [1])


def test_a_refusal_is_given_up_at_once(bench: KeeperBench) -> None:
    store, sink = FlakyStore(is_away=True), RecordingSink()
    store.error = StoreRefused("put", "shards/any", "403 for good")
    keeper = bench.keeper(store, sink)
    save(keeper, state(1), attempt=FIRST, step=10)
    assert keeper.flush(WAIT_S)
    assert store.tried == [key(10)]
    assert [(step, "403 for good" in reason) for _, step, _, reason in sink.failures] == [(10, True)]
    assert shards_on(bench.spool) == []


def test_without_a_disk_the_newest_is_kept_through_an_outage_too(bench: KeeperBench) -> None:
    config = bench.config.model_copy(update={"local_disk": bench.config.local_disk.model_copy(update={"mode": "off"})})
    store, sink = FlakyStore(is_away=True), RecordingSink()
    keeper = bench.keeper(store, sink, config)
    for step in (10, 20):
        save_waiting(keeper, state(step), step=step)
        store.wait_for_tries(key(step), 2)
    assert keeper.status().memory_bytes < 2 * STATE_BYTES
    store.come_back()
    assert keeper.flush(WAIT_S)
    assert [receipt.step for receipt in sink.receipts] == [20]
    assert [failure[1] for failure in sink.failures] == [10]


def test_a_newer_attempt_ends_the_tries_of_the_older_and_removes_its_shards(bench: KeeperBench) -> None:
    store, sink = FlakyStore(is_away=True), RecordingSink()
    keeper = bench.keeper(store, sink)
    save(keeper, state(1), attempt=FIRST, step=10)
    store.wait_for_tries(key(10), 2)
    keeper.forget_attempts_before(2)
    assert keeper.flush(WAIT_S)
    store.come_back()
    save_waiting(keeper, state(2), attempt=SECOND, step=11)
    assert keeper.flush(WAIT_S)
    assert store.stored == [key(11, attempt=SECOND)]
    assert sink.failures == []
    assert shards_on(bench.spool) == ["step-0000000011.a000002-00000002.rank-00000.shard"]


def test_when_the_quota_is_full_uploaded_shards_go_and_waiting_ones_give_way_to_newer(bench: KeeperBench) -> None:
    store, sink = FlakyStore(), RecordingSink()
    keeper = bench.keeper(store, sink, bench.with_quota(3 * STATE_BYTES + (STATE_BYTES >> 1)))
    for step in (1, 2, 3):
        save_waiting(keeper, state(step), step=step)
        assert keeper.flush(WAIT_S)
    assert len(shards_on(bench.spool)) == 2  # two uploaded steps are kept to be read from
    store.go_away()
    for step in (4, 5, 6, 7, 8):
        save_waiting(keeper, state(step), step=step)
        store.wait_for_tries(key(4), 1)
        assert keeper.status().spool_bytes <= 3 * STATE_BYTES + (STATE_BYTES >> 1)
    store.wait_for_tries(key(8), 2)
    store.come_back()
    assert keeper.flush(WAIT_S)
    assert sink.receipts[-1].step == 8
    assert_proves(store, sink.receipts[-1], 8)
    assert {failure[1] for failure in sink.failures} == {4, 5, 6, 7}


def test_a_newer_snapshot_does_not_wait_for_the_next_try_of_the_older(bench: KeeperBench) -> None:
    store, sink = FlakyStore(is_away=True), RecordingSink()
    keeper = bench.keeper(store, sink, retry_s=(1000.0, 1000.0))
    save(keeper, state(1), attempt=FIRST, step=10)
    sink.wait_for_delays(1)
    store.come_back()
    save(keeper, state(2), attempt=FIRST, step=20)
    assert keeper.flush(WAIT_S)
    assert [receipt.step for receipt in sink.receipts] == [20]
    assert [failure[1] for failure in sink.failures] == [10]

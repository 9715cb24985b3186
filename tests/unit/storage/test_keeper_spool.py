"""The Keeper with a local disk: what is on it when, what a killed Keeper leaves, what happens while the store is away.

Real: Keepers with their threads, spool files, shared memory, SIGKILL of a process that is a Keeper. The store is an
in-memory twin that can be held up or fail.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from storage.buffer_map import map_buffer
from storage.errors import StorageError
from storage.local_store import LocalStore
from tests.fakes.flaky_store import FlakyStore
from tests.fakes.gated_store import GatedStore
from tests.fakes.keeper_bench import (
    FIRST,
    STATE_BYTES,
    WAIT_S,
    KeeperBench,
    assert_proves,
    key,
    save_waiting,
    shards_on,
    state,
)
from tests.fakes.recording_sink import RecordingSink
from tests.fakes.snapshot_writer import fill, lease_for, make_header, save, sealed


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[KeeperBench]:
    bench = KeeperBench(tmp_path)
    yield bench
    bench.close()


@pytest.mark.parametrize("direct_io", [True, False])
def test_a_shard_goes_through_the_disk_and_comes_out_the_same(tmp_path: Path, direct_io: bool) -> None:
    bench = KeeperBench(tmp_path, direct_io=direct_io)
    store, sink = FlakyStore(), RecordingSink()
    keeper = bench.keeper(store, sink)
    try:
        save(keeper, state(3), attempt=FIRST, step=7)
        assert keeper.flush(WAIT_S)
        assert_proves(store, sink.receipts[0], 3)
        (name,) = shards_on(bench.spool)
        assert (bench.spool / name).read_bytes() == store.get(key(7))
    finally:
        bench.close()


def test_the_buffer_is_free_once_the_shard_is_on_the_disk_though_the_store_is_held_up(bench: KeeperBench) -> None:
    store, sink = GatedStore(), RecordingSink()
    keeper = bench.keeper(store, sink)
    for step in range(1, 7):
        save_waiting(keeper, state(step), step=step)
    store.wait_for_puts(1)
    assert store.begun == [key(1)]
    assert keeper.status().arena_bytes <= 2 * (STATE_BYTES + (1 << 16))
    store.open_gate()
    assert keeper.flush(WAIT_S)
    assert [receipt.step for receipt in sink.receipts] == [1, 2, 3, 4, 5, 6]
    assert_proves(store, sink.receipts[-1], 6)


def test_values_changed_in_the_buffer_after_the_seal_path_never_reach_the_file(bench: KeeperBench) -> None:
    store, sink = GatedStore(), RecordingSink()
    keeper = bench.keeper(store, sink)
    header, num_bytes = make_header(state(1), attempt=FIRST, step=7)
    lease = lease_for(keeper, header, num_bytes)
    assert lease is not None
    with map_buffer(lease.path, num_bytes) as buffer:
        keeper.seal(sealed(header, lease, fill(buffer, header, state(1))))
        store.wait_for_puts(1)  # encoded by now, and not stored yet
        buffer[:] = b"\x02" * num_bytes
    store.open_gate()
    assert keeper.flush(WAIT_S)
    assert_proves(store, sink.receipts[0], 1)
    assert b"\x02" * 64 not in store.get(key(7))


def test_no_encoded_shard_is_ever_whole_in_memory(bench: KeeperBench) -> None:
    """Fifty saves of 4 MiB against a store that is held up: 200 MiB on the disk, and memory stays where it was."""
    num_bytes = 4 << 20
    store, sink = GatedStore(), RecordingSink()
    keeper = bench.keeper(store, sink)
    save_waiting(keeper, state(0, num_bytes), step=1)
    save_waiting(keeper, state(0, num_bytes), step=2)
    store.wait_for_puts(1)
    before = _private_bytes()
    for step in range(3, 51):
        save_waiting(keeper, state(step, num_bytes), step=step)
    grown = _private_bytes() - before
    status = keeper.status()
    assert (status.memory_bytes, status.in_flight) == (0, 1)
    assert grown < 3 * num_bytes + (32 << 20)  # two arrays of this test, and blocks of the writers
    store.open_gate()
    assert keeper.flush(WAIT_S)
    assert sink.receipts[-1].step == 50


def test_without_a_disk_at_most_one_encoded_shard_a_rank_is_in_memory(bench: KeeperBench) -> None:
    config = bench.config.model_copy(update={"local_disk": bench.config.local_disk.model_copy(update={"mode": "off"})})
    store, sink = GatedStore(), RecordingSink()
    keeper = bench.keeper(store, sink, config)
    taken = [step for step in range(1, 51) if save(keeper, state(step), attempt=FIRST, step=step)]
    store.wait_for_puts(1)
    status = keeper.status()
    assert taken == [1, 2]
    assert (status.in_flight, status.staged, status.spool_bytes) == (1, 1, 0)
    assert STATE_BYTES <= status.memory_bytes < 2 * STATE_BYTES
    store.open_gate()
    save_waiting(keeper, state(51), step=51)
    assert keeper.flush(WAIT_S)
    assert [receipt.step for receipt in sink.receipts] == [1, 2, 51]
    assert keeper.status().memory_bytes == 0


def test_on_a_full_disk_the_oldest_that_waits_gives_way_to_the_newest(bench: KeeperBench) -> None:
    store, sink = GatedStore(), RecordingSink()
    keeper = bench.keeper(store, sink, bench.with_quota(3 * STATE_BYTES + (STATE_BYTES >> 1)))
    for step in (1, 2, 3, 4):
        save_waiting(keeper, state(step), step=step)
    sink.wait_for_calls(1)
    ((_, step, _, reason),) = sink.failures
    assert step == 2  # step 1 is on its way
    assert reason.startswith("superseded by step 4: ")
    assert "bytes are needed" in reason
    store.open_gate()
    assert keeper.flush(WAIT_S)
    assert [receipt.step for receipt in sink.receipts] == [1, 3, 4]
    assert keeper.status().superseded == 1


def test_a_disk_without_room_is_said_once_and_saves_go_through_memory(
    bench: KeeperBench, caplog: pytest.LogCaptureFixture
) -> None:
    store, sink = FlakyStore(), RecordingSink()
    keeper = bench.keeper(store, sink, bench.with_quota(1 << 20))
    big = {"weight": np.full((1 << 13, 64), 9, dtype=np.float32)}
    for step in (1, 2, 3):
        save_waiting(keeper, big, step=step)
        assert keeper.flush(WAIT_S)
    assert [receipt.step for receipt in sink.receipts] == [1, 2, 3]
    assert big["weight"].tobytes() in store.get(key(3))
    said = [record for record in caplog.records if "kept in memory until it is uploaded" in record.getMessage()]
    assert len(said) == 1
    assert "bytes are needed" in said[0].getMessage()
    assert os.listdir(bench.spool) == [".lock"]


def test_a_successor_uploads_what_a_killed_keeper_had_encoded(bench: KeeperBench, tmp_path: Path) -> None:
    """SIGKILL between encode and upload; a half-written file of a third save lies there too."""
    process = _keeper_process(bench)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "encoded\n"
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait(WAIT_S)
        process.stdout.close() if process.stdout else None
    (bench.spool / ".raysume-tmp-dead").write_bytes(b"half")
    (bench.spool / "step-0000000009.a000001-00000001.rank-00000.shard").write_bytes(b"whole, but its state is missing")
    (bench.spool / "notes.txt").write_text("somebody else's")
    store, sink = LocalStore(tmp_path / "store"), RecordingSink()
    keeper = bench.keeper(store, sink)
    assert keeper.flush(WAIT_S)
    assert [receipt.step for receipt in sink.receipts] == [5, 6]
    assert_proves(store, sink.receipts[0], 5)
    assert_proves(store, sink.receipts[1], 6)
    assert [name for name in os.listdir(bench.spool) if "tmp" in name or "0009" in name] == []
    assert (bench.spool / "notes.txt").read_text() == "somebody else's"


def _keeper_process(bench: KeeperBench) -> subprocess.Popen[str]:
    """A process whose Keeper has two Shards on the disk and a store that never answers; says so, then waits."""
    program = (
        "import sys, threading; from pathlib import Path; from tests.fakes.keeper_bench import *\n"
        "from tests.fakes.recording_sink import RecordingSink\n"
        "store = GatedStore(); keeper = KeeperBench(Path(sys.argv[1])).keeper(store, RecordingSink())\n"
        "save_waiting(keeper, state(5), step=5); save_waiting(keeper, state(6), step=6)\n"
        "wait_for_states(keeper, KeeperBench(Path(sys.argv[1])).spool, 2)\n"
        "print('encoded', flush=True); threading.Event().wait(60)\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program, str(bench.directory / ".")],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_a_receipt_that_was_never_acknowledged_is_delivered_by_the_successor(bench: KeeperBench) -> None:
    store, sink = FlakyStore(), RecordingSink(refusals=1 << 30)
    first = bench.keeper(store, sink)
    save(first, state(1), attempt=FIRST, step=10)
    sink.wait_for_calls(2)
    first.close(keep_unsent=True)
    heard = RecordingSink()
    second = bench.keeper(store, heard)
    assert second.flush(WAIT_S)
    assert [receipt.step for receipt in heard.receipts] == [10]
    assert store.tried == [key(10)]


def test_shards_of_an_older_attempt_are_dropped_by_the_successor(bench: KeeperBench) -> None:
    away = FlakyStore(is_away=True)
    first = bench.keeper(away, RecordingSink())
    save(first, state(1), attempt=FIRST, step=10)
    save(first, state(2), attempt=FIRST, step=10, rank=1)
    away.wait_for_tries(key(10), 1)
    away.wait_for_tries(key(10, rank=1), 1)
    first.close(keep_unsent=True)
    assert len(shards_on(bench.spool)) == 2
    store, sink = GatedStore(), RecordingSink()
    second = bench.keeper(store, sink)
    second.forget_attempts_before(2)
    store.open_gate()
    assert second.flush(WAIT_S)
    assert sink.receipts == []
    assert shards_on(bench.spool) == []


def test_closing_for_good_removes_the_spool_and_keeping_the_unsent_does_not(bench: KeeperBench) -> None:
    store = FlakyStore(is_away=True)
    first = bench.keeper(store, RecordingSink())
    save(first, state(1), attempt=FIRST, step=10)
    store.wait_for_tries(key(10), 1)
    first.close(keep_unsent=True)
    assert len(shards_on(bench.spool)) == 1
    second = bench.keeper(store, RecordingSink())
    second.close()
    assert not bench.spool.parent.exists()


def test_a_keeper_without_unsent_shards_leaves_no_spool_behind(bench: KeeperBench) -> None:
    sink = RecordingSink()
    keeper = bench.keeper(FlakyStore(), sink)
    save(keeper, state(1), attempt=FIRST, step=10)
    assert keeper.flush(WAIT_S)
    keeper.close(keep_unsent=True)
    assert not bench.spool.parent.exists()


def test_a_second_keeper_of_one_node_is_refused_and_leaves_no_arena(bench: KeeperBench) -> None:
    bench.keeper(FlakyStore(), RecordingSink())
    with pytest.raises(StorageError, match=r"local-disk Tier cannot be used: spool .* in use by a living Keeper"):
        bench.keeper(FlakyStore(), RecordingSink())
    assert not (bench.directory / "arena-1").exists()


def test_a_header_changed_after_the_seal_is_reported_and_leaves_no_file(bench: KeeperBench) -> None:
    store, sink = FlakyStore(), RecordingSink()
    keeper = bench.keeper(store, sink)
    header, num_bytes = make_header(state(1), attempt=FIRST, step=5)
    lease = lease_for(keeper, header, num_bytes)
    assert lease is not None
    with map_buffer(lease.path, num_bytes) as buffer:
        digest = fill(buffer, header, state(1))
        buffer[40] ^= 1
    keeper.seal(sealed(header, lease, digest))
    assert keeper.flush(WAIT_S)
    assert "does not match its digest" in sink.failures[0][3]
    assert os.listdir(bench.spool) == [".lock"]


def _private_bytes() -> int:
    """Anonymous memory of this process: neither mapped files nor shared memory count."""
    match = re.search(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) << 10

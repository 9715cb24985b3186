"""A Keeper whose Shards go up while they are encoded: crash, fence, outage in the middle, with and without a disk.

Real: Keepers with their threads, shared memory and spool files, SIGKILL of a process that runs one, Swift over HTTP
with a proxy between. A gate in the sink stops the encoding after so many bytes, so that "in the middle" is no luck.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

import storage.direct_io
import storage.s3_multipart
import storage.shipping
from storage.config import CheckpointConfig, StoreConfig
from storage.retrying import RetryingStore
from storage.s3_store import S3Store
from tests.fakes.keeper_bench import FIRST, SECOND, WAIT_S, KeeperBench, key, shards_on
from tests.fakes.recording_sink import RecordingSink
from tests.fakes.snapshot_writer import Arrays, save
from tests.integration.test_streamed_put import Fails, Seen, uploads
from tests.s3_stores import PART, new_bucket
from tests.servers import DelayProxy, QuirkProxy
from tests.servers.quirk_proxy import Answer, Forward, Request, error_answer

STATE_BYTES = 4 * PART + (1 << 20)


class Gate:
    """Shuts a Keeper's encoding after ``num_bytes`` until `open`."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes, self._written = num_bytes, 0
        self._is_open = threading.Event()
        self.is_reached = threading.Event()

    def pass_on(self, data: bytes | memoryview) -> None:
        self._written += memoryview(data).nbytes
        if self._written >= self._num_bytes and not self._is_open.is_set():
            self.is_reached.set()
            assert self._is_open.wait(WAIT_S)

    def open(self) -> None:
        self._is_open.set()


def shut_after(patch: pytest.MonkeyPatch, num_bytes: int) -> Gate:
    gate, real = Gate(num_bytes), storage.shipping.StreamedSink.write

    def write(self: Any, data: bytes | memoryview, /) -> None:
        real(self, data)
        gate.pass_on(data)

    patch.setattr(storage.shipping.StreamedSink, "write", write)
    return gate


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.s3_multipart, "_SMALLEST_PART", PART)


@pytest.fixture
def proxy(swift_server: Any, s3_env: str) -> Iterator[QuirkProxy]:
    del s3_env
    proxy = QuirkProxy(swift_server.port).start()
    try:
        yield proxy
    finally:
        proxy.stop()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[KeeperBench]:
    bench = KeeperBench(tmp_path)
    yield bench
    bench.close()


@pytest.fixture
def bucket(swift_client: Any) -> str:
    return new_bucket(swift_client)


def store_at(endpoint: str, bucket: str, retries: int = 0) -> RetryingStore:
    config = StoreConfig(endpoint_url=endpoint, retries=0, min_bytes_per_s=1e8, deadline_s=20.0)
    inner = S3Store(f"s3://{bucket}/run", config, multipart_bytes=PART)
    return RetryingStore(inner, retries=retries, deadline_s=20.0, sleep=lambda _: None, keeps_parts=True)


def arrays_of(seed: int) -> Arrays:
    return {"weight": np.random.default_rng(seed).random((STATE_BYTES // 256, 64), dtype=np.float32)}


def config_of(bench: KeeperBench, disk: bool) -> CheckpointConfig:
    return bench.config if disk else CheckpointConfig(encoding="raw", local_disk={"mode": "off"})  # type: ignore[arg-type]


def assert_stored(store: RetryingStore, sink: RecordingSink, seed: int, step: int = 1) -> None:
    """One Receipt, and the object it proves holds exactly what was saved."""
    assert [receipt.step for receipt in sink.receipts] == [step]
    record = sink.receipts[0].shard
    stored = store.get(record.key)
    assert (record.key, record.size, record.digest) == (key(step), len(stored), xxhash.xxh3_128_hexdigest(stored))
    assert arrays_of(seed)["weight"].tobytes() in stored


@pytest.mark.parametrize("disk", [True, False])
def test_parts_are_in_the_store_before_the_shard_is_encoded(
    bench: KeeperBench, proxy: QuirkProxy, bucket: str, monkeypatch: pytest.MonkeyPatch, disk: bool
) -> None:
    gate, sink, proxy.rule = shut_after(monkeypatch, 3 * PART), RecordingSink(), (parts := Seen("put-part"))
    store = store_at(proxy.endpoint, bucket)
    keeper = bench.keeper(store, sink, config_of(bench, disk))
    save(keeper, arrays_of(7), attempt=FIRST, step=1)
    parts.wait(2)
    assert store.list("") == []
    assert sink.receipts == []
    gate.open()
    assert keeper.flush(WAIT_S)
    sent = proxy.uploaded_bytes()
    assert_stored(store, sink, 7)
    assert sent == sink.receipts[0].shard.size, "each byte went up once"
    assert "list-multipart" not in proxy.operations()


@pytest.mark.parametrize("disk", [True, False])
def test_a_fence_in_the_middle_leaves_no_upload_and_no_object(
    bench: KeeperBench,
    proxy: QuirkProxy,
    bucket: str,
    swift_client: Any,
    monkeypatch: pytest.MonkeyPatch,
    disk: bool,
) -> None:
    gate, sink = shut_after(monkeypatch, 2 * PART + 4096), RecordingSink()
    proxy.rule = aborts = Seen("abort", parts := Seen("put-part"))
    store = store_at(proxy.endpoint, bucket)
    keeper = bench.keeper(store, sink, config_of(bench, disk))
    save(keeper, arrays_of(7), attempt=FIRST, step=1)
    parts.wait(2)
    keeper.forget_attempts_before(SECOND.number)
    gate.open()
    aborts.wait()
    assert keeper.flush(WAIT_S)
    assert (store.list(""), uploads(swift_client, bucket), sink.receipts) == ([], [], [])
    assert proxy.uploaded_bytes() == 2 * PART, "nothing is sent after the fence"
    if disk:
        assert shards_on(bench.spool) == []


def test_a_shard_behind_another_of_its_rank_does_not_take_the_line_from_it(
    bench: KeeperBench, swift_server: Any, s3_env: str, bucket: str
) -> None:
    del s3_env
    link = DelayProxy(swift_server.port, pattern="partNumber").start()
    try:
        sink, store = RecordingSink(), store_at(link.endpoint, bucket)
        keeper = bench.keeper(store, sink)
        link.hold()
        save(keeper, arrays_of(1), attempt=FIRST, step=1)
        link.wait_held(WAIT_S)
        save(keeper, arrays_of(2), attempt=FIRST, step=2)
        wait_for(lambda: len(list(bench.spool.glob("*.shard.json"))) == 2)
        assert len(uploads_at(store)) == 1
        link.release()
        assert keeper.flush(2 * WAIT_S)
        assert [receipt.step for receipt in sink.receipts] == [1, 2]
    finally:
        link.release()
        link.stop()


@pytest.mark.parametrize("disk", [True, False])
def test_an_outage_in_the_middle_is_tried_again_until_it_is_over_and_loses_nothing(
    bench: KeeperBench, proxy: QuirkProxy, bucket: str, monkeypatch: pytest.MonkeyPatch, disk: bool
) -> None:
    gate, sink, is_away = shut_after(monkeypatch, 2 * PART + 4096), RecordingSink(), threading.Event()

    def rule(request: Request, forward: Forward) -> Answer:
        return error_answer(503, "SlowDown") if is_away.is_set() else forward(request)

    proxy.rule = parts = Seen("put-part", rule)
    store = store_at(proxy.endpoint, bucket)
    keeper = bench.keeper(store, sink, config_of(bench, disk))
    save(keeper, arrays_of(7), attempt=FIRST, step=1)
    parts.wait(2)
    is_away.set()
    gate.open()
    sink.wait_for_delays(1, WAIT_S)
    is_away.clear()
    assert keeper.flush(WAIT_S)
    assert_stored(store, sink, 7)
    assert keeper.status().retries >= 1


def test_a_part_that_fails_in_the_middle_delays_nothing(
    bench: KeeperBench, proxy: QuirkProxy, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, sink = shut_after(monkeypatch, 2 * PART + 4096), RecordingSink()
    proxy.rule = parts = Seen("put-part", Fails(2, lambda _: error_answer(500, "InternalError")))
    store = store_at(proxy.endpoint, bucket)
    keeper = bench.keeper(store, sink)
    save(keeper, arrays_of(7), attempt=FIRST, step=1)
    parts.wait(2)
    gate.open()
    assert keeper.flush(WAIT_S)
    assert_stored(store, sink, 7)
    assert (keeper.status().retries, sink.delays) == (0, [])


def test_a_disk_that_fails_after_the_last_byte_leaves_one_upload_of_the_same_shard(
    bench: KeeperBench, proxy: QuirkProxy, bucket: str, swift_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its encoding is done again, in memory, while what went ahead of the first one is dropped."""

    def fail(_: Any) -> None:
        raise OSError(5, "injected")

    monkeypatch.setattr(storage.direct_io.FileWriter, "finish", fail)
    sink, proxy.rule = RecordingSink(), (aborts := Seen("abort"))
    store = store_at(proxy.endpoint, bucket)
    keeper = bench.keeper(store, sink)
    save(keeper, arrays_of(7), attempt=FIRST, step=1)
    assert keeper.flush(WAIT_S)
    assert_stored(store, sink, 7)
    aborts.wait()
    assert uploads(swift_client, bucket) == []


_KEEPER = """
import sys, threading
from pathlib import Path
import storage.s3_multipart as parts
from tests.fakes.keeper_bench import FIRST, KeeperBench
from tests.fakes.recording_sink import RecordingSink
from tests.fakes.snapshot_writer import save
from tests.integration import test_streamed_keeper as here
import pytest
parts._SMALLEST_PART = here.PART
endpoint, bucket, directory, gate_bytes = sys.argv[1:]
if int(gate_bytes):
    here.WAIT_S = 600.0
    here.shut_after(pytest.MonkeyPatch(), int(gate_bytes))
keeper = KeeperBench(Path(directory)).keeper(here.store_at(endpoint, bucket), RecordingSink())
save(keeper, here.arrays_of(7), attempt=FIRST, step=1)
threading.Event().wait(600.0)
"""


def start_keeper(endpoint: str, bucket: str, directory: Path, gate_bytes: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", _KEEPER, endpoint, bucket, str(directory), str(gate_bytes)]
    return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": os.getcwd()})


def kill(process: subprocess.Popen[bytes]) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.wait(30)


def wait_for(is_true: Any, limit_s: float = 60.0) -> None:
    """Asks again until it is; for what another process does."""
    until = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < until, "it never became true"
        threading.Event().wait(0.02)


def uploads_at(store: RetryingStore) -> list[str]:
    inner = store.inner
    assert isinstance(inner, S3Store)
    return list(inner.unfinished_uploads(""))


def test_killed_while_it_encodes_the_half_is_dropped_and_its_upload_swept(
    bench: KeeperBench, proxy: QuirkProxy, bucket: str, swift_client: Any, tmp_path: Path
) -> None:
    proxy.rule = parts = Seen("put-part")
    process = start_keeper(proxy.endpoint, bucket, tmp_path, 2 * PART + 4096)
    try:
        parts.wait(2)
    finally:
        kill(process)
    assert len(uploads(swift_client, bucket)) == 1
    assert list(bench.spool.glob(".raysume-tmp-*"))
    sink, store = RecordingSink(), store_at(proxy.endpoint, bucket)
    keeper = bench.keeper(store, sink)
    assert keeper.flush(WAIT_S)
    assert (sink.receipts, store.list(""), list(bench.spool.glob(".raysume-tmp-*"))) == ([], [], [])
    assert store.abort_uploads("", older_than_s=0.0) == 1
    assert uploads(swift_client, bucket) == []


def test_killed_once_the_shard_is_on_the_disk_the_next_keeper_sends_only_what_is_missing(
    bench: KeeperBench, swift_server: Any, proxy: QuirkProxy, bucket: str, swift_client: Any, tmp_path: Path
) -> None:
    link = DelayProxy(swift_server.port, pattern="partNumber=3").start()
    link.hold()
    process = start_keeper(link.endpoint, bucket, tmp_path, 0)
    try:
        link.wait_held(60.0)

        def stored() -> list[int]:
            found = swift_client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])
            if not found:
                return []
            page = swift_client.list_parts(Bucket=bucket, Key=found[0]["Key"], UploadId=found[0]["UploadId"])
            return [part["PartNumber"] for part in page.get("Parts", [])]

        wait_for(lambda: list(bench.spool.glob("*.shard.json")) and {1, 2} <= {*stored()})
    finally:
        kill(process)
        link.stop()
    sink, store = RecordingSink(), store_at(proxy.endpoint, bucket)
    keeper = bench.keeper(store, sink)
    assert keeper.flush(2 * WAIT_S)
    assert_stored(store, sink, 7)
    assert proxy.uploaded_bytes() <= sink.receipts[0].shard.size - 2 * PART
    assert uploads(swift_client, bucket) == []

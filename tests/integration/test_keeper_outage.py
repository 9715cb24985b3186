"""The Keeper as a Ray actor while its object store is away: nothing stalls, and a killed one loses nothing encoded.

Real: a local Ray of one node, actor processes, SIGKILL, shared memory, the local disk, an S3 server (moto) that is down
and comes back. Stands in: the coordinator is a named actor that only records.
"""

from __future__ import annotations

import os
import shutil
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import psutil  # type: ignore[import-untyped, unused-ignore]  # no stubs among the dependencies
import pytest
import ray
import xxhash

from storage.arena import arena_directory
from storage.config import CheckpointConfig, LocalDiskConfig, StoreConfig
from storage.keeper_actor import NAMESPACE, KeeperClient, ensure_keeper
from storage.keeper_protocol import KeeperStatus
from storage.keys import Attempt
from storage.manifest import Receipt
from storage.open_store import open_store
from storage.spool_files import spool_directory
from tests.clusters import one_node
from tests.fakes.snapshot_writer import save
from tests.servers import MotoServer

FIRST = Attempt(number=1, nonce="00000001")
ARRAYS = {"weight": np.arange(4096, dtype=np.float32).reshape(64, 64)}
LIMIT_S = 60.0


class Recorder:
    def __init__(self) -> None:
        self._receipts: list[Receipt] = []
        self._delays: list[tuple[int, float]] = []

    def deliver_many(self, receipts: tuple[Receipt, ...]) -> tuple[bool, ...]:
        self._receipts += receipts
        return (True,) * len(receipts)

    def report_delayed(self, attempt: Attempt, step: int, rank: int, reason: str, failing_for_s: float) -> bool:
        assert (attempt, rank) == (FIRST, 0), reason
        self._delays.append((step, failing_for_s))
        return True

    def report_failed(self, attempt: Attempt, step: int, rank: int, reason: str) -> bool:
        raise AssertionError(f"nothing is given up here: {attempt} {step} {rank} {reason}")

    def receipts(self) -> list[Receipt]:
        return self._receipts

    def delays(self) -> list[tuple[int, float]]:
        return self._delays


@pytest.fixture(scope="module")
def node_id() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        patch.setenv("AWS_ACCESS_KEY_ID", MotoServer.access_key)
        patch.setenv("AWS_SECRET_ACCESS_KEY", MotoServer.secret_key)
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        with one_node(patch) as node_id:
            yield node_id


class Place:
    """One Run on the node whose store is down until `come_back`."""

    def __init__(self, node_id: str, directory: Path) -> None:
        self.node_id, self.run_id = node_id, f"test-{uuid.uuid4().hex[:8]}"
        self.server = MotoServer(directory).start()
        self.server.stop()
        self.bucket = f"bucket-{self.run_id}"
        self.config = CheckpointConfig(
            local_disk=LocalDiskConfig(directory=str(directory / "disk"), keep_free_bytes=0),
            store=StoreConfig(endpoint_url=self.server.endpoint, retries=0, deadline_s=5.0),
        )
        self.spool = spool_directory(self.config.local_disk, self.run_id, node_id)
        self.pids: set[int] = set()
        self._recorder: Any = None

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/run"

    def keeper(self) -> Any:
        handle = ensure_keeper(
            node_id=self.node_id,
            run_id=self.run_id,
            root_url=self.url,
            config=self.config,
            build_digest="one",
            coordinator_name=f"coordinator-{self.run_id}",
            ttl_s=600.0,
        )
        self.pids.add(self.pid(handle))
        return handle

    def recorder(self) -> Any:
        # Detached: the end of a handle from an earlier Ray of this process must not end an actor of the same id here.
        options = {"name": f"coordinator-{self.run_id}", "namespace": NAMESPACE, "lifetime": "detached"}
        self._recorder = ray.remote(Recorder).options(**options).remote()
        return self._recorder

    def save(self, handle: Any, step: int) -> None:
        assert save(KeeperClient(handle), ARRAYS, attempt=FIRST, step=step, run_id=self.run_id) is not None

    def come_back(self) -> None:
        self.server.start()
        client = boto3.client("s3", endpoint_url=self.server.endpoint)
        client.create_bucket(Bucket=self.bucket)

    @staticmethod
    def pid(handle: Any) -> int:
        return int(ray.get(handle.greet.remote(), timeout=LIMIT_S).pid)

    def close(self) -> None:
        for pid in self.pids:
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGKILL)
        if self._recorder is not None:
            ray.kill(self._recorder)
        self.server.stop()
        shutil.rmtree(arena_directory(self.run_id, self.node_id), ignore_errors=True)


@pytest.fixture
def place(node_id: str, tmp_path: Path) -> Iterator[Place]:
    place = Place(node_id, tmp_path)
    yield place
    place.close()


def status_when(handle: Any, is_so: Any) -> KeeperStatus:
    """The Keeper's status once ``is_so`` holds of it; each look waits a moment inside the Keeper."""
    for _ in range(200):
        ray.get(handle.flush.remote(0.1), timeout=LIMIT_S)
        status: KeeperStatus = ray.get(handle.status.remote(), timeout=LIMIT_S)
        if is_so(status):
            return status
    raise AssertionError(f"never so: {status}")


def test_a_killed_keeper_loses_nothing_that_was_encoded(place: Place) -> None:
    recorder = place.recorder()
    handle = place.keeper()
    place.save(handle, step=5)
    status = status_when(handle, lambda status: status.spool_bytes and status.retries)
    assert status.failing_for_s > 0
    pid = place.pid(handle)
    os.kill(pid, signal.SIGKILL)
    psutil.Process(pid).wait(LIMIT_S)
    assert len(list(place.spool.glob("*.shard"))) == 1
    assert {step for step, _ in ray.get(recorder.delays.remote(), timeout=LIMIT_S)} == {5}
    place.come_back()
    successor = place.keeper()
    assert place.pid(successor) != pid
    assert ray.get(successor.flush.remote(LIMIT_S), timeout=LIMIT_S + 10)
    (receipt,) = ray.get(recorder.receipts.remote(), timeout=LIMIT_S)
    content = open_store(place.url, place.config.store).get(receipt.shard.key)
    assert (receipt.step, receipt.shard.size) == (5, len(content))
    assert receipt.shard.digest == xxhash.xxh3_128_hexdigest(content)


def test_the_newest_snapshot_becomes_durable_when_the_store_comes_back(place: Place) -> None:
    recorder = place.recorder()
    handle = place.keeper()
    place.save(handle, step=5)
    status_when(handle, lambda status: status.retries)
    place.come_back()
    assert ray.get(handle.flush.remote(LIMIT_S), timeout=LIMIT_S + 10)
    assert [receipt.step for receipt in ray.get(recorder.receipts.remote(), timeout=LIMIT_S)] == [5]
    status = status_when(handle, lambda status: status.unacknowledged == 0)
    assert (status.failing_for_s, status.in_flight) == (0.0, 0)


def test_calls_that_wait_long_keep_no_save_from_its_turn(place: Place) -> None:
    place.recorder()
    handle = place.keeper()
    place.save(handle, step=1)
    waiting = [handle.flush.remote(LIMIT_S) for _ in range(40)]
    place.save(handle, step=2)
    client = KeeperClient(handle, timeout_s=LIMIT_S)
    assert client.status().staged + client.status().in_flight >= 1
    ready, _ = ray.wait(waiting, num_returns=1, timeout=0)
    assert ready == []


def test_closing_for_good_removes_the_run_from_the_disk(place: Place) -> None:
    place.recorder()
    handle = place.keeper()
    place.save(handle, step=5)
    status_when(handle, lambda status: status.spool_bytes)
    assert place.spool.exists()
    ray.get(handle.close.remote(), timeout=LIMIT_S)
    assert not place.spool.parent.exists()
    assert not arena_directory(place.run_id, place.node_id).exists()

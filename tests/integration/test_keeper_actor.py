"""The Keeper as a detached Ray actor: found again, replaced, reached from workers, and gone when nobody renews it.

Real: a local Ray of one node, actor processes, SIGKILL, shared memory under /dev/shm, a store in a local directory.
Stands in: the coordinator is a named actor that only records.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped, unused-ignore]  # no stubs among the dependencies
import pytest
import ray

from storage.arena import arena_directory
from storage.config import CheckpointConfig
from storage.errors import StorageError
from storage.keeper_actor import NAMESPACE, KeeperClient, ensure_keeper
from storage.keeper_protocol import BufferLease
from storage.keys import Attempt, StepKey, shard_key
from storage.manifest import Receipt
from storage.open_store import open_store
from storage.transport_client import ReplicaClient
from tests.clusters import one_node
from tests.fakes.memory_bench import KEY, keep, manifest_of, read_arrays
from tests.fakes.snapshot_writer import lease_for, make_header, save

FIRST = Attempt(number=1, nonce="00000001")
SECOND = Attempt(number=2, nonce="00000002")
ARRAYS = {"weight": np.arange(4096, dtype=np.float32).reshape(64, 64)}
LIMIT_S = 60.0


class CoordinatorStandIn:
    def __init__(self) -> None:
        self._receipts: list[Receipt] = []

    def deliver(self, receipt: Receipt) -> bool:
        self._receipts.append(receipt)
        return True

    def deliver_many(self, receipts: tuple[Receipt, ...]) -> tuple[bool, ...]:
        return tuple(self.deliver(receipt) for receipt in receipts)

    def report_delayed(self, attempt: Attempt, step: int, rank: int, reason: str, failing_for_s: float) -> bool:
        raise AssertionError(f"nothing is late here: {attempt} {step} {rank} {reason} {failing_for_s}")

    def report_failed(self, attempt: Attempt, step: int, rank: int, reason: str) -> bool:
        raise AssertionError(f"nothing fails here: {attempt} {step} {rank} {reason}")

    def receipts(self) -> list[Receipt]:
        return self._receipts


class Worker:
    """A worker process that leases a buffer and never seals it."""

    def lease(self, handle: Any, run_id: str, step: int) -> tuple[BufferLease | None, int]:
        header, num_bytes = make_header(ARRAYS, run_id=run_id, attempt=FIRST, step=step)
        return lease_for(KeeperClient(handle), header, num_bytes), os.getpid()


@pytest.fixture(scope="module")
def node_id() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch, one_node(patch) as node_id:
        yield node_id


class Site:
    """One Run on the node: makes its Keeper, and leaves nothing of it behind."""

    def __init__(self, node_id: str, root: Path) -> None:
        self.node_id = node_id
        self.run_id = f"test-{uuid.uuid4().hex[:8]}"
        self.root_url = str(root / "store")
        self.coordinator_name = f"coordinator-{self.run_id}"
        self.directory = arena_directory(self.run_id, node_id)
        self.pids: set[int] = set()
        self._coordinator: Any = None

    def keeper(self, build_digest: str = "one", ttl_s: float = 600.0, transport_key: bytes | None = None) -> Any:
        handle = ensure_keeper(
            node_id=self.node_id,
            run_id=self.run_id,
            root_url=self.root_url,
            config=CheckpointConfig(),
            build_digest=build_digest,
            coordinator_name=self.coordinator_name,
            ttl_s=ttl_s,
            transport_key=transport_key,
        )
        self.pids.add(self.pid(handle))
        return handle

    def coordinator(self) -> Any:
        # Detached: the end of a handle from an earlier Ray of this process must not end an actor of the same id here.
        options = {"name": self.coordinator_name, "namespace": NAMESPACE, "lifetime": "detached"}
        self._coordinator = ray.remote(CoordinatorStandIn).options(**options).remote()
        return self._coordinator

    def save(self, handle: Any, step: int, attempt: Attempt = FIRST) -> BufferLease | None:
        return save(KeeperClient(handle), ARRAYS, attempt=attempt, step=step, run_id=self.run_id)

    @staticmethod
    def pid(handle: Any) -> int:
        return int(ray.get(handle.greet.remote(), timeout=LIMIT_S).pid)

    def close(self) -> None:
        for pid in self.pids:
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGKILL)
        if self._coordinator is not None:
            ray.kill(self._coordinator)
        for file in self.directory.glob("*"):
            file.unlink()
        if self.directory.exists():
            self.directory.rmdir()


@pytest.fixture
def site(node_id: str, tmp_path: Path) -> Iterator[Site]:
    site = Site(node_id, tmp_path)
    yield site
    site.close()


def wait_for_end(pid: int) -> None:
    if psutil.pid_exists(pid):
        psutil.Process(pid).wait(timeout=LIMIT_S)


def flushed(handle: Any) -> bool:
    return bool(ray.get(handle.flush.remote(LIMIT_S), timeout=LIMIT_S + 10))


def test_a_receipt_reaches_a_coordinator_that_starts_only_after_the_save(site: Site) -> None:
    handle = site.keeper()
    assert site.save(handle, step=3) is not None
    assert ray.get(handle.flush.remote(0.5), timeout=LIMIT_S) is False
    coordinator = site.coordinator()
    assert flushed(handle)
    (receipt,) = ray.get(coordinator.receipts.remote(), timeout=LIMIT_S)
    assert (receipt.run_id, receipt.step, receipt.rank_state) == (site.run_id, 3, {"rank": 0})
    stored = open_store(site.root_url).get(shard_key(StepKey(step=3, attempt=FIRST), 0))
    assert len(stored) == receipt.shard.size


def test_refusals_arrive_as_errors_of_the_storage_package(site: Site) -> None:
    handle = site.keeper()
    ray.get(handle.renew.remote(60.0, 2), timeout=LIMIT_S)
    with pytest.raises(StorageError, match="attempt 1 is over, attempt 2 has begun") as raised:
        site.save(handle, step=1)
    assert type(raised.value) is StorageError


def test_a_dead_keeper_is_a_storage_error_for_its_workers(site: Site) -> None:
    handle = site.keeper()
    os.kill(site.pid(handle), signal.SIGKILL)
    with pytest.raises(StorageError, match="no answer to lease_buffer"):
        site.save(handle, step=1)


def test_a_call_left_open_tells_of_a_new_driver_and_of_the_death_of_the_keeper(site: Site) -> None:
    handle = site.keeper()
    open_call = handle.outlast.remote()
    handle = site.keeper()  # another driver finds it
    assert ray.get(open_call, timeout=LIMIT_S) is None
    open_call = handle.outlast.remote()
    os.kill(site.pid(handle), signal.SIGKILL)
    with pytest.raises(ray.exceptions.ActorDiedError):
        ray.get(open_call, timeout=LIMIT_S)


def test_the_buffer_of_a_killed_worker_is_leased_again(site: Site) -> None:
    handle = site.keeper()
    worker: Any = ray.remote(Worker).options(num_cpus=0, max_restarts=0, lifetime="detached", name=site.run_id).remote()
    held, pid = ray.get(worker.lease.remote(handle, site.run_id, 1), timeout=LIMIT_S)
    header, num_bytes = make_header(ARRAYS, run_id=site.run_id, attempt=FIRST, step=1, rank=1)
    while_alive = lease_for(KeeperClient(handle), header, num_bytes)
    os.kill(pid, signal.SIGKILL)
    wait_for_end(pid)
    header, num_bytes = make_header(ARRAYS, run_id=site.run_id, attempt=FIRST, step=2, rank=1)
    after = lease_for(KeeperClient(handle), header, num_bytes)
    assert while_alive is not None
    assert after is not None
    assert while_alive.path != held.path
    assert after.path == held.path


def test_a_keeper_survives_the_driver_that_made_it_and_serves_the_next(site: Site) -> None:
    program = (
        "import sys, ray; from pathlib import Path; from tests.integration.test_keeper_actor import *\n"
        "ray.init(address=sys.argv[1], log_to_driver=False)\n"
        "site = Site(sys.argv[2], Path(sys.argv[3])); site.run_id, site.coordinator_name = sys.argv[4:6]\n"
        "print('pid', site.pid(site.keeper()))\n"
    )
    address = ray.get_runtime_context().gcs_address
    arguments = [address, site.node_id, str(Path(site.root_url).parent), site.run_id, site.coordinator_name]
    driver = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=2 * LIMIT_S, check=False
    )
    assert driver.returncode == 0, driver.stderr
    first_pid = int(driver.stdout.rpartition("pid ")[2])
    site.pids.add(first_pid)
    handle = site.keeper()
    assert site.pid(handle) == first_pid
    coordinator = site.coordinator()
    assert site.save(handle, step=5, attempt=SECOND) is not None
    assert flushed(handle)
    assert [receipt.step for receipt in ray.get(coordinator.receipts.remote(), timeout=LIMIT_S)] == [5]


def test_a_keeper_of_another_build_is_flushed_and_replaced(site: Site) -> None:
    coordinator = site.coordinator()
    old = site.keeper("one")
    old_pid = site.pid(old)
    assert site.save(old, step=6) is not None
    new = site.keeper("two")
    assert site.pid(new) != old_pid
    wait_for_end(old_pid)
    assert [receipt.step for receipt in ray.get(coordinator.receipts.remote(), timeout=LIMIT_S)] == [6]
    assert site.save(new, step=7) is not None
    assert flushed(new)


def test_what_a_killed_keeper_left_is_cleared_by_the_next(site: Site) -> None:
    old = site.keeper()
    lease = site.save(old, step=1)
    assert lease is not None
    old_pid = site.pid(old)
    os.kill(old_pid, signal.SIGKILL)
    wait_for_end(old_pid)
    assert site.directory.exists()
    assert site.pid(site.keeper()) != old_pid
    assert not Path(lease.path).exists()


def test_a_keeper_that_nobody_renews_ends_and_removes_its_directory(site: Site) -> None:
    handle = site.keeper(ttl_s=2.0)
    pid = site.pid(handle)
    assert site.directory.exists()
    wait_for_end(pid)
    assert not site.directory.exists()


def test_snapshots_in_memory_serve_the_next_driver_with_its_key(site: Site) -> None:
    handle = site.keeper(transport_key=bytes(32))
    keeper = KeeperClient(handle)
    waits = [handle.wait_replicated.remote(FIRST, rank, 4, LIMIT_S) for rank in range(20)]
    for rank in range(20):
        keep(keeper, ARRAYS, step=4, rank=rank, world_size=20, run_id=site.run_id)
    assert {progress.replicated_step for progress in ray.get(waits, timeout=LIMIT_S)} == {4}
    assert keeper.wait_replicated(FIRST, 0, 4, LIMIT_S).sealed_step == 4
    assert site.pid(site.keeper(transport_key=KEY)) == site.pid(handle)
    report = ray.get(handle.memory_report.remote(), timeout=LIMIT_S)
    receipts = ray.get(handle.generation_receipts.remote(FIRST, 4), timeout=LIMIT_S)
    assert sorted(facts.rank for facts in report.generations) == list(range(20))
    assert manifest_of(*receipts).tensors["weight"].shape == (1280, 64)
    assert report.address == ray.get(handle.greet.remote(), timeout=LIMIT_S).address
    (facts,) = [facts for facts in report.generations if facts.rank == 7]
    with pytest.raises(StorageError, match="key"):
        ReplicaClient(report.address, bytes(32), site.run_id, deadline_s=LIMIT_S).fetch(FIRST, 4, 7, 0, 1)
    client = ReplicaClient(report.address, KEY, site.run_id, deadline_s=LIMIT_S)
    content = bytes(client.fetch(FIRST, 4, 7, 0, facts.num_bytes))
    client.close()
    (receipt,) = [receipt for receipt in receipts if receipt.shard.rank == 7]
    np.testing.assert_array_equal(read_arrays(content, receipt)["weight"], ARRAYS["weight"])
    assert ray.get(handle.renew.remote(600.0), timeout=LIMIT_S).generation_bytes > 20 * ARRAYS["weight"].nbytes


def test_its_threads_are_held_to_one(site: Site) -> None:
    environment = psutil.Process(site.pid(site.keeper())).environ()
    assert environment["OMP_NUM_THREADS"] == "1"

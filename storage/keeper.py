"""The Keeper of one node: leases buffers, takes sealed Snapshots over, has them shipped and keeps them in memory.

A plain class without Ray. It decides neither when to save nor what a Checkpoint is: it writes Shards, never a Manifest
or a Commit. An Attempt below the highest one it has seen is refused; what it holds of it in memory stays.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from storage.arena import Arena
from storage.config import CheckpointConfig
from storage.errors import StorageError
from storage.host_memory import available_bytes
from storage.keeper_protocol import (
    KEEPER_PROTOCOL_VERSION,
    BufferLease,
    KeeperGreeting,
    KeeperStatus,
    LeaseRequest,
    MemoryProgress,
    MemoryReport,
    ReceiptSink,
    SealedSnapshot,
)
from storage.keys import Attempt
from storage.manifest import Receipt
from storage.memory_tier import MemoryTier
from storage.object_store import ObjectStore
from storage.shipper import Shipper
from storage.spool import open_spool

__all__ = ["Keeper"]

logger = logging.getLogger(__name__)

_REMEMBERED_LEASES: Final = 256
_DEFAULT_TTL_S: Final = 120.0
_SETTLE_S: Final = 2.0


class Keeper:
    """Implements MemoryPort. Calls return at once, but for the first lease of a size; threads do the shipping.

    ``host``: where peers reach this node. ``transport_key``: what peers and workers prove themselves with.
    """

    def __init__(
        self,
        run_id: str,
        node_id: str,
        store: ObjectStore,
        sink: ReceiptSink,
        config: CheckpointConfig,
        arena_dir: Path,
        clock: Callable[[], float] = time.monotonic,
        *,
        build_digest: str = "",
        budget_bytes: int | None = None,
        generation_budget_bytes: int | None = None,
        host: str = "127.0.0.1",
        transport_key: bytes | None = None,
        resend_s: tuple[float, float] = (0.1, 5.0),
        retry_s: tuple[float, float] = (1.0, 30.0),
    ) -> None:
        self._run_id, self._node_id, self._build_digest = run_id, node_id, build_digest
        self._clock = clock
        self._arena = Arena(arena_dir, run_id, budget_bytes)
        if generation_budget_bytes is None:  # only now: what a Keeper that was killed held is free again
            generation_budget_bytes = int(available_bytes() * config.memory.max_host_memory)
        self._arena.limit_generations(generation_budget_bytes)
        try:
            self._memory = MemoryTier(self._arena, run_id, node_id, config.memory, host=host, key=transport_key)
        except BaseException:
            self._arena.close()
            raise
        try:
            # After the arena, which only one living Keeper can have: the spool of a killed one is ours then.
            spool = open_spool(config.local_disk, store.url, run_id, node_id)
        except BaseException:
            self._memory.close(0.0)
            self._arena.close()
            raise
        self._shipper = Shipper(store, sink, config, self._arena, spool, clock, resend_s=resend_s, retry_s=retry_s)
        self._lock = threading.Lock()
        self._sealed_leases: OrderedDict[str, None] = OrderedDict()
        self._newest_attempt = 0
        self._is_closed = False
        self._expires_at_s = clock() + _DEFAULT_TTL_S

    def greet(self) -> KeeperGreeting:
        return KeeperGreeting(
            protocol_version=KEEPER_PROTOCOL_VERSION,
            build_digest=self._build_digest,
            run_id=self._run_id,
            node_id=self._node_id,
            pid=os.getpid(),
            address=self._memory.address,
            budget_bytes=self._arena.generation_budget_bytes,
        )

    def status(self) -> KeeperStatus:
        own, replicas = self._memory.bytes_held()
        return replace(
            self._shipper.status(), generation_bytes=own, replica_bytes=replicas, memory_error=self._memory.error
        )

    def lease_buffer(self, request: LeaseRequest) -> BufferLease | None:
        """A buffer, or None while one Snapshot of this rank is in flight and one is staged, or while it holds three
        generations. Safe to ask twice."""
        with self._lock:
            self._admit("lease", request.run_id, request.attempt.number, request.step, request.rank)
        return self._memory.lease(request) if request.is_generation else self._memory.lease_to_ship(request)

    def seal(self, snapshot: SealedSnapshot) -> None:
        """Take a whole Snapshot over. Safe to repeat when the answer got lost."""
        if not (snapshot.ship or snapshot.keep):
            raise StorageError(f"step {snapshot.step} rank {snapshot.rank}: sealed to be neither shipped nor kept")
        with self._lock:
            self._admit("seal", snapshot.run_id, snapshot.attempt.number, snapshot.step, snapshot.rank)
            if snapshot.lease_id in self._sealed_leases:
                return
            self._arena.seal(snapshot)
            self._sealed_leases[snapshot.lease_id] = None
            if len(self._sealed_leases) > _REMEMBERED_LEASES:
                self._sealed_leases.popitem(last=False)
            if snapshot.ship:
                self._shipper.take(snapshot)
            if snapshot.keep:
                self._memory.take(snapshot)
        logger.info("attempt %s step %d rank %d: sealed", snapshot.attempt.label, snapshot.step, snapshot.rank)

    def release(self, lease_ids: Sequence[str]) -> None:
        """Give buffers back unsealed. A lease that is sealed or over stays as it is."""
        for lease_id in lease_ids:
            if not self._arena.give_back(lease_id):
                logger.warning("run %s: lease %s is sealed or over; nothing to release", self._run_id, lease_id)

    def wait_replicated(self, attempt: Attempt, rank: int, step: int, timeout_s: float) -> MemoryProgress:
        """Wait until the generation of ``step`` has its replica, or cannot get one; the state then, or at time-out."""
        self._memory.wait_decided(attempt, rank, step, timeout_s)
        return self._memory.progress(attempt, rank)

    def memory_report(self) -> MemoryReport:
        """What this node's memory holds whole. What is just being made so is waited for, but not for long."""
        return self._memory.report(_SETTLE_S)

    def generation_receipts(self, attempt: Attempt, step: int) -> tuple[Receipt, ...]:
        """The Receipts of the generations of that step that are here, own and replicas."""
        return self._memory.receipts(attempt, step)

    @property
    def memory(self) -> MemoryTier:
        return self._memory

    def renew(self, ttl_s: float) -> None:
        """The driver is alive: the Keeper may stay for ``ttl_s`` more seconds."""
        with self._lock:
            self._expires_at_s = self._clock() + ttl_s

    @property
    def is_expired(self) -> bool:
        with self._lock:
            return self._clock() >= self._expires_at_s

    def forget_attempts_before(self, number: int) -> None:
        """Fence every Attempt below ``number``: its Snapshots are dropped, its later calls refused."""
        with self._lock:
            self._fence(number)

    def flush(self, timeout_s: float) -> bool:
        """Wait until every sealed Snapshot is durable and its Receipt acknowledged (or the failure reported)."""
        return self._shipper.flush(timeout_s)

    def close(self, timeout_s: float = 5.0, *, keep_unsent: bool = False) -> None:
        """Stop without flushing and remove the arena. A transfer that is under way is abandoned after ``timeout_s``.

        The Shards on the local disk go too; with ``keep_unsent`` they stay for a successor when any is not durable yet.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._memory.close(timeout_s)
        self._shipper.close(timeout_s, keep_unsent=keep_unsent)
        self._arena.close()

    def _admit(self, verb: str, run_id: str, number: int, step: int, rank: int) -> None:
        where = f"{verb} by rank {rank} at step {step}"
        if self._is_closed:
            raise StorageError(f"{where}: the Keeper of node {self._node_id} is closed")
        if run_id != self._run_id:
            raise StorageError(f"{where}: this is the Keeper of run {self._run_id}, not of {run_id}")
        if number < self._newest_attempt:
            raise StorageError(
                f"{where}: attempt {number} is over, attempt {self._newest_attempt} has begun; stop training"
            )
        self._fence(number)

    def _fence(self, number: int) -> None:
        if number <= self._newest_attempt:
            return
        self._newest_attempt = number
        self._shipper.fence(number)
        self._memory.fence(number)

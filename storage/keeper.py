"""The Keeper of one node: leases buffers, encodes and uploads sealed Snapshots, and delivers their Receipts.

A plain class without Ray. It decides neither when to save nor what a Checkpoint is: it writes Shards, never a Manifest
or a Commit. An Attempt below the highest one it has seen is refused.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from storage.arena import Arena
from storage.config import CheckpointConfig
from storage.errors import StorageError
from storage.keeper_protocol import (
    KEEPER_PROTOCOL_VERSION,
    BufferLease,
    KeeperGreeting,
    KeeperStatus,
    LeaseRequest,
    ReceiptSink,
    SealedSnapshot,
)
from storage.manifest import Receipt
from storage.object_store import ObjectStore
from storage.outbox import Outbox, OutboxMessage
from storage.shipping import ship_snapshot

__all__ = ["Keeper"]

logger = logging.getLogger(__name__)

_NUM_UPLOADERS: Final = 2
_REMEMBERED_LEASES: Final = 256
_DEFAULT_TTL_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class _Lane:
    """Snapshots of one lane are shipped one at a time, in step order."""

    attempt_number: int
    rank: int


class Keeper:
    """Implements KeeperPort. Calls return at once, but for the first lease of a size; two threads do the shipping."""

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
        resend_s: tuple[float, float] = (0.1, 5.0),
    ) -> None:
        self._run_id, self._node_id, self._build_digest = run_id, node_id, build_digest
        self._store, self._config, self._clock = store, config, clock
        self._arena = Arena(arena_dir, run_id, budget_bytes)
        self._outbox = Outbox(sink, self._note_error, first_wait_s=resend_s[0], longest_wait_s=resend_s[1])
        self._changed = threading.Condition()
        self._staged: dict[_Lane, list[SealedSnapshot]] = {}
        self._in_flight: set[_Lane] = set()
        self._sealed_leases: OrderedDict[str, None] = OrderedDict()
        self._newest_attempt = 0
        self._last_error: str | None = None
        self._is_closed = False
        self._expires_at_s = clock() + _DEFAULT_TTL_S
        self._uploaders = [
            threading.Thread(target=self._upload, name=f"keeper-uploader-{number}", daemon=True)
            for number in range(_NUM_UPLOADERS)
        ]
        for uploader in self._uploaders:
            uploader.start()

    def greet(self) -> KeeperGreeting:
        return KeeperGreeting(
            protocol_version=KEEPER_PROTOCOL_VERSION,
            build_digest=self._build_digest,
            run_id=self._run_id,
            node_id=self._node_id,
            pid=os.getpid(),
        )

    def status(self) -> KeeperStatus:
        arena_bytes, unacknowledged = self._arena.used_bytes, self._outbox.num_pending
        with self._changed:
            return KeeperStatus(
                in_flight=len(self._in_flight),
                staged=sum(len(snapshots) for snapshots in self._staged.values()),
                unacknowledged=unacknowledged,
                arena_bytes=arena_bytes,
                last_error=self._last_error,
            )

    def lease_buffer(self, request: LeaseRequest) -> BufferLease | None:
        """A buffer, or None while one Snapshot of this rank is in flight and one is staged. Safe to ask twice."""
        with self._changed:
            self._admit("lease", request.run_id, request.attempt.number, request.step, request.rank)
        return self._arena.lease(request)

    def seal(self, snapshot: SealedSnapshot) -> None:
        """Take a whole Snapshot over. Safe to repeat when the answer got lost."""
        with self._changed:
            self._admit("seal", snapshot.run_id, snapshot.attempt.number, snapshot.step, snapshot.rank)
            if snapshot.lease_id in self._sealed_leases:
                return
            self._arena.seal(snapshot)
            self._sealed_leases[snapshot.lease_id] = None
            if len(self._sealed_leases) > _REMEMBERED_LEASES:
                self._sealed_leases.popitem(last=False)
            lane = self._staged.setdefault(_Lane(snapshot.attempt.number, snapshot.rank), [])
            lane.append(snapshot)  # bounded by the arena: two buffers a rank
            lane.sort(key=lambda staged: staged.step)
            self._changed.notify_all()
        logger.info("attempt %s step %d rank %d: sealed", snapshot.attempt.label, snapshot.step, snapshot.rank)

    def release(self, lease_ids: Sequence[str]) -> None:
        """Give buffers back unsealed. A lease that is sealed or over stays as it is."""
        for lease_id in lease_ids:
            if not self._arena.give_back(lease_id):
                logger.warning("run %s: lease %s is sealed or over; nothing to release", self._run_id, lease_id)

    def renew(self, ttl_s: float) -> None:
        """The driver is alive: the Keeper may stay for ``ttl_s`` more seconds."""
        with self._changed:
            self._expires_at_s = self._clock() + ttl_s

    @property
    def is_expired(self) -> bool:
        with self._changed:
            return self._clock() >= self._expires_at_s

    def forget_attempts_before(self, number: int) -> None:
        """Fence every Attempt below ``number``: its Snapshots are dropped, its later calls refused."""
        with self._changed:
            self._fence(number)

    def flush(self, timeout_s: float) -> bool:
        """Wait until every sealed Snapshot is durable and its Receipt acknowledged (or the failure reported)."""
        until = time.monotonic() + timeout_s
        with self._changed:
            if not self._changed.wait_for(lambda: not (self._staged or self._in_flight), timeout=timeout_s):
                return False
        return self._outbox.drain(until - time.monotonic())

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop without flushing and remove the arena. A transfer that is under way is abandoned after ``timeout_s``."""
        with self._changed:
            self._is_closed = True
            self._staged.clear()
            self._changed.notify_all()
        self._outbox.close(timeout_s)
        for uploader in self._uploaders:
            uploader.join(timeout_s / _NUM_UPLOADERS)
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
        for lane in [lane for lane in self._staged if lane.attempt_number < number]:
            for snapshot in self._staged.pop(lane):
                logger.info("step %d rank %d: dropped, attempt %d began", snapshot.step, snapshot.rank, number)
                self._arena.release(snapshot.lease_id)
        self._outbox.fence(number)
        self._changed.notify_all()

    def _upload(self) -> None:
        while (snapshot := self._next()) is not None:
            lane = _Lane(snapshot.attempt.number, snapshot.rank)
            message = self._ship(snapshot)
            if message is not None:
                self._outbox.put(message)
            with self._changed:
                self._in_flight.discard(lane)
                self._changed.notify_all()

    def _next(self) -> SealedSnapshot | None:
        with self._changed:
            while not self._is_closed:
                for lane, snapshots in self._staged.items():
                    if lane not in self._in_flight:
                        snapshot = snapshots.pop(0)
                        if not snapshots:
                            del self._staged[lane]
                        self._in_flight.add(lane)
                        return snapshot
                self._changed.wait(timeout=30.0)
        return None

    def _ship(self, snapshot: SealedSnapshot) -> OutboxMessage | None:
        """Make one Snapshot durable; the word to the coordinator, or None when its Attempt is over meanwhile."""
        receipt: Receipt | None = None
        reason = ""
        try:
            buffer = self._arena.open(snapshot.lease_id, snapshot.num_bytes)
            receipt = ship_snapshot(
                snapshot, buffer, self._store, self._config, self._clock, lambda: self._is_over(snapshot)
            )
        except Exception as error:  # noqa: BLE001 - outer edge of the thread: reported, and the Keeper lives on
            reason = f"{type(error).__name__}: {error}"
            logger.warning("step %d rank %d: not durable: %s", snapshot.step, snapshot.rank, reason)
            self._note_error(f"step {snapshot.step} rank {snapshot.rank}: {reason}")
        finally:
            self._arena.release(snapshot.lease_id)
        if receipt is None and not reason:
            return None
        return OutboxMessage(
            attempt=snapshot.attempt, step=snapshot.step, rank=snapshot.rank, receipt=receipt, reason=reason
        )

    def _is_over(self, snapshot: SealedSnapshot) -> bool:
        with self._changed:
            return self._is_closed or snapshot.attempt.number < self._newest_attempt

    def _note_error(self, text: str) -> None:
        with self._changed:
            self._last_error = text

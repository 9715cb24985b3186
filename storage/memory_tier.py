"""The memory Tier of one Keeper: its ledger, its replication threads, its server, and the rooms of replicas coming in.

It answers what is held and where; whether a step can be gone on from is decided elsewhere. It owns no buffer: the arena
does.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from typing import TypeVar

from storage.arena import Arena, Hold, NoRoom
from storage.config import MemoryConfig
from storage.errors import StorageError
from storage.generation import Generation
from storage.generations import Generations
from storage.keeper_protocol import (
    BufferLease,
    LeaseRequest,
    MemoryProgress,
    MemoryReport,
    SealedSnapshot,
    TransportAddress,
)
from storage.keys import Attempt
from storage.manifest import Receipt
from storage.memory_shard import read_receipt
from storage.replicator import Replicator
from storage.transport import ReplicaRef, ReplicaRoom
from storage.transport_server import TransportServer

__all__ = ["MemoryTier"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


class MemoryTier:
    """A ReplicaHolder. ``key``: the Run's; without one no peer can reach this Keeper until `set_key`."""

    def __init__(
        self, arena: Arena, run_id: str, node_id: str, config: MemoryConfig, *, host: str, key: bytes | None
    ) -> None:
        self._arena, self._run_id = arena, run_id
        self._key = key or secrets.token_bytes(32)
        self._generations = Generations(self._drop)
        self._replicator = Replicator(self._generations, arena, config, lambda: self._key)
        self._server = TransportServer(self, run_id=run_id, node_id=node_id, host=host, key=self._key)

    @property
    def address(self) -> TransportAddress:
        return self._server.address

    @property
    def error(self) -> str | None:
        return self._generations.error()

    def bytes_held(self) -> tuple[int, int]:
        """Of own generations and of replicas."""
        return self._generations.bytes_held()

    def set_key(self, key: bytes) -> None:
        """A new driver took over: peers and workers prove themselves with its key from now on."""
        self._key = key
        self._server.set_key(key)

    def redirect(self, lost: TransportAddress, address: TransportAddress) -> None:
        """See Replicator.redirect."""
        self._replicator.redirect(lost, address)

    def fence(self, number: int) -> None:
        self._generations.fence(number)

    def lease(self, request: LeaseRequest) -> BufferLease | None:
        """A buffer for a generation; None while the rank holds its share or there is no room, which is said."""
        self._generations.note_lease(request.attempt, request.step, request.safe_step, request.given_up)
        try:
            return self._with_room(request.attempt, lambda: self._arena.lease(request))
        except NoRoom as error:
            self._generations.note_error(request.attempt, request.rank, f"no Snapshot in memory: {error}")
            return None
        except StorageError as error:
            self._generations.note_error(request.attempt, request.rank, f"no buffer for it: {error}")
            raise

    def lease_to_ship(self, request: LeaseRequest) -> BufferLease | None:
        """A buffer for a Snapshot that goes to the store alone; None while others of the rank are on their way there.

        No generation keeps a Checkpoint from being saved: where there is no room for one, as many as need be give way.
        """
        num_given_up = 0
        while True:
            lease, shortage = None, None
            try:
                lease = self._arena.lease(request)
            except NoRoom as error:
                shortage = error
            is_short = lease is None and (shortage is not None or self._arena.is_short(request))
            if not is_short or not self._generations.give_way_to_save(request.attempt, self._becomes_free):
                break
            num_given_up += 1
        if num_given_up:
            reason = f"step {request.step}: {num_given_up} Snapshots in memory gave way to a save, for want of room"
            self._generations.note_error(request.attempt, request.rank, reason)
        if shortage is not None:
            raise shortage
        return lease

    def take(self, snapshot: SealedSnapshot) -> None:
        """Keep ``snapshot``, whose buffer is sealed, and see to its replica."""
        path = self._arena.hold(snapshot.lease_id, Hold.KEEP)
        if path is None:
            raise StorageError(f"rank {snapshot.rank} step {snapshot.step}: lease {snapshot.lease_id} is not sealed")
        self._generations.add_own(snapshot, str(path))
        self._replicator.start()

    def make_room(self, ref: ReplicaRef) -> ReplicaRoom | None:
        """See ReplicaHolder."""
        if ref.run_id != self._run_id:
            raise StorageError(f"this is the Keeper of run {self._run_id}, not of {ref.run_id}")
        if not self._generations.begin_replica(ref):
            return None
        lease_id = None
        try:
            where = f"the replica of step {ref.step} rank {ref.rank}"
            lease_id = self._with_room(ref.attempt, lambda: self._arena.lease_for_replica(ref.num_bytes, where))
            path = self._arena.hold(lease_id, Hold.KEEP)
            return _Room(self, ref, lease_id, str(path), self._arena.open(lease_id, ref.num_bytes, writable=True))
        except BaseException:
            self.end_room(ref, lease_id, None)
            raise

    def end_room(self, ref: ReplicaRef, lease_id: str | None, path: str | None) -> None:
        """``path`` None: nothing of it is to remain."""
        is_kept = self._generations.end_replica(ref, None if path is None else lease_id, path or "")
        if not is_kept and lease_id is not None:
            self._arena.release(lease_id, Hold.KEEP)

    def open_generation(self, attempt: Attempt, step: int, rank: int) -> memoryview | None:
        """See ReplicaHolder. What is freed and used again meanwhile, its reader finds out by the digests."""
        found = self._generations.find(attempt, step, rank)
        return None if found is None else self._arena.open(found.lease_id, found.num_bytes)

    def report(self, settle_s: float) -> MemoryReport:
        """What is held whole; waits up to ``settle_s`` for what is just being indexed."""
        self._generations.wait_until(self._generations.is_indexed, settle_s)
        held = tuple(generation.facts() for generation in self._generations.whole())
        return MemoryReport(address=self.address, generations=held)

    def is_indexed(self) -> bool:
        """Whether all that is sealed is whole."""
        return self._generations.is_indexed()

    def receipts(self, attempt: Attempt, step: int) -> tuple[Receipt, ...]:
        """Of the generations of that step, replicas included; of one that is not what it should be, none."""
        found = (self._receipt(generation) for generation in self._generations.whole(attempt, step))
        return tuple(receipt for receipt in found if receipt is not None)

    def progress(self, attempt: Attempt, rank: int) -> MemoryProgress:
        return self._generations.progress(attempt, rank)

    def is_decided(self, attempt: Attempt, rank: int, step: int) -> bool:
        return self._generations.is_decided(attempt, rank, step)

    def wait_decided(self, attempt: Attempt, rank: int, step: int, timeout_s: float) -> None:
        self._generations.wait_until(lambda: self._generations.is_decided(attempt, rank, step), timeout_s)

    def watch(self, on_change: Callable[[], None]) -> Callable[[], None]:
        """See Generations.watch."""
        return self._generations.watch(on_change)

    def close(self, timeout_s: float) -> None:
        self._generations.close()
        self._server.close()
        self._replicator.join(timeout_s)

    def _with_room(self, attempt: Attempt, lease: Callable[[], T]) -> T:
        """When there is no room, once more after what older Attempts need least has gone."""
        try:
            return lease()
        except NoRoom:
            if not self._generations.give_way(attempt):
                raise
        return lease()

    def _receipt(self, generation: Generation) -> Receipt | None:
        if generation.receipt is None and generation.ref is not None:
            try:
                content = self._arena.open(generation.lease_id, generation.num_bytes)
                receipt = read_receipt(generation.ref, content)
            except StorageError as error:
                logger.warning("%s: what is held of it cannot be used: %s", generation.where, error)
                return None
            if generation.snapshot is not None:
                receipt = receipt.model_copy(update={"tier": "own-memory", "stall_s": generation.snapshot.stall_s})
            generation.receipt = receipt
        return generation.receipt

    def _becomes_free(self, generation: Generation) -> bool:
        return self._arena.is_only_kept(generation.lease_id)

    def _drop(self, generation: Generation) -> None:
        self._arena.release(generation.lease_id, Hold.KEEP)


class _Room:
    """A ReplicaRoom in the arena."""

    def __init__(self, tier: MemoryTier, ref: ReplicaRef, lease_id: str, path: str, view: memoryview) -> None:
        self._tier, self._ref, self._lease_id, self._path, self._view = tier, ref, lease_id, path, view

    @property
    def view(self) -> memoryview:
        return self._view

    def seal(self) -> None:
        self._view = memoryview(b"")
        self._tier.end_room(self._ref, self._lease_id, self._path)

    def drop(self) -> None:
        self._view = memoryview(b"")
        self._tier.end_room(self._ref, self._lease_id, None)

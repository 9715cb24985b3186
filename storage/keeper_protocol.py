"""The values that workers, drivers and Keepers exchange. No ray, no torch.

Call order of one save, per rank: 1) worker: `lease_buffer`; 2) worker: one copy into the leased file under /dev/shm;
3) worker: `seal`; 4) Keeper: encode to the local disk, buffer free; 5) upload, read the Shard's end back; 6) Receipt to
the coordinator until acknowledged. Without a local disk the buffer is free after 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from storage.keys import Attempt
from storage.manifest import Receipt

__all__ = [
    "KEEPER_PROTOCOL_VERSION",
    "BufferLease",
    "GenerationFacts",
    "KeeperGreeting",
    "KeeperPort",
    "KeeperStatus",
    "LeaseRequest",
    "MemoryPort",
    "MemoryProgress",
    "MemoryReport",
    "ReceiptSink",
    "SealedSnapshot",
    "TransportAddress",
]

KEEPER_PROTOCOL_VERSION = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportAddress:
    """Where a node's Keeper listens for peers: replicas come in and go out there (storage.transport)."""

    node_id: str
    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequest:
    """A worker process asks for a buffer of ``num_bytes`` (header included) for its Snapshot of ``step``.

    ``is_generation``: for the memory Tier. Such a lease may be asked for ahead: ``step`` is then the earliest one that
    it can be sealed for. ``safe_step``: the newest step of this Attempt that is whole in memory everywhere, replicas
    included, as this rank knows; all that is older may go. -1: none yet, and generations of older Attempts stay.
    ``given_up``: steps of this Attempt that some rank left out; they will never be whole and may go too.
    """

    run_id: str
    attempt: Attempt
    step: int
    rank: int
    pid: int
    num_bytes: int
    is_generation: bool = False
    safe_step: int = -1
    given_up: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferLease:
    """A whole shared-memory file, the worker's alone until sealed. Only its first ``num_bytes`` are used."""

    lease_id: str
    path: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedSnapshot:
    """The worker's word that the buffer is whole. ``header_digest``: see storage.snapshot_format.

    ``ship``: encode it and carry it to the store. ``keep``: hold it in memory as a generation, with a replica at
    ``peer`` where one is named. At least one of both. ``bounded``: the Shard in the store has its moments
    rounded within ``checkpoint.moment_bound``, but for what a rule of ``checkpoint.levels`` says is lossless; what is
    kept in memory is exact.
    """

    lease_id: str
    run_id: str
    attempt: Attempt
    step: int
    rank: int
    world_size: int
    num_bytes: int
    header_digest: str
    stall_s: float
    ship: bool = True
    keep: bool = False
    peer: TransportAddress | None = None
    bounded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperGreeting:
    """What a Keeper says of itself to a new driver."""

    protocol_version: int
    build_digest: str
    run_id: str
    node_id: str
    pid: int
    address: TransportAddress | None = None
    budget_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationFacts:
    """One sealed Snapshot that a Keeper holds in memory: its own rank's, or a peer's replica.

    ``num_bytes``: of the whole raw Shard object (Snapshot buffer, index, trailer; storage.memory_shard). ``path``: its
    file on the holder's node.
    """

    attempt: Attempt
    step: int
    rank: int
    world_size: int
    num_bytes: int
    path: str
    is_replica: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """All generations that one Keeper holds and where they can be fetched."""

    address: TransportAddress
    generations: tuple[GenerationFacts, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProgress:
    """How far the memory Tier of one rank is: newest step sealed here, newest with a whole replica at its peer.

    -1: none. Without a peer ``replicated_step`` is ``sealed_step``. ``last_error``: why the newest has no replica.
    """

    attempt: Attempt
    rank: int
    sealed_step: int
    replicated_step: int
    last_error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperStatus:
    """Counts for people and tests: Snapshots in flight and staged, Receipts not acknowledged yet, last failure.

    ``memory_bytes``: encoded Shards held in memory. ``spool_bytes``: those on the local disk. ``failing_for_s``: since
    the store's first failure without a success since. ``retries``: uploads begun again after the store had failed them.
    ``superseded``: Snapshots given up for a newer one while the store was away or the disk full. ``generation_bytes``
    and ``replica_bytes``: the memory Tier's; ``memory_error``: why its newest Snapshot has no replica.
    """

    in_flight: int
    staged: int
    unacknowledged: int
    arena_bytes: int
    last_error: str | None
    memory_bytes: int = 0
    spool_bytes: int = 0
    failing_for_s: float = 0.0
    retries: int = 0
    superseded: int = 0
    generation_bytes: int = 0
    replica_bytes: int = 0
    memory_error: str | None = None


class ReceiptSink(Protocol):
    """Where a Keeper delivers Receipts: the coordinator, or a test."""

    def deliver(self, receipt: Receipt) -> bool:
        """True when the coordinator took the Receipt (or has it already, or refuses its old Attempt for good)."""
        ...

    def deliver_many(self, receipts: tuple[Receipt, ...]) -> tuple[bool, ...]:
        """`deliver` for each of them, in one call."""
        ...

    def report_failed(self, attempt: Attempt, step: int, rank: int, reason: str) -> bool:
        """The Snapshot of ``rank`` will never be durable: the step must be given up."""
        ...

    def report_delayed(self, attempt: Attempt, step: int, rank: int, reason: str, failing_for_s: float) -> bool:
        """The store has been failing this Keeper for ``failing_for_s``; the Snapshot is kept and tried again."""
        ...


class KeeperPort(Protocol):
    """What a worker may ask of the Keeper of its node."""

    def lease_buffer(self, request: LeaseRequest) -> BufferLease | None:
        """A buffer, or None while one Snapshot of this rank is in flight and one is staged."""
        ...

    def seal(self, snapshot: SealedSnapshot) -> None:
        """Hand the whole buffer over. Refused (StorageError) when the Attempt is older than one seen since."""
        ...

    def release(self, lease_ids: Sequence[str]) -> None:
        """Give buffers back unsealed."""
        ...


class MemoryPort(KeeperPort, Protocol):
    """A Keeper with a memory Tier, as a worker sees it."""

    def wait_replicated(self, attempt: Attempt, rank: int, step: int, timeout_s: float) -> MemoryProgress:
        """Wait until the generation of ``step`` has its replica, or cannot get one; the state then, or at time-out."""
        ...

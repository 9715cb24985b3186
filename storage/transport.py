"""The Protocol by which Keepers hand each other sealed bytes. There is no implementation yet: it is the border only.

It will serve the peer-memory Tier: a Keeper keeps a replica of a peer's Shard and gives it back after a node is lost.
Ray carries control alone; the bytes go from arena to arena over a connection of their own. It neither chooses peers nor
decides what a replica is good for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from storage.keys import Attempt

__all__ = ["LARGEST_TRANSFER_BYTES", "ReplicaRef", "ShardTransport", "TransportAddress"]

LARGEST_TRANSFER_BYTES: Final = (
    1 << 22
)  # what one message may carry, so that a peer never allocates on a stranger's word


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportAddress:
    """Where a Keeper listens. ``run_id`` is part of the handshake: both ends prove that they hold that Run's key."""

    run_id: str
    node_id: str
    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRef:
    """Names the encoded Shard of one rank, with what is needed to check it: size and xxh3_128 of all its bytes."""

    attempt: Attempt
    step: int
    rank: int
    num_bytes: int
    digest: str


class ShardTransport(Protocol):
    """Call order of a replication: `offer`, then `send` from offset 0 upward without gaps, then `seal`.

    Every call is authenticated per Run, refuses an Attempt older than the newest the peer has seen (StorageError), and
    raises StoreUnavailable when ``deadline_s`` passes. Only sealed replicas exist: what was not sealed is dropped.
    """

    def offer(self, peer: TransportAddress, replica: ReplicaRef, *, deadline_s: float) -> bool:
        """Ask the peer to make room. False: its budget is used up, and the replica is not made there."""
        ...

    def send(
        self, peer: TransportAddress, replica: ReplicaRef, offset: int, data: memoryview, *, deadline_s: float
    ) -> None:
        """Bytes ``[offset, offset + len(data))``, at most LARGEST_TRANSFER_BYTES."""
        ...

    def seal(self, peer: TransportAddress, replica: ReplicaRef, *, deadline_s: float) -> None:
        """The replica is whole. The peer checks size and digest before it counts; a mismatch raises StorageError."""
        ...

    def fetch(
        self, peer: TransportAddress, replica: ReplicaRef, offset: int, length: int, *, deadline_s: float
    ) -> bytes:
        """Exactly ``length`` bytes of a sealed replica. Raises ObjectMissing when the peer does not hold it."""
        ...

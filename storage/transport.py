"""The border by which Keepers hand each other Snapshots: what a replica is called, and who holds replicas.

Ray carries control alone; the bytes go from arena to arena over a connection of their own. Which peer a replica goes
to, and what it is good for, is decided elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from storage.keys import Attempt

__all__ = ["ReplicaHolder", "ReplicaRef", "ReplicaRoom"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRef:
    """Names the raw Shard object (storage.memory_shard) of one rank at one step. ``digest``: xxh3_128 of all its bytes.

    ``safe_step``: as in LeaseRequest; the holder may drop what is older.
    """

    run_id: str
    attempt: Attempt
    step: int
    rank: int
    world_size: int
    num_bytes: int
    digest: str
    safe_step: int = -1


class ReplicaRoom(Protocol):
    """A place for one replica that is coming in. Exactly one of `seal` and `drop` ends it."""

    @property
    def view(self) -> memoryview:
        """Writable, ``num_bytes`` long."""
        ...

    def seal(self) -> None:
        """The bytes are whole and have the digest: from now on the replica exists."""
        ...

    def drop(self) -> None:
        """Nothing of it remains."""
        ...


class ReplicaHolder(Protocol):
    """What the transport's server asks of its Keeper. Called from the server's threads."""

    def make_room(self, ref: ReplicaRef) -> ReplicaRoom | None:
        """Room for ``ref``; None when it is held already. Raises StorageError with the reason where there is none:
        budget used up, an older Attempt, another Run."""
        ...

    def open_generation(self, attempt: Attempt, step: int, rank: int) -> memoryview | None:
        """The whole sealed raw Shard object, own or replica; None when it is not held. Dropped by the caller soon."""
        ...

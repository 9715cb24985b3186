"""The RestorePlan, the one answer to "where do we go on", and the Protocol of a place that Shards are read from.

A plan is chosen once per Attempt, journalled before any rank loads, and names the source of every Shard. Each Tier is
another `ShardSource`; what they return is unchecked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from storage.keeper_protocol import TransportAddress
from storage.keys import Attempt, StepKey
from storage.manifest import Level, Tier

__all__ = ["MemoryPlace", "MemorySource", "RestorePlan", "ShardBytes", "ShardLocation", "ShardRange", "ShardSource"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLocation:
    """Where the Shard of saving rank ``rank`` is read from: a Tier, and the object key or peer address in it."""

    rank: int
    tier: Tier
    location: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlace:
    """One Keeper that holds the Shard of saving rank ``rank`` in memory: ``path`` on its own node, else by address."""

    rank: int
    address: TransportAddress
    path: str
    num_bytes: int
    is_replica: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySource:
    """A complete step in memory: its Manifest as JSON, and for each saving rank, in order, who holds its Shard.

    ``key`` opens the transport to them, also for a World that keeps nothing in memory itself.
    """

    manifest: bytes
    places: tuple[tuple[MemoryPlace, ...], ...]
    key: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePlan:
    """What Attempt ``attempt`` loads: the Checkpoint ``source`` under ``root_url``, Shard by Shard.

    ``levels`` None: all of it. Otherwise only tensors of these Levels, which always include L1: a parameter of whose
    optimizer state another Level is a part begins with a fresh one. ``memory``: the step is read from the memory Tier,
    not from the store; ``manifest_key`` is then empty, and size and digest are those of ``memory.manifest``.
    """

    attempt: Attempt
    source: StepKey
    root_url: str
    manifest_key: str
    manifest_bytes: int
    manifest_digest: str
    shards: tuple[ShardLocation, ...]
    allow_partial: bool = False
    levels: tuple[Level, ...] | None = None
    memory: MemorySource | None = None

    @property
    def step(self) -> int:
        """Last finished optimizer step of the Checkpoint; training goes on at step + 1."""
        return self.source.step

    @property
    def tier(self) -> Tier:
        """The farthest Tier that any Shard comes from."""
        order: tuple[Tier, ...] = ("own-memory", "peer-memory", "local-disk", "object-storage")
        return max((shard.tier for shard in self.shards), key=order.index, default="object-storage")


ShardBytes = bytes | bytearray | memoryview
ShardRange = Callable[[int, int], ShardBytes]
"""``(offset, length)`` gives exactly ``length`` bytes of one copy of one Shard object. Raises StorageError."""


class ShardSource(Protocol):
    """Reads byte ranges of Shard objects; one implementation per Tier, all of them checked by the reader's digests."""

    def read_range(self, location: ShardLocation, offset: int, length: int) -> ShardBytes:
        """Exactly ``length`` bytes from ``offset`` of the Shard object.

        Raises ObjectMissing or StoreUnavailable; MemoryUnreadable where the plan is one from memory.
        """
        ...

    def other_copies(self, location: ShardLocation) -> Iterator[ShardRange]:
        """Every copy in turn, for when what `read_range` gave is not what was sealed. Often none."""
        ...

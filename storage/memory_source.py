"""Reads Shards from the memory of Keepers: this node's own by mapping its file, a peer's over the transport.

Where the place that was preferred fails, the others are tried in turn. What is returned is unchecked: the reader
compares digests, and asks here for other copies where they differ.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Final, Protocol

from storage.errors import CorruptCheckpoint, MemoryUnreadable, ObjectMissing, StorageError
from storage.keeper_protocol import TransportAddress
from storage.keys import Attempt, StepKey
from storage.manifest import Tier
from storage.sources import MemoryPlace, MemorySource, ShardBytes, ShardLocation, ShardRange
from storage.transport_client import ReplicaClient

__all__ = ["MemoryReach", "MemoryShardSource", "RangeClient"]

logger = logging.getLogger(__name__)

DEADLINE_S: Final = 10.0


class RangeClient(Protocol):
    """What this file needs of storage.transport_client.ReplicaClient."""

    def fetch(self, attempt: Attempt, step: int, rank: int, offset: int, length: int) -> ShardBytes: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReach:
    """What a process needs to read from memory: the node it is on, the Run, and the key that opens the transport."""

    node_id: str
    run_id: str
    key: bytes = field(repr=False)
    deadline_s: float = DEADLINE_S

    def client(self, address: TransportAddress) -> RangeClient:
        return ReplicaClient(address, self.key, self.run_id, deadline_s=self.deadline_s)


@dataclass(frozen=True, slots=True)
class _Copy:
    """One way to read one Shard: ``fetch(offset, length)``."""

    place: str
    tier: Tier
    fetch: ShardRange


class MemoryShardSource:
    """A ShardSource over the places of ``memory``. Use in a ``with`` block; safe to call from several threads.

    A CorruptCheckpoint that leaves the block, whatever found it, leaves it as MemoryUnreadable.
    """

    def __init__(
        self,
        memory: MemorySource,
        source: StepKey,
        reach: MemoryReach,
    ) -> None:
        self._memory, self._source, self._node_id = memory, source, reach.node_id
        self._open_client = reach.client
        self._lock = threading.Lock()
        self._clients: dict[TransportAddress, RangeClient] = {}
        self._mappings: dict[str, mmap.mmap] = {}
        self._copies = {rank: tuple(self._ways(places)) for rank, places in enumerate(memory.places)}
        self._failed: dict[int, dict[_Copy, str]] = {rank: {} for rank in self._copies}
        self._read: Counter[Tier] = Counter()

    def __enter__(self) -> MemoryShardSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            clients, self._clients = list(self._clients.values()), {}
            self._mappings.clear()  # the memory goes with the last view of it
        for client in clients:
            client.close()
        if isinstance(error, CorruptCheckpoint):
            # Every copy was asked: it is the generation that is bad, and no Checkpoint.
            rank = error.rank or 0
            raise MemoryUnreadable(self._source.step, rank, self.places_of(rank), error.reason) from error

    @property
    def bytes_by_tier(self) -> Mapping[Tier, int]:
        """How much was read from where. A Snapshot that this node took itself is its own; a replica is a peer's."""
        with self._lock:
            return {"own-memory": self._read["own-memory"], "peer-memory": self._read["peer-memory"]}

    def read_range(self, location: ShardLocation, offset: int, length: int) -> ShardBytes:
        """Exactly ``length`` bytes, of the first place that gives them. Raises MemoryUnreadable when none does."""
        rank = location.rank
        for copy in self._copies.get(rank, ()):
            data = self._try(rank, copy, offset, length)
            if data is not None:
                return data
        reasons = self._failed.get(rank, {})
        raise MemoryUnreadable(
            self._source.step,
            rank,
            " and ".join(copy.place for copy in reasons) or "no place",
            "; ".join(reasons.values()) or "the plan names no place",
        )

    def other_copies(self, location: ShardLocation) -> Iterator[ShardRange]:
        """Every place that could be read so far: which of them gave the bytes that were refused is not known."""
        for copy in self._copies.get(location.rank, ()):
            if copy not in self._failed[location.rank]:
                yield partial(self._counted, copy)

    def places_of(self, rank: int) -> str:
        """Where the Shard of ``rank`` is read from, in words."""
        return " and ".join(copy.place for copy in self._copies.get(rank, ())) or "no place"

    def _try(self, rank: int, copy: _Copy, offset: int, length: int) -> ShardBytes | None:
        """None, from then on, when this copy cannot be read."""
        if copy in self._failed[rank]:
            return None
        try:
            return self._counted(copy, offset, length)
        except (StorageError, OSError) as error:
            logger.warning("step %d, rank %d: %s cannot be read: %s", self._source.step, rank, copy.place, error)
            with self._lock:
                self._failed[rank][copy] = str(error)
            return None

    def _counted(self, copy: _Copy, offset: int, length: int) -> ShardBytes:
        data = copy.fetch(offset, length)
        with self._lock:
            self._read[copy.tier] += length
        return data

    def _ways(self, places: tuple[MemoryPlace, ...]) -> Iterator[_Copy]:
        """This node's file, then this node's Keeper, which may hold the end of the object elsewhere; then peers."""
        own = [place for place in places if place.address.node_id == self._node_id]
        far = [place for place in places if place.address.node_id != self._node_id]
        for place in own:
            tier: Tier = "peer-memory" if place.is_replica else "own-memory"
            yield _Copy(f"this node's {place.path}", tier, self._mapped(place))
            yield _Copy(f"this node's Keeper at {_name(place.address)}", tier, self._fetched(place))
        for place in far:
            yield _Copy(
                f"node {place.address.node_id[:12]} at {_name(place.address)}", "peer-memory", self._fetched(place)
            )

    def _mapped(self, place: MemoryPlace) -> ShardRange:
        def fetch(offset: int, length: int) -> memoryview:
            mapping = self._mapping(place.path)
            if offset + length > min(len(mapping), place.num_bytes):
                raise ObjectMissing(place.path, f"bytes {offset} to {offset + length} of {len(mapping)}")
            return memoryview(mapping)[offset : offset + length]

        return fetch

    def _mapping(self, path: str) -> mmap.mmap:
        with self._lock:
            mapping = self._mappings.get(path)
            if mapping is None:
                try:
                    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as error:
                    raise ObjectMissing(path, str(error)) from error
                try:
                    # Private: torch takes writable memory without a copy, and nothing written here could be seen.
                    mapping = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
                finally:
                    os.close(descriptor)
                self._mappings[path] = mapping
            return mapping

    def _fetched(self, place: MemoryPlace) -> ShardRange:
        def fetch(offset: int, length: int) -> ShardBytes:
            client = self._client(place.address)
            return client.fetch(self._source.attempt, self._source.step, place.rank, offset, length)

        return fetch

    def _client(self, address: TransportAddress) -> RangeClient:
        with self._lock:
            if address not in self._clients:
                self._clients[address] = self._open_client(address)
            return self._clients[address]


def _name(address: TransportAddress) -> str:
    return f"{address.host}:{address.port}"

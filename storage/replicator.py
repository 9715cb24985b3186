"""The threads of a Keeper's memory Tier: one makes sealed buffers whole (index, digests), two send them to peers.

Which is next, and what may go, the ledger says (storage.generations). Training never waits for any of this.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from storage.arena import Arena, Hold
from storage.config import MemoryConfig
from storage.generation import Generation
from storage.generations import Generations
from storage.keeper_protocol import TransportAddress
from storage.memory_shard import index_snapshot
from storage.transport import ReplicaRef
from storage.transport_client import Pace, send_replica

__all__ = ["Replicator"]

logger = logging.getLogger(__name__)

_NUM_SENDERS: Final = 2
_RETRY_S: Final = (0.2, 1.0, 5.0)  # the last for ever: buffers may be full of what has no replica, and no newer comes
_DEADLINE_S: Final = 30.0
_SLOWEST_BYTES_PER_S: Final = 20e6


class Replicator:
    """Threads begin with the first generation, so that a Run without a memory Tier has none. ``key``: the Run's now."""

    def __init__(
        self,
        generations: Generations,
        arena: Arena,
        config: MemoryConfig,
        key: Callable[[], bytes],
    ) -> None:
        self._generations, self._arena, self._key = generations, arena, key
        self._bytes_per_s = config.bandwidth_bytes_per_s
        self._pace = None if self._bytes_per_s is None else Pace(self._bytes_per_s)
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._moved: dict[TransportAddress, TransportAddress] = {}

    def start(self) -> None:
        """From now on generations are worked at. Safe to repeat."""
        with self._lock:
            if self._threads:
                return
            loops = [("index", self._index_loop)] + [("send", self._send_loop)] * _NUM_SENDERS
            for number, (name, loop) in enumerate(loops):
                self._threads.append(threading.Thread(target=loop, name=f"keeper-{name}-{number}", daemon=True))
                self._threads[-1].start()

    def redirect(self, lost: TransportAddress, address: TransportAddress) -> None:
        """What was to go to the Keeper at ``lost``, which is gone, goes to ``address`` from now on. A later one of the
        same node has another address, and gets what is meant for it."""
        self._moved[lost] = address
        self._generations.retry_now(lost)

    def join(self, timeout_s: float) -> None:
        """The ledger is closed: wait for the threads' end."""
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            logger.warning("a replica is still being sent; its thread ends with the process")

    def _index_loop(self) -> None:
        while (generation := self._generations.next_to_index()) is not None:
            try:
                self._index(generation)
            except Exception as error:
                logger.exception("%s: cannot be kept in memory", generation.where)
                self._generations.remove(generation, f"{type(error).__name__}: {error}")

    def _index(self, generation: Generation) -> None:
        snapshot = generation.snapshot
        assert snapshot is not None
        if self._arena.hold(snapshot.lease_id, Hold.READ) is None:
            self._generations.put_back(generation)
            return
        try:
            shard = index_snapshot(snapshot, self._arena.open(snapshot.lease_id, snapshot.num_bytes))
            self._arena.append(snapshot.lease_id, snapshot.num_bytes, shard.tail)
        finally:
            self._arena.release(snapshot.lease_id, Hold.READ)
        ref = ReplicaRef(
            run_id=snapshot.run_id,
            attempt=snapshot.attempt,
            step=snapshot.step,
            rank=snapshot.rank,
            world_size=snapshot.world_size,
            num_bytes=shard.num_bytes,
            digest=shard.digest,
        )
        self._generations.set_whole(generation, ref)

    def _send_loop(self) -> None:
        while (generation := self._generations.next_to_send(time.monotonic)) is not None:
            try:
                is_sent = self._send_one(generation)
            except Exception as error:  # noqa: BLE001 - outer edge of the thread: reported, and the Keeper lives on
                self._note_failure(generation, error)
            else:
                if is_sent:
                    self._generations.set_replicated(generation)
                else:
                    self._generations.put_back(generation)

    def _send_one(self, generation: Generation) -> bool:
        """False when the buffer is gone."""
        snapshot, ref = generation.snapshot, generation.ref
        assert snapshot is not None
        assert snapshot.peer is not None
        assert ref is not None
        peer = self._moved.get(snapshot.peer, snapshot.peer)
        path = self._arena.hold(snapshot.lease_id, Hold.READ)
        if path is None:
            return False
        try:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                ref = replace(ref, safe_step=self._generations.safe_step(ref.attempt))
                deadline_s = self._deadline_s(ref.num_bytes)
                send_replica(peer, self._key(), ref, descriptor, pace=self._pace, deadline_s=deadline_s)
            finally:
                os.close(descriptor)
        finally:
            self._arena.release(snapshot.lease_id, Hold.READ)
        logger.info("%s: replicated to node %s", generation.where, peer.node_id[:12])
        return True

    def _deadline_s(self, num_bytes: int) -> float:
        capped = 0.0 if self._bytes_per_s is None else _NUM_SENDERS * num_bytes / self._bytes_per_s
        return _DEADLINE_S + max(capped * 2, num_bytes / _SLOWEST_BYTES_PER_S)

    def _note_failure(self, generation: Generation, error: Exception) -> None:
        reason = f"{generation.where}: no replica: {type(error).__name__}: {error}"
        number, last = generation.num_failures, len(_RETRY_S) - 1
        retry_at_s = time.monotonic() + _RETRY_S[min(number, last)]
        logger.info("%s", reason)  # the driver says it, if it lasts
        self._generations.set_failed(generation, reason, retry_at_s, is_stalled=number >= last)

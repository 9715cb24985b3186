"""The node's shared-memory buffers: who holds which file, for what, and how many there may be.

It neither encodes nor uploads, and knows neither which Attempt is current nor which Snapshot is still needed: the
Keeper decides who may lease and when a hold ends. What lies inside a buffer is storage.snapshot_format's concern, a
worker's mapping storage.buffer_map's, the directory storage.arena_directory's.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from storage.arena_buffer import Buffer, Hold
from storage.arena_directory import arena_directory, claim, process_incarnation, remove
from storage.buffer_map import map_file
from storage.errors import StorageError
from storage.keeper_protocol import BufferLease, LeaseRequest, SealedSnapshot
from storage.memory_shard import likely_tail_bytes

__all__ = [
    "BUFFERS_PER_RANK",
    "GENERATIONS_PER_RANK",
    "Arena",
    "Hold",
    "NoRoom",
    "arena_directory",
    "process_incarnation",
]

logger = logging.getLogger(__name__)

BUFFERS_PER_RANK: Final = 2  # one Snapshot in flight, one staged
GENERATIONS_PER_RANK: Final = 3  # one whole everywhere, one sealed, one being written
_GRAIN: Final = 1 << 16


class NoRoom(StorageError):
    """A budget, or the memory itself, is used up."""


class Arena:
    """Owns every buffer file of one Run on one node. Thread-safe; a first lease allocates outside the lock.

    ``generation_budget_bytes``: what generations and replicas may take of ``budget_bytes``; None: all.
    """

    def __init__(
        self,
        directory: Path,
        run_id: str,
        budget_bytes: int | None = None,
        incarnation: Callable[[int], int | None] = process_incarnation,
        *,
        generation_budget_bytes: int | None = None,
    ) -> None:
        self.directory = directory
        self._run_id = run_id
        self._incarnation = incarnation
        self._lock = threading.Lock()
        self._allocation = threading.Lock()
        self._buffers: list[Buffer] = []
        self._longest_tail = 0
        self._is_closed = False
        claim(directory, run_id, incarnation)
        space = os.statvfs(directory)
        self.budget_bytes = space.f_bavail * space.f_frsize * 9 // 10 if budget_bytes is None else budget_bytes
        self.limit_generations(self.budget_bytes if generation_budget_bytes is None else generation_budget_bytes)

    def limit_generations(self, num_bytes: int) -> None:
        """The most that generations and replicas may take from now on."""
        self.generation_budget_bytes = min(self.budget_bytes, num_bytes)

    @property
    def used_bytes(self) -> int:
        """Bytes of all buffers, free ones included."""
        with self._lock:
            return sum(buffer.capacity for buffer in self._buffers)

    def lease(self, request: LeaseRequest) -> BufferLease | None:
        """A pre-faulted buffer, the same one when asked again for the same step; None while the rank holds its share.

        Raises NoRoom for a generation, or a first Snapshot to be shipped, that does not fit the budget.
        """
        with self._lock:
            self._check_open(f"rank {request.rank} step {request.step}")
            incarnation = self._incarnation(request.pid)
            if incarnation is None:
                raise StorageError(
                    f"rank {request.rank} step {request.step}: process {request.pid} is not seen by the Keeper; "
                    "both must run on one node in one pid namespace"
                )
            self._reclaim(request)
            need = self._need(request)
            buffer = self._leased_already(request, need)
            if buffer is None:
                if not self._may_hold_more(request):
                    return None
                buffer = self._take_free(need, request.pid) or self._reserve_for(request, need)
                if buffer is None:
                    return None
                buffer.lease_id, buffer.request = secrets.token_hex(8), request
                buffer.incarnation, buffer.last_pid = incarnation, request.pid
            lease = BufferLease(lease_id=buffer.lease_id, path=str(buffer.path), num_bytes=request.num_bytes)
        self._allocate(buffer)
        return lease

    def is_short(self, request: LeaseRequest) -> bool:
        """Whether it is room that a Snapshot to be shipped has no buffer for, and none of its rank is on its way."""
        with self._lock:
            used = sum(buffer.capacity for buffer in self._buffers if buffer.lease_id)
            has_one = any(buffer.is_held_by(request) and buffer.is_shipment for buffer in self._buffers)
            return not has_one and used + request.num_bytes > self.budget_bytes

    def lease_for_replica(self, num_bytes: int, where: str) -> str:
        """The lease of a buffer that a replica comes into; the caller has it sealed, and ends it with `release`.

        Raises NoRoom. ``where`` names the replica in errors.
        """
        with self._lock:
            self._check_open(where)
            buffer = self._take_free(num_bytes, None) or self._reserve(
                num_bytes, where, is_replica=True, is_memory=True
            )
            buffer.lease_id, buffer.holds = secrets.token_hex(8), {Hold.KEEP}
            lease_id = buffer.lease_id
        self._allocate(buffer)
        return lease_id

    def seal(self, snapshot: SealedSnapshot) -> None:
        """From now on the buffer is the Keeper's. Raises StorageError unless it is leased for just this Snapshot."""
        with self._lock:
            buffer = self._find(snapshot.lease_id)
            held = buffer.request if buffer else None
            if buffer is None or held is None or buffer.holds:
                raise StorageError(
                    f"rank {snapshot.rank} step {snapshot.step}: lease {snapshot.lease_id} is not open any more; "
                    "give this Snapshot up and lease anew"
                )
            said = (snapshot.attempt, snapshot.step, snapshot.rank)
            step = max(held.step, snapshot.step) if held.is_generation else held.step
            if said != (held.attempt, step, held.rank) or not 0 < snapshot.num_bytes <= buffer.capacity:
                raise StorageError(
                    f"rank {snapshot.rank} step {snapshot.step}: seals {snapshot.num_bytes} bytes of {said}, but lease "
                    f"{snapshot.lease_id} is {buffer.capacity} bytes for {(held.attempt, held.step, held.rank)}"
                )
            buffer.request = replace(held, step=step)
            buffer.holds = {
                hold for hold, is_wanted in ((Hold.SHIP, snapshot.ship), (Hold.KEEP, snapshot.keep)) if is_wanted
            }

    def hold(self, lease_id: str, hold: Hold) -> Path | None:
        """One more reason to keep a sealed buffer, and its file; None when it is not sealed any more."""
        with self._lock:
            buffer = self._find(lease_id)
            if buffer is None or not buffer.holds:
                return None
            buffer.holds.add(hold)
            return buffer.path

    def is_only_kept(self, lease_id: str) -> bool:
        """Whether the buffer becomes free with its generation: it is neither read nor shipped just now."""
        with self._lock:
            buffer = self._find(lease_id)
            return buffer is not None and buffer.holds == {Hold.KEEP}

    def open(self, lease_id: str, num_bytes: int, *, writable: bool = False) -> memoryview:
        """View of the first ``num_bytes`` of a sealed buffer; drop it before `release`. ``writable``: a replica's."""
        with self._lock:
            buffer = self._find(lease_id)
            if buffer is None or not buffer.holds:
                raise StorageError(f"lease {lease_id} has no sealed buffer to read")
            if buffer.mapping is None:
                buffer.mapping = map_file(buffer.path, buffer.capacity, writable=buffer.is_replica)
            view = memoryview(buffer.mapping)[:num_bytes]
            return view if writable else view.toreadonly()

    def append(self, lease_id: str, offset: int, data: bytes) -> None:
        """Write behind what the worker wrote into a sealed buffer, which becomes longer where that needs it."""
        with self._lock:
            buffer = self._find(lease_id)
            if buffer is None or not buffer.holds:
                raise StorageError(f"lease {lease_id} has no sealed buffer to append to")
            self._longest_tail = max(self._longest_tail, len(data))
            more = offset + len(data) - buffer.capacity
            if more > 0:
                self._make_room(more, f"the index of {buffer.path}", is_memory=True)
            try:
                buffer.append(data, offset)
            except OSError as error:
                raise StorageError(f"{len(data)} bytes cannot be appended to {buffer.path}: {error}") from error

    def release(self, lease_id: str, hold: Hold = Hold.SHIP) -> bool:
        """End one hold; after the last the buffer is free, its pages warm. False when there was none: asking twice is
        safe."""
        with self._lock:
            buffer = self._find(lease_id)
            if buffer is None or (buffer.holds and hold not in buffer.holds):
                return False
            buffer.holds.discard(hold)
            if not buffer.holds:
                self._free(buffer)
            return True

    def give_back(self, lease_id: str) -> bool:
        """What a worker may release: a buffer it has not sealed. False otherwise."""
        with self._lock:
            buffer = self._find(lease_id)
            if buffer is None or buffer.holds:
                return False
            self._free(buffer)
            return True

    def close(self) -> None:
        """Remove the directory. Mappings of running workers stay valid until they drop them."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._buffers.clear()
            remove(self.directory)
        if self.directory.exists():
            logger.warning("run %s: arena %s could not be removed", self._run_id, self.directory)

    def _check_open(self, where: str) -> None:
        if self._is_closed:
            raise StorageError(f"{where}: the arena {self.directory} is closed")

    def _need(self, request: LeaseRequest) -> int:
        if not request.is_generation:
            return request.num_bytes
        return request.num_bytes + max(likely_tail_bytes(request.num_bytes), self._longest_tail * 5 // 4)

    def _find(self, lease_id: str) -> Buffer | None:
        return next((buffer for buffer in self._buffers if lease_id and buffer.lease_id == lease_id), None)

    def _reclaim(self, request: LeaseRequest) -> None:
        """Take back what dead processes leased, and what the asking process leased in an older Attempt."""
        for buffer in list(self._buffers):
            held = buffer.request
            if held is None or buffer.holds:
                continue
            if self._incarnation(held.pid) != buffer.incarnation:
                self._free(buffer)
            elif held.pid == request.pid and held.attempt.number < request.attempt.number:
                self._drop(buffer)  # a late write of its old thread goes to a file nobody else will ever see

    def _leased_already(self, request: LeaseRequest, need: int) -> Buffer | None:
        """The answer to an earlier call got lost: give the same one again."""
        for buffer in self._buffers:
            held = buffer.request
            if held and buffer.is_open and buffer.is_held_by(request) and held.pid == request.pid:
                if (held.step, held.is_generation) != (request.step, request.is_generation):
                    continue
                if buffer.capacity >= need:
                    return buffer
                self._drop(buffer)
                return None
        return None

    def _may_hold_more(self, request: LeaseRequest) -> bool:
        held = [buffer for buffer in self._buffers if buffer.is_held_by(request)]
        if request.is_generation:
            kept = [buffer for buffer in held if buffer.is_generation]
            is_full = len(kept) >= GENERATIONS_PER_RANK or len(held) >= GENERATIONS_PER_RANK + BUFFERS_PER_RANK
            most_open = 1  # the one being written
        else:
            kept = [buffer for buffer in held if buffer.is_shipment]
            is_full = len(kept) >= BUFFERS_PER_RANK
            most_open = 0
        if not is_full:
            return True
        # Two steps later an unsealed buffer can only be one whose lease never reached the worker.
        lost = [b for b in kept if b.is_open and b.request is not None and b.request.step < request.step]
        if len(lost) <= most_open:
            return False
        self._drop(lost[0])
        return True

    def _take_free(self, need: int, pid: int | None) -> Buffer | None:
        """``pid`` None: for a replica. Those keep to themselves: a worker's next lease is one it has mapped."""
        free = [b for b in self._buffers if not b.lease_id and b.is_replica == (pid is None)]
        for buffer in free:
            is_outgrown = buffer.last_pid == pid and buffer.capacity < need
            if is_outgrown or not buffer.path.exists():
                self._drop(buffer)
        left = [buffer for buffer in free if buffer in self._buffers]
        fitting = [buffer for buffer in left if buffer.capacity >= need]
        if pid is None and left and not fitting:
            self._drop(min(left, key=lambda b: b.capacity))  # a bigger one takes its place: never more than were used
        # The process that had it last has it mapped already.
        return min(fitting, key=lambda b: (b.last_pid != pid, b.capacity), default=None)

    def _reserve_for(self, request: LeaseRequest, need: int) -> Buffer | None:
        where = f"rank {request.rank} step {request.step}: a Snapshot"
        try:
            return self._reserve(need, where, is_replica=False, is_memory=request.is_generation)
        except NoRoom:
            older = any(b.request and b.request.attempt.number < request.attempt.number for b in self._buffers)
            if request.is_generation or not (older or any(b.is_held_by(request) for b in self._buffers)):
                raise
            return None

    def _reserve(self, need: int, where: str, *, is_replica: bool, is_memory: bool) -> Buffer:
        capacity = -(-need // _GRAIN) * _GRAIN
        self._make_room(capacity, where, is_memory=is_memory)
        path = self.directory / f"buffer-{secrets.token_hex(8)}"
        buffer = Buffer(path=path, capacity=capacity, is_replica=is_replica)
        self._buffers.append(buffer)
        return buffer

    def _make_room(self, more: int, where: str, *, is_memory: bool) -> None:
        """Drop free buffers until ``more`` bytes fit the budgets. Raises NoRoom when those in use leave no room."""
        in_use = [buffer for buffer in self._buffers if buffer.lease_id]
        shipped = sum(b.capacity for b in in_use if not (b.is_replica or b.is_generation))
        used = sum(buffer.capacity for buffer in in_use)
        limits = [(self.budget_bytes, 0)] + ([(self.generation_budget_bytes, shipped)] if is_memory else [])
        for budget, beside in limits:
            if used - beside + more > budget:
                raise NoRoom(
                    f"{where} needs {more} bytes of {self.directory}, {used - beside} of {budget} are in use; "
                    "give the node more shared memory or fewer workers"
                )
        for buffer in [buffer for buffer in self._buffers if not buffer.lease_id]:
            total = sum(other.capacity for other in self._buffers)
            if all(total - beside + more <= budget for budget, beside in limits):
                break
            self._drop(buffer)

    def _allocate(self, buffer: Buffer) -> None:
        if buffer.is_allocated:
            return  # warm: it does not wait for another's allocation
        with self._allocation:
            if buffer.is_allocated:
                return
            try:
                buffer.create()
            except OSError as error:
                with self._lock:
                    self._drop(buffer)
                # Others use this memory too, Ray's object store say: less may be left than when the budget was made.
                kind = NoRoom if error.errno in (errno.ENOSPC, errno.ENOMEM) else StorageError
                raise kind(f"no buffer of {buffer.capacity} bytes at {buffer.path}: {error}") from error
            with self._lock:
                if buffer not in self._buffers:  # its owner died, or the arena was closed, meanwhile
                    buffer.path.unlink(missing_ok=True)

    def _free(self, buffer: Buffer) -> None:
        buffer.lease_id, buffer.request = "", None
        buffer.holds.clear()
        if buffer.is_grown or not buffer.is_allocated:
            self._drop(buffer)

    def _drop(self, buffer: Buffer) -> None:
        buffer.mapping = None
        if buffer in self._buffers:
            self._buffers.remove(buffer)
        buffer.path.unlink(missing_ok=True)

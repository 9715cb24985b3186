"""The node's shared-memory buffers: who holds which file, how many there may be, and the workers' mappings of them.

It neither encodes nor uploads, and does not know which Attempt is current: the Keeper decides who may lease. What lies
inside a buffer is storage.snapshot_format's concern, a worker's mapping storage.buffer_map's.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from storage.buffer_map import map_file
from storage.errors import StorageError
from storage.keeper_protocol import BufferLease, LeaseRequest, SealedSnapshot

__all__ = ["BUFFERS_PER_RANK", "Arena", "arena_directory", "process_incarnation"]

logger = logging.getLogger(__name__)

BUFFERS_PER_RANK: Final = 2  # one Snapshot in flight, one staged
_PID_FILE: Final = "keeper.pid"
_GRAIN: Final = 1 << 16
_SAFE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")


def arena_directory(run_id: str, node_id: str) -> Path:
    """Where the Keeper of ``node_id`` keeps its buffers; the same path for every caller on that node."""
    for name in (run_id, node_id):
        if _SAFE_NAME.match(name) is None:
            raise ValueError(f"{name!r} cannot be part of an arena's directory name")
    return Path("/dev/shm") / f"raysume-{run_id}-{node_id}"


def process_incarnation(pid: int) -> int | None:
    """Start time of process ``pid`` in clock ticks, which tells a reused pid apart; None when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


@dataclass(slots=True, kw_only=True)
class _Buffer:
    path: Path
    capacity: int
    lease_id: str = ""
    request: LeaseRequest | None = None
    incarnation: int | None = None
    is_allocated: bool = False
    is_sealed: bool = False
    last_pid: int = 0
    mapping: mmap.mmap | None = None

    def is_held_by(self, request: LeaseRequest) -> bool:
        held = self.request
        return held is not None and held.attempt == request.attempt and held.rank == request.rank


class Arena:
    """Owns every buffer file of one Run on one node. Thread-safe; a first lease allocates outside the lock."""

    def __init__(
        self,
        directory: Path,
        run_id: str,
        budget_bytes: int | None = None,
        incarnation: Callable[[int], int | None] = process_incarnation,
    ) -> None:
        self.directory = directory
        self._run_id = run_id
        self._incarnation = incarnation
        self._lock = threading.Lock()
        self._allocation = threading.Lock()
        self._buffers: list[_Buffer] = []
        self._is_closed = False
        self._claim()
        space = os.statvfs(directory)
        self.budget_bytes = space.f_bavail * space.f_frsize * 9 // 10 if budget_bytes is None else budget_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of all buffers, free ones included."""
        with self._lock:
            return sum(buffer.capacity for buffer in self._buffers)

    def lease(self, request: LeaseRequest) -> BufferLease | None:
        """A pre-faulted buffer, the same one when asked again for the same step; None while the rank holds its two."""
        with self._lock:
            if self._is_closed:
                raise StorageError(f"rank {request.rank} step {request.step}: the arena {self.directory} is closed")
            incarnation = self._incarnation(request.pid)
            if incarnation is None:
                raise StorageError(
                    f"rank {request.rank} step {request.step}: process {request.pid} is not seen by the Keeper; "
                    "both must run on one node in one pid namespace"
                )
            self._reclaim(request)
            buffer = self._leased_already(request)
            if buffer is None:
                if not self._may_hold_more(request):
                    return None
                buffer = self._take_free(request) or self._reserve(request)
                if buffer is None:
                    return None
                buffer.lease_id, buffer.request, buffer.is_sealed = secrets.token_hex(8), request, False
                buffer.incarnation, buffer.last_pid = incarnation, request.pid
            lease = BufferLease(lease_id=buffer.lease_id, path=str(buffer.path), num_bytes=request.num_bytes)
        self._allocate(buffer)
        return lease

    def seal(self, snapshot: SealedSnapshot) -> None:
        """From now on the buffer is the Keeper's. Raises StorageError unless it is leased for just this Snapshot."""
        with self._lock:
            buffer = self._find(snapshot.lease_id)
            held = buffer.request if buffer else None
            if buffer is None or held is None or buffer.is_sealed:
                raise StorageError(
                    f"rank {snapshot.rank} step {snapshot.step}: lease {snapshot.lease_id} is not open any more; "
                    "give this Snapshot up and lease anew"
                )
            said = (snapshot.attempt, snapshot.step, snapshot.rank)
            if said != (held.attempt, held.step, held.rank) or not 0 < snapshot.num_bytes <= buffer.capacity:
                raise StorageError(
                    f"rank {snapshot.rank} step {snapshot.step}: seals {snapshot.num_bytes} bytes of {said}, but lease "
                    f"{snapshot.lease_id} is {buffer.capacity} bytes for {(held.attempt, held.step, held.rank)}"
                )
            buffer.is_sealed = True

    def open(self, lease_id: str, num_bytes: int) -> memoryview:
        """Read-only view of the first ``num_bytes`` of a sealed buffer; drop it before `release`."""
        with self._lock:
            buffer = self._find(lease_id)
            if buffer is None or not buffer.is_sealed:
                raise StorageError(f"lease {lease_id} has no sealed buffer to read")
            if buffer.mapping is None:
                buffer.mapping = map_file(buffer.path, buffer.capacity, writable=False)
            return memoryview(buffer.mapping)[:num_bytes]

    def release(self, lease_id: str) -> bool:
        """Put the buffer on the free list with its pages warm. False when it was not leased: asking twice is safe."""
        with self._lock:
            buffer = self._find(lease_id)
            if buffer is None:
                return False
            self._free(buffer)
            return True

    def give_back(self, lease_id: str) -> bool:
        """What a worker may release: a buffer it has not sealed. False otherwise."""
        with self._lock:
            buffer = self._find(lease_id)
            if buffer is None or buffer.is_sealed:
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
            _remove(self.directory)
        if self.directory.exists():
            logger.warning("run %s: arena %s could not be removed", self._run_id, self.directory)

    def _claim(self) -> None:
        """Make the directory ours; what Keepers of this Run that are gone left there and beside it is removed."""
        for other in self.directory.parent.glob(f"raysume-{self._run_id}-*"):
            words = _read_words(other / _PID_FILE)
            is_ours_to_judge = len(words) == 3 and words[2] == _pid_namespace()
            if is_ours_to_judge and other != self.directory and str(self._incarnation(int(words[0]))) != words[1]:
                _remove(other)
        if self.directory.is_symlink() or (self.directory.exists() and self.directory.stat().st_uid != os.geteuid()):
            raise StorageError(f"arena {self.directory} belongs to somebody else; remove it or use another run name")
        if self.directory.exists():
            words = _read_words(self.directory / _PID_FILE)
            if len(words) == 3 and str(self._incarnation(int(words[0]))) == words[1]:
                raise StorageError(f"arena {self.directory} belongs to the living Keeper with pid {words[0]}")
            logger.info("run %s: removing the arena %s of a Keeper that is gone", self._run_id, self.directory)
            _remove(self.directory)
        self.directory.mkdir(mode=0o700, parents=True)
        (self.directory / _PID_FILE).write_text(f"{os.getpid()} {self._incarnation(os.getpid())} {_pid_namespace()}")

    def _find(self, lease_id: str) -> _Buffer | None:
        return next((buffer for buffer in self._buffers if buffer.request and buffer.lease_id == lease_id), None)

    def _reclaim(self, request: LeaseRequest) -> None:
        """Take back what dead processes leased, and what the asking process leased in an older Attempt."""
        for buffer in list(self._buffers):
            held = buffer.request
            if held is None or buffer.is_sealed:
                continue
            if self._incarnation(held.pid) != buffer.incarnation:
                self._free(buffer)
            elif held.pid == request.pid and held.attempt.number < request.attempt.number:
                self._drop(buffer)  # a late write of its old thread goes to a file nobody else will ever see

    def _leased_already(self, request: LeaseRequest) -> _Buffer | None:
        """The answer to an earlier call got lost: give the same one again."""
        for buffer in self._buffers:
            held = buffer.request
            if held and not buffer.is_sealed and buffer.is_held_by(request) and held.pid == request.pid:
                if held.step != request.step:
                    continue
                if buffer.capacity >= request.num_bytes:
                    return buffer
                self._drop(buffer)
                return None
        return None

    def _may_hold_more(self, request: LeaseRequest) -> bool:
        held = [buffer for buffer in self._buffers if buffer.is_held_by(request)]
        for buffer in held:
            # Two steps later an unsealed buffer can only be one whose lease never reached the worker.
            if len(held) >= BUFFERS_PER_RANK and not buffer.is_sealed and buffer.request is not None:
                if buffer.request.step >= request.step:
                    return False
                self._drop(buffer)
                return True
        return len(held) < BUFFERS_PER_RANK

    def _take_free(self, request: LeaseRequest) -> _Buffer | None:
        free = [buffer for buffer in self._buffers if buffer.request is None]
        for buffer in free:
            is_outgrown = buffer.last_pid == request.pid and buffer.capacity < request.num_bytes
            if is_outgrown or not buffer.path.exists():
                self._drop(buffer)
        fitting = [b for b in free if b in self._buffers and b.capacity >= request.num_bytes]
        # The process that had it last has it mapped already.
        return min(fitting, key=lambda b: (b.last_pid != request.pid, b.capacity), default=None)

    def _reserve(self, request: LeaseRequest) -> _Buffer | None:
        capacity = -(-request.num_bytes // _GRAIN) * _GRAIN
        in_use = sum(buffer.capacity for buffer in self._buffers if buffer.request)
        if in_use + capacity > self.budget_bytes:
            older = any(b.request and b.request.attempt.number < request.attempt.number for b in self._buffers)
            if older or any(buffer.is_held_by(request) for buffer in self._buffers):
                return None
            raise StorageError(
                f"rank {request.rank} step {request.step}: a Snapshot needs {capacity} bytes of {self.directory}, "
                f"{in_use} of {self.budget_bytes} are in use; give the node more shared memory or fewer workers"
            )
        for buffer in [buffer for buffer in self._buffers if not buffer.request]:
            if sum(other.capacity for other in self._buffers) + capacity <= self.budget_bytes:
                break
            self._drop(buffer)
        buffer = _Buffer(path=self.directory / f"buffer-{secrets.token_hex(8)}", capacity=capacity)
        self._buffers.append(buffer)
        return buffer

    def _allocate(self, buffer: _Buffer) -> None:
        with self._allocation:
            if buffer.is_allocated:
                return
            try:
                descriptor = os.open(buffer.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
                try:
                    os.posix_fallocate(descriptor, 0, buffer.capacity)  # on tmpfs this makes the pages themselves
                finally:
                    os.close(descriptor)
            except OSError as error:
                with self._lock:
                    self._drop(buffer)
                raise StorageError(f"no buffer of {buffer.capacity} bytes at {buffer.path}: {error}") from error
            buffer.is_allocated = True
            with self._lock:
                if buffer not in self._buffers:  # its owner died, or the arena was closed, meanwhile
                    buffer.path.unlink(missing_ok=True)

    def _free(self, buffer: _Buffer) -> None:
        buffer.request, buffer.is_sealed = None, False
        if not buffer.is_allocated:
            self._drop(buffer)

    def _drop(self, buffer: _Buffer) -> None:
        buffer.mapping = None
        if buffer in self._buffers:
            self._buffers.remove(buffer)
        buffer.path.unlink(missing_ok=True)


def _remove(directory: Path) -> None:
    """Remove an arena, its pid file last: a removal cut short in between is taken up by the next Keeper."""
    with contextlib.suppress(OSError):  # what cannot be removed, the caller sees or another Keeper removes
        for path in directory.iterdir():
            if path.name != _PID_FILE:
                path.unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)


def _read_words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except FileNotFoundError:
        return []


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")

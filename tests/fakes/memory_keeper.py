"""Stands for a Keeper with a memory Tier: three generations a rank in files of one directory, and replicas by word.

No encoding, no store, no peer: `replicate` says that the replica is there. What it holds can be read and compared.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from storage.errors import KeeperUnreachable, StorageError
from storage.keeper_protocol import BufferLease, LeaseRequest, MemoryProgress, SealedSnapshot
from storage.keys import Attempt
from storage.snapshot_format import SnapshotHeader, read_header

__all__ = ["MemoryKeeper"]

NUM_GENERATIONS = 3
NUM_SHIPPED = 2


@dataclass
class _Buffer:
    path: Path
    request: LeaseRequest
    sealed: SealedSnapshot | None = None


class MemoryKeeper:
    """A MemoryPort. ``replicates``: every sealed generation has its replica at once."""

    def __init__(self, directory: Path, *, replicates: bool = True) -> None:
        self._directory, self._replicates = directory, replicates
        self._changed = threading.Condition()
        self._buffers: dict[str, _Buffer] = {}
        self._is_away = self._is_full = self._is_held = False
        self.replicated: set[tuple[int, int]] = set()
        self.requests: list[LeaseRequest] = []
        self.sealed: list[SealedSnapshot] = []
        self.threads: set[str] = set()

    def set(self, *, is_away: bool = False, is_full: bool = False, is_held: bool = False) -> None:
        """``is_away``: calls fail. ``is_full``: no lease is given. ``is_held``: a lease call does not return."""
        with self._changed:
            self._is_away, self._is_full, self._is_held = is_away, is_full, is_held
            self._changed.notify_all()

    def lease_buffer(self, request: LeaseRequest) -> BufferLease | None:
        with self._changed:
            self._called("lease_buffer")
            self.requests.append(request)
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._is_held, 30.0)
            self._drop_before(request)
            mine = [b for b in self._buffers.values() if b.request.rank == request.rank and self._like(b, request)]
            if self._is_full or len(mine) >= (NUM_GENERATIONS if request.is_generation else NUM_SHIPPED):
                return None
            lease_id = secrets.token_hex(8)
            path = self._directory / f"buffer-{lease_id}"
            with path.open("wb") as file:
                file.truncate(request.num_bytes)
            self._buffers[lease_id] = _Buffer(path, request)
            return BufferLease(lease_id=lease_id, path=str(path), num_bytes=request.num_bytes)

    def seal(self, snapshot: SealedSnapshot) -> None:
        with self._changed:
            self._called("seal")
            buffer = self._buffers.get(snapshot.lease_id)
            if buffer is None or buffer.sealed is not None or buffer.request.step > snapshot.step:
                raise StorageError(f"step {snapshot.step}: lease {snapshot.lease_id} is not open for it")
            buffer.sealed = snapshot
            self.sealed.append(snapshot)
            if self._replicates and snapshot.keep:
                self.replicated.add((snapshot.rank, snapshot.step))
            self._changed.notify_all()

    def release(self, lease_ids: Sequence[str]) -> None:
        with self._changed:
            self._called("release")
            for lease_id in lease_ids:
                self._buffers.pop(lease_id).path.unlink()
            self._changed.notify_all()

    def wait_replicated(self, attempt: Attempt, rank: int, step: int, timeout_s: float) -> MemoryProgress:
        with self._changed:
            self._called("wait_replicated")
            self._changed.wait_for(lambda: (rank, step) in self.replicated, timeout_s)
            done = [number for owner, number in self.replicated if owner == rank]
            mine = [sealed.step for sealed in self.sealed if sealed.rank == rank]
            return MemoryProgress(
                attempt=attempt,
                rank=rank,
                sealed_step=max(mine, default=-1),
                replicated_step=step if step in done else max((n for n in done if n < step), default=-1),
            )

    def replicate(self, rank: int, step: int) -> None:
        with self._changed:
            self.replicated.add((rank, step))
            self._changed.notify_all()

    def wait_for(self, condition: object, timeout_s: float = 20.0) -> None:
        """Until ``condition()`` holds, asked at every call of the port."""
        assert callable(condition)
        with self._changed:
            assert self._changed.wait_for(condition, timeout_s), "what the test waits for did not come"

    @property
    def kept_steps(self) -> list[int]:
        """Steps held in memory, in the order they were sealed."""
        with self._changed:
            held = [buffer.sealed for buffer in self._buffers.values() if buffer.sealed is not None]
            return [sealed.step for sealed in self.sealed if sealed in held and sealed.keep]

    @property
    def num_open(self) -> int:
        """Buffers that are leased and not sealed."""
        with self._changed:
            return sum(buffer.sealed is None for buffer in self._buffers.values())

    def read(self, step: int) -> tuple[SnapshotHeader, dict[str, NDArray[np.uint8]]]:
        """Header and bytes by tensor name of what was sealed for ``step``."""
        with self._changed:
            buffer = next(b for b in self._buffers.values() if b.sealed is not None and b.sealed.step == step)
            content = np.fromfile(buffer.path, dtype=np.uint8)
        header = read_header(content.tobytes())
        return header, {
            chunk.name: content[chunk.data_offset : chunk.data_offset + chunk.num_bytes] for chunk in header.chunks
        }

    def _called(self, verb: str) -> None:
        self.threads.add(threading.current_thread().name)
        if self._is_away:
            raise KeeperUnreachable(verb, "the test says so")

    def _like(self, buffer: _Buffer, request: LeaseRequest) -> bool:
        return buffer.request.is_generation == request.is_generation

    def _drop_before(self, request: LeaseRequest) -> None:
        for lease_id, buffer in list(self._buffers.items()):
            sealed = buffer.sealed
            if sealed is None or sealed.rank != request.rank or not sealed.keep:
                continue
            if sealed.step < request.safe_step or sealed.step in request.given_up:
                self._buffers.pop(lease_id).path.unlink()

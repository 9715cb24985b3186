"""Copies a captured state into the Keeper's shared memory and seals it: the only part of a save that stalls training.

Bounded in every direction: it waits for a buffer no longer than it is told, and a step that finds none is skipped.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

from storage.buffer_map import BufferMap
from storage.dcp_calls import save_tensors
from storage.dcp_writer import RankPlanner, SnapshotWriter
from storage.keeper_protocol import BufferLease, KeeperPort, LeaseRequest, SealedSnapshot
from storage.keys import Attempt
from storage.levels import LevelTable
from storage.snapshot_format import SnapshotHeader
from workers.snapshot import Capture

__all__ = ["StageResult", "Stager"]

logger = logging.getLogger(__name__)

_POLL_S = 0.02
_NUM_BUFFERS = 2  # one Snapshot in flight and one staged: what a Keeper lends a rank at a time
_HEADROOM = 16  # a sixteenth more than needed: plain state grows by a few digits from save to save


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """``staged`` False: no buffer came free in time and nothing was saved.

    ``stall_s``: how long training stood for the copy. Waiting for a buffer is not in it: only a step after which this
    World trains no more waits for one.
    """

    staged: bool
    stall_s: float
    num_bytes: int


class Stager:
    """One per process; outlives Attempts, so that mapped pages and the plan stay warm."""

    def __init__(self, keeper: KeeperPort, run_id: str, pid: int, levels: LevelTable | None = None) -> None:
        self._keeper = keeper
        self._run_id = run_id
        self._pid = pid
        self._levels = LevelTable() if levels is None else levels
        self._buffers = BufferMap()
        self._planner = RankPlanner()
        self._cancelled = threading.Event()
        self._warm_bytes = 0

    def warm(self, capture: Capture, *, attempt: Attempt, step: int, rank: int, world_size: int) -> None:
        """Lease, map and give back as many buffers as a rank may use at a time, so that no save meets cold memory.

        Does nothing when buffers of that size were warmed before; leaves a Keeper without free memory alone.
        """
        sizes: list[int] = []
        header = self._header(capture, attempt=attempt, step=step, rank=rank, world_size=world_size)
        writer = SnapshotWriter(header, sizes.append, self._give_back, self._buffers, self._levels)
        save_tensors(capture.tensors, writer, self._planner)
        if not sizes or sizes[0] <= self._warm_bytes:
            return
        num_bytes = sizes[0] + sizes[0] // _HEADROOM
        leases: list[BufferLease] = []
        try:
            for number in range(_NUM_BUFFERS):
                request = LeaseRequest(
                    run_id=self._run_id,
                    attempt=attempt,
                    step=step + number,
                    rank=rank,
                    pid=self._pid,
                    num_bytes=num_bytes,
                )
                lease = self._keeper.lease_buffer(request)
                if lease is None:
                    break
                leases.append(lease)
                self._buffers.open(lease.path, num_bytes)
            self._warm_bytes = num_bytes
        finally:
            if leases:
                self._keeper.release([lease.lease_id for lease in leases])

    def stage(
        self, capture: Capture, *, attempt: Attempt, step: int, rank: int, world_size: int, wait_s: float
    ) -> StageResult:
        """Copy ``capture`` and hand it over; after the return the caller may change every tensor."""
        started = time.monotonic()
        waited_s = 0.0
        header = self._header(capture, attempt=attempt, step=step, rank=rank, world_size=world_size)

        def lease(num_bytes: int) -> BufferLease | None:
            nonlocal waited_s
            asked = time.monotonic()
            request = LeaseRequest(
                run_id=self._run_id, attempt=attempt, step=step, rank=rank, pid=self._pid, num_bytes=num_bytes
            )
            found = self._wait_for_buffer(request, started + wait_s)
            waited_s = time.monotonic() - asked
            return found

        writer = SnapshotWriter(header, lease, self._give_back, self._buffers, self._levels)
        save_tensors(capture.tensors, writer, self._planner)
        stall_s = time.monotonic() - started - waited_s
        if writer.filled is None:
            logger.info("rank %d step %d: no buffer within %.1f s, save skipped", rank, step, wait_s)
            return StageResult(staged=False, stall_s=stall_s, num_bytes=0)
        filled = writer.filled
        self._keeper.seal(
            SealedSnapshot(
                lease_id=filled.lease.lease_id,
                run_id=self._run_id,
                attempt=attempt,
                step=step,
                rank=rank,
                world_size=world_size,
                num_bytes=filled.num_bytes,
                header_digest=filled.header_digest,
                stall_s=stall_s,
            )
        )
        return StageResult(staged=True, stall_s=time.monotonic() - started - waited_s, num_bytes=filled.num_bytes)

    def _header(self, capture: Capture, *, attempt: Attempt, step: int, rank: int, world_size: int) -> SnapshotHeader:
        return SnapshotHeader(
            run_id=self._run_id,
            attempt=attempt,
            step=step,
            rank=rank,
            world_size=world_size,
            chunks=(),
            shared_state=capture.shared_state,
            rank_state=capture.rank_state,
        )

    def cancel(self) -> None:
        """End a wait for a buffer at once, from another thread; `resume` undoes it."""
        self._cancelled.set()

    def resume(self) -> None:
        """Take Snapshots again, in the next Attempt."""
        self._cancelled.clear()

    def close(self) -> None:
        """Drop the mappings."""
        self.cancel()
        self._buffers.close()

    def _wait_for_buffer(self, request: LeaseRequest, deadline: float) -> BufferLease | None:
        while True:
            lease = self._keeper.lease_buffer(request)
            left_s = deadline - time.monotonic()
            if lease is not None or left_s <= 0 or self._cancelled.wait(min(_POLL_S, left_s)):
                return lease

    def _give_back(self, lease: BufferLease) -> None:
        self._keeper.release([lease.lease_id])

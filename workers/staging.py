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
from storage.snapshot_format import SnapshotHeader
from workers.snapshot import Capture

__all__ = ["StageResult", "Stager"]

logger = logging.getLogger(__name__)

_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """``staged`` False: no buffer came free in time and nothing was saved. ``stall_s``: how long training stood."""

    staged: bool
    stall_s: float
    num_bytes: int


class Stager:
    """One per process; outlives Attempts, so that mapped pages and the plan stay warm."""

    def __init__(self, keeper: KeeperPort, run_id: str, pid: int) -> None:
        self._keeper = keeper
        self._run_id = run_id
        self._pid = pid
        self._buffers = BufferMap()
        self._planner = RankPlanner()
        self._cancelled = threading.Event()

    def stage(
        self, capture: Capture, *, attempt: Attempt, step: int, rank: int, world_size: int, wait_s: float
    ) -> StageResult:
        """Copy ``capture`` and hand it over; after the return the caller may change every tensor."""
        started = time.monotonic()
        header = SnapshotHeader(
            run_id=self._run_id,
            attempt=attempt,
            step=step,
            rank=rank,
            world_size=world_size,
            chunks=(),
            shared_state=capture.shared_state,
            rank_state=capture.rank_state,
        )

        def lease(num_bytes: int) -> BufferLease | None:
            request = LeaseRequest(
                run_id=self._run_id, attempt=attempt, step=step, rank=rank, pid=self._pid, num_bytes=num_bytes
            )
            return self._wait_for_buffer(request, started + wait_s)

        writer = SnapshotWriter(header, lease, self._give_back, self._buffers)
        save_tensors(capture.tensors, writer, self._planner)
        stall_s = time.monotonic() - started
        if writer.filled is None:
            logger.warning("rank %d step %d: no buffer within %.1f s, save skipped", rank, step, wait_s)
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
        return StageResult(staged=True, stall_s=time.monotonic() - started, num_bytes=filled.num_bytes)

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

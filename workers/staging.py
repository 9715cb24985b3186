"""Copies a captured state into the Keeper's shared memory and seals it: the only part of a save that stalls training.

Bounded in every direction: it waits for a buffer no longer than it is told, and a step that finds none is skipped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from storage.buffer_map import BufferMap
from storage.dcp_writer import SnapshotPlanner, copy_chunks, local_parts
from storage.errors import StorageError
from storage.keeper_protocol import BufferLease, KeeperPort, LeaseRequest, SealedSnapshot
from storage.keys import Attempt
from storage.levels import LevelTable
from storage.snapshot_format import SnapshotHeader, SnapshotLayout, write_planned_header
from workers.replica_digest import Replicas, digests, names_of, unfilled
from workers.snapshot import MODEL, OPTIM, Capture

__all__ = ["Draft", "Drafted", "StageResult", "Stager"]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A Snapshot before its copy: what it says of itself, where each tensor goes, and the living memory of each.

    ``replicas``: what other ranks hold as well, to be digested beside the copy. ``versions``: tensors that must not
    change until then, with torch's count of their changes. ``ready``: what the device has to reach first.
    """

    header: SnapshotHeader
    layout: SnapshotLayout
    parts: dict[str, torch.Tensor]
    replicas: Replicas = field(default_factory=dict)
    versions: tuple[tuple[str, torch.Tensor, int], ...] = ()
    ready: torch.cuda.Event | None = None

    @property
    def num_bytes(self) -> int:
        return self.layout.num_bytes

    def fill(self, view: memoryview) -> str:
        """Copy everything; the digest of the header. Raises StorageError for a tensor that changed meanwhile."""
        with _side_stream(self.ready):
            copy_chunks(view, self.layout.chunks, self.parts)
            header = self.header
            if self.replicas:
                header = replace(header, rank_state={**header.rank_state, **digests(self.replicas)})
        changed = sorted({name for name, tensor, version in self.versions if tensor._version != version})
        if changed:
            raise StorageError(
                f"rank {self.header.rank} step {self.header.step}: {changed[0]} and {len(changed) - 1} more tensors "
                "changed while they were copied; only optimizer.step() may change weights after session.step_end()"
            )
        return write_planned_header(view, header, self.layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted:
    """What is known of a Draft without its tensors. ``passing_bytes``: the most that its copy takes of a device at a
    time, which gathers a tensor there that lies scattered before it goes to host memory."""

    layout: SnapshotLayout
    passing_bytes: int

    @classmethod
    def of(cls, draft: Draft) -> Drafted:
        scattered = (part.nbytes for part in draft.parts.values() if not (part.is_cpu or part.is_contiguous()))
        return cls(layout=draft.layout, passing_bytes=max(scattered, default=0))


@contextmanager
def _side_stream(ready: torch.cuda.Event | None) -> Iterator[None]:
    """Copies from a CUDA device run beside the training thread's stream, and have ended at the end of the block."""
    if ready is None:
        yield
        return
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_event(ready)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


class Stager:
    """One per process; outlives Attempts, so that mapped pages and the layout stay warm."""

    def __init__(
        self,
        keeper: KeeperPort,
        run_id: str,
        pid: int,
        levels: LevelTable | None = None,
        *,
        compares_replicas: bool = True,
    ) -> None:
        self._keeper = keeper
        self._compares_replicas = compares_replicas
        self._run_id = run_id
        self._pid = pid
        self._buffers = BufferMap()
        self._planner = SnapshotPlanner(LevelTable() if levels is None else levels)
        self._cancelled = threading.Event()
        self._warm_bytes = 0
        self.drafted: Drafted | None = None
        """The newest, None before the first."""

    @property
    def keeper(self) -> KeeperPort:
        return self._keeper

    @property
    def buffers(self) -> BufferMap:
        return self._buffers

    def draft(self, capture: Capture, *, attempt: Attempt, step: int, rank: int, world_size: int) -> Draft:
        """Find the place of everything in ``capture``. Copies nothing."""
        header, layout = self._lay_out(capture, attempt, step, rank, world_size)
        draft = Draft(
            header=header, layout=layout, parts=local_parts(capture.tensors), replicas=self._compared(capture)
        )
        self.drafted = Drafted.of(draft)
        return draft

    def draft_apart(self, capture: Capture, *, attempt: Attempt, step: int, rank: int, world_size: int) -> Draft:
        """The same with copies of all that may change before the optimizer's next step: what only that one changes,
        parameters and its own state, is left to be copied until then."""
        header, layout = self._lay_out(capture, attempt, step, rank, world_size)
        late = {name: tensor for name, tensor in capture.tensors.items() if _is_updated(name, tensor)}
        parts = local_parts(capture.tensors)
        early = {name: part.to("cpu", copy=True) for name, part in parts.items() if name not in late}
        replicas = self._compared(capture)
        alike = [(name, one) for tensors in replicas.values() for name, one in tensors.items() if name not in late]
        ready = None
        if any(part.is_cuda for part in parts.values()):
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
        draft = Draft(
            header=header,
            layout=layout,
            parts=parts | early,
            replicas=replicas,
            # A DTensor counts what is done to it, its local part what is done to that.
            versions=(
                *((name, one, one._version) for name in late for one in (late[name], parts[name])),
                *((name, one, one._version) for name, one in alike),
            ),
            ready=ready,
        )
        self.drafted = Drafted.of(draft)
        return draft

    def _compared(self, capture: Capture) -> Replicas:
        return capture.replicas if self._compares_replicas else {}

    def _lay_out(
        self, capture: Capture, attempt: Attempt, step: int, rank: int, world_size: int
    ) -> tuple[SnapshotHeader, SnapshotLayout]:
        rank_state = dict(capture.rank_state)
        if replicas := self._compared(capture):
            rank_state |= unfilled(replicas) | (names_of(replicas) if rank == 0 else {})
        header = SnapshotHeader(
            run_id=self._run_id,
            attempt=attempt,
            step=step,
            rank=rank,
            world_size=world_size,
            chunks=(),
            shared_state=capture.shared_state,
            rank_state=rank_state,
        )
        return header, self._planner.plan(capture.tensors, header)

    def request(self, draft: Draft, *, num_bytes: int | None = None, later: int = 0) -> LeaseRequest:
        """For a buffer that holds ``draft``, or a Snapshot of ``num_bytes`` that comes ``later`` steps after it."""
        header = draft.header
        return LeaseRequest(
            run_id=self._run_id,
            attempt=header.attempt,
            step=header.step + later,
            rank=header.rank,
            pid=self._pid,
            num_bytes=draft.num_bytes if num_bytes is None else num_bytes,
        )

    def warm(
        self,
        capture: Capture,
        *,
        attempt: Attempt,
        step: int,
        rank: int,
        world_size: int,
    ) -> None:
        """Lease, map and give back as many buffers as a rank may use at a time, so that no save meets cold memory.

        Does nothing when buffers of that size were warmed before; leaves a Keeper without free memory alone.
        """
        draft = self.draft(capture, attempt=attempt, step=step, rank=rank, world_size=world_size)
        if draft.num_bytes <= self._warm_bytes:
            return
        num_bytes = draft.num_bytes + draft.num_bytes // _HEADROOM
        leases: list[BufferLease] = []
        try:
            for number in range(_NUM_BUFFERS):
                request = self.request(draft, num_bytes=num_bytes, later=number)
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
        self,
        capture: Capture,
        *,
        attempt: Attempt,
        step: int,
        rank: int,
        world_size: int,
        wait_s: float,
        bounded: bool = False,
        stalled_s: float = 0.0,
    ) -> StageResult:
        """Copy ``capture`` and hand it over; after the return the caller may change every tensor. ``bounded``: see
        SealedSnapshot. ``stalled_s``: how long training has stood for this save before."""
        started = time.monotonic()
        draft = self.draft(capture, attempt=attempt, step=step, rank=rank, world_size=world_size)
        request, asked = self.request(draft), time.monotonic()
        lease = self._wait_for_buffer(request, started + wait_s)
        waited_s = time.monotonic() - asked
        if lease is None:
            logger.info("rank %d step %d: no buffer within %.1f s, save skipped", rank, step, wait_s)
            return StageResult(staged=False, stall_s=time.monotonic() - started - waited_s, num_bytes=0)
        digest = self.fill(lease, draft)
        stall_s = stalled_s + time.monotonic() - started - waited_s
        sealed = self.sealed(request, lease, digest, world_size=world_size, stall_s=stall_s)
        self._keeper.seal(replace(sealed, bounded=bounded))
        return StageResult(staged=True, stall_s=time.monotonic() - started - waited_s, num_bytes=draft.num_bytes)

    def fill(self, lease: BufferLease, draft: Draft) -> str:
        """Copy ``draft`` into the leased buffer; the digest of its header. Gives the buffer back when it fails."""
        try:
            return draft.fill(self._buffers.open(lease.path, draft.num_bytes))
        except BaseException:
            self._keeper.release([lease.lease_id])
            raise

    def sealed(
        self, request: LeaseRequest, lease: BufferLease, header_digest: str, *, world_size: int, stall_s: float
    ) -> SealedSnapshot:
        """The word that the Snapshot ``lease`` was ``request``ed for lies whole in it."""
        return SealedSnapshot(
            lease_id=lease.lease_id,
            run_id=request.run_id,
            attempt=request.attempt,
            step=request.step,
            rank=request.rank,
            world_size=world_size,
            num_bytes=request.num_bytes,
            header_digest=header_digest,
            stall_s=stall_s,
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


def _is_updated(name: str, tensor: torch.Tensor) -> bool:
    """Whether only an optimizer's step changes this tensor."""
    return name.startswith(OPTIM) or (name.startswith(MODEL) and isinstance(tensor, nn.Parameter))

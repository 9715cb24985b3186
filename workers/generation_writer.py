"""One rank's side thread of the memory Tier: it leases ahead, copies and seals.

The training thread makes no call of a Keeper for a generation: it hands a Ticket over and, at most, waits for the copy.
What finds no buffer in time is left out, counted and said once. Which steps are taken is decided elsewhere.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from storage.errors import KeeperUnreachable, StorageError
from storage.keeper_protocol import BufferLease, LeaseRequest, MemoryPort, TransportAddress
from workers.memory_ticket import Ticket
from workers.replica_watch import ReplicaWatch
from workers.staging import Stager

__all__ = ["GenerationWriter"]

_log = logging.getLogger(__name__)

_POLL_S: Final = 0.01  # between the first two questions for a buffer; the pause doubles
_LONGEST_POLL_S: Final = 0.5
_CHECK_S: Final = 0.2
_REMEMBERED: Final = 32


class GenerationWriter:
    """One Attempt's. `close` may be called from any thread, the other public methods from the training thread."""

    def __init__(
        self, stager: Stager, keeper: MemoryPort, *, peer: TransportAddress | None, world_size: int, name: str
    ) -> None:
        self._stager, self._keeper, self._peer, self._name = stager, keeper, peer, name
        self._world_size = world_size
        self._changed = threading.Condition()
        self._ticket: Ticket | None = None
        self._next: LeaseRequest | None = None  # what to ask ahead for
        self._stock: BufferLease | None = None  # the writing thread's alone
        self._lost: deque[str] = deque(maxlen=_REMEMBERED)  # leases whose seal or release failed
        self._safe_step = -1
        self._given_up: tuple[int, ...] = ()
        self._replicas = ReplicaWatch(keeper, name)
        self._left_out: deque[int] = deque(maxlen=_REMEMBERED)
        self._num_left_out = 0
        self._is_closing = self._is_warm = False
        self._trouble: str | None = None
        self._said = ""
        self._thread = threading.Thread(target=self._run, name=f"{name}-memory", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._replicas.start()

    @property
    def num_left_out(self) -> int:
        """Snapshots that should be in memory and are not."""
        with self._changed:
            return self._num_left_out

    def submit(self, ticket: Ticket, check: Callable[[], None]) -> None:
        """Begin with it at once. It is over already when the one before is still being handed over, unless it has time:
        then ``check`` is called while waiting and may raise."""
        while not (is_taken := self._submit(ticket)) and math.isfinite(ticket.until):
            check()
            if time.monotonic() >= ticket.until:
                break
        if not is_taken:
            self._leave_out(ticket, "the one before it is still being handed over")

    def _submit(self, ticket: Ticket) -> bool:
        with self._changed:
            if math.isfinite(ticket.until):
                left_s = max(0.0, ticket.until - time.monotonic())
                self._changed.wait_for(lambda: self._ticket is None or self._trouble, min(_CHECK_S, left_s))
            if self._trouble is not None:
                raise StorageError(f"{self._name}: its side thread of the memory Tier broke: {self._trouble}")
            if self._ticket is not None or self._is_closing:
                return False
            self._ticket = ticket
            self._changed.notify_all()
            return True

    def note_safe(self, safe_step: int, given_up: tuple[int, ...]) -> None:
        """Everything older than ``safe_step`` may go, and the steps ``given_up``."""
        with self._changed:
            self._safe_step, self._given_up = safe_step, given_up

    def is_replicated(self, step: int) -> bool:
        """Whether this rank's generation of ``step`` is known to have its replica."""
        return self._replicas.is_replicated(step)

    def is_left_out(self, step: int) -> bool:
        """Whether this rank has no generation of ``step`` and will not get one."""
        with self._changed:
            is_left_out = step in self._left_out
        return is_left_out or self._replicas.is_lost(step)

    def close(self, timeout_s: float) -> bool:
        """Let go of every tensor. False when a copy did not end in time. The threads end after their last call."""
        with self._changed:
            self._is_closing = True
            ticket = self._ticket
            self._changed.notify_all()
        self._replicas.close()
        if ticket is None or ticket.take_back():
            return True
        until = time.monotonic() + timeout_s
        while ticket.is_wanted and time.monotonic() < until:
            ticket.is_over_within(0.01)
        return not ticket.is_wanted

    def _run(self) -> None:
        try:
            self._write()
        except Exception as error:  # noqa: BLE001  the thread's outermost edge: the training thread raises it
            _log.exception("%s: the side thread of the memory Tier broke", self._name)
            with self._changed:
                self._trouble = f"{type(error).__name__}: {error}"
                ticket, self._ticket = self._ticket, None
            if ticket is not None:
                ticket.end(is_sealed=False)

    def _write(self) -> None:
        while (ticket := self._next_ticket()) is not None:
            self._carry_out(ticket)
            with self._changed:
                self._ticket = None
                self._changed.notify_all()
        self._return_stock()

    def _next_ticket(self) -> Ticket | None:
        """Wait for one, and meanwhile get a buffer for it. None: closing."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing or self._ticket or self._next)
                if self._is_closing:
                    return None
                if self._ticket is not None:
                    return self._ticket
                request, self._next = self._next, None
            if request is not None and self._stock is None:
                self._stock_up(request)

    def _stock_up(self, request: LeaseRequest) -> None:
        """Have a buffer ready, mapped; the first time also touch the third one that a rank may hold."""
        try:
            self._stock = self._ask(request)
            if self._stock is None:
                return
            self._stager.buffers.open(self._stock.path, request.num_bytes)
            if not self._is_warm:
                other = self._ask(replace(request, step=request.step + 1))
                if other is not None:
                    self._stager.buffers.open(other.path, request.num_bytes)
                    self._release(other)
                self._is_warm = True
        except StorageError as error:  # asked again, with a Snapshot that waits for it
            self._say(f"no buffer lies ready: {error}")

    def _carry_out(self, ticket: Ticket) -> None:
        try:
            lease, is_kept = self._lease_for(ticket)
        except KeeperUnreachable as error:
            self._leave_out(ticket, str(error))
            return
        except StorageError as error:
            self._leave_out(ticket, str(error), error)
            return
        try:
            digest = None if lease is None else self._copy(ticket, lease)
            if lease is None or digest is None:
                self._leave_out(ticket, "no buffer came free in time")
            else:
                self._seal(ticket, lease, digest, is_kept=is_kept)
        except StorageError as error:  # a Keeper that has died meanwhile knows nothing of the lease
            self._leave_out(ticket, str(error))

    def _lease_for(self, ticket: Ticket) -> tuple[BufferLease | None, bool]:
        """A buffer, and whether it is one of the memory Tier's: a save for the store alone is better than none."""
        stock, self._stock = self._stock, None
        if stock is not None and Path(stock.path).exists():  # else its Keeper is gone
            if stock.num_bytes >= ticket.request.num_bytes:
                return stock, True
            self._release(stock)
        pause_s = _POLL_S
        while True:
            for is_generation in (True, False) if ticket.ship else (True,):
                lease = self._ask(replace(ticket.request, is_generation=is_generation))
                if lease is not None:
                    return lease, is_generation
            ticket.note_refused()
            with self._changed:
                left_s = ticket.until - time.monotonic()
                if left_s <= 0 or self._is_closing or not ticket.is_wanted:
                    return None, False
                self._changed.wait_for(lambda: self._is_closing, min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)

    def _ask(self, request: LeaseRequest) -> BufferLease | None:
        with self._changed:
            request = replace(request, safe_step=self._safe_step, given_up=self._given_up)
        try:
            if self._lost:
                self._keeper.release(tuple(self._lost))
                self._lost.clear()
            return self._keeper.lease_buffer(request)
        except KeeperUnreachable as error:
            self._say(f"no buffer: {error}")
            return None

    def _release(self, lease: BufferLease) -> None:
        try:
            self._keeper.release([lease.lease_id])
        except StorageError:
            self._lost.append(lease.lease_id)
            raise

    def _copy(self, ticket: Ticket, lease: BufferLease) -> str | None:
        """The digest of the header; None when the Snapshot was taken back meanwhile."""
        draft = ticket.begin_copy()
        if draft is None:
            self._stock = lease
            return None
        try:
            return self._stager.fill(lease, draft)
        finally:
            del draft
            ticket.end_copy()

    def _seal(self, ticket: Ticket, lease: BufferLease, digest: str, *, is_kept: bool) -> None:
        stall_s = ticket.stalled_s + ticket.stall_s
        sealed = self._stager.sealed(ticket.request, lease, digest, world_size=self._world_size, stall_s=stall_s)
        peer = self._peer if is_kept else None
        try:
            self._keeper.seal(replace(sealed, ship=ticket.ship, keep=is_kept, peer=peer, bounded=ticket.bounded))
        except StorageError:
            self._lost.append(lease.lease_id)
            raise
        with self._changed:
            if not is_kept:
                self._note_left_out(ticket.step)
            self._next = replace(ticket.request, step=ticket.step + 1, is_generation=True)
            self._said = ""
            self._changed.notify_all()
        if is_kept:
            self._replicas.add(ticket.request)
        ticket.end(is_sealed=True)

    def _leave_out(self, ticket: Ticket, reason: str, error: StorageError | None = None) -> None:
        with self._changed:
            self._note_left_out(ticket.step)
            is_closing = self._is_closing
        if not is_closing:
            self._say(f"no Snapshot in memory: {reason}", step=ticket.step)
        ticket.end(is_sealed=False, error=error)

    def _note_left_out(self, step: int) -> None:
        self._num_left_out += 1
        self._left_out.append(step)

    def _say(self, what: str, step: int | None = None) -> None:
        """Once, until it works again."""
        with self._changed:
            is_new, self._said = self._said != what, what
        if is_new:
            _log.warning("%s%s: %s", self._name, "" if step is None else f" step {step}", what)

    def _return_stock(self) -> None:
        stock, self._stock = self._stock, None
        if stock is not None:
            try:
                self._keeper.release([stock.lease_id])
            except StorageError as error:  # the Keeper takes it back when a newer Attempt leases
                _log.info("%s: a buffer was not given back: %s", self._name, error)

"""One Snapshot on its way into memory: handed over by the training thread, carried out by a side thread.

It says when the tensors may change again and how it ended. Leasing, copying and sealing are `generation_writer`'s.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from storage.keeper_protocol import LeaseRequest
from workers.staging import Draft

__all__ = ["Ticket"]

_CHECK_S: Final = 0.2


class Ticket:
    """``ship``: it is to be carried to the store as well, ``bounded``: in the cheaper form. ``until``: how long a
    buffer is waited for, by the monotonic clock; inf: until it is taken back. ``stalled_s``: how long training stood
    for the save before there was a Snapshot; no part of `stall_s`, which is the copy's."""

    def __init__(
        self,
        draft: Draft,
        request: LeaseRequest,
        *,
        ship: bool,
        until: float,
        bounded: bool = False,
        stalled_s: float = 0.0,
    ) -> None:
        self.request, self.ship, self.until, self.bounded = request, ship, until, bounded
        self.stalled_s = stalled_s
        self._changed = threading.Condition()
        self._draft: Draft | None = draft
        self._is_copying = self._is_refused = self._is_over = self._is_sealed = False
        self._error: Exception | None = None
        self._stall_s = 0.0
        self._waiting_since: float | None = None

    @property
    def step(self) -> int:
        return self.request.step

    @property
    def stall_s(self) -> float:
        """How long training has stood still for it until now."""
        with self._changed:
            return self._stall_s

    # The training thread's side

    def add_stall(self, seconds: float) -> None:
        with self._changed:
            self._stall_s += seconds

    def take_back(self, grace_s: float = 0.0) -> bool:
        """Give it up unless its copy has begun. True when it has not: the tensors may change. Until it is known whether
        there is a buffer, ``grace_s`` is waited."""
        with self._changed:
            if grace_s and not self._is_decided():
                began_at = time.monotonic()
                self._changed.wait_for(self._is_decided, grace_s)
                self._stall_s += time.monotonic() - began_at
            if self._is_copying:
                return False
            self._draft = None
            self._changed.notify_all()
            return True

    def wait_copied(self, check: Callable[[], None]) -> None:
        """Return when the tensors may change. ``check`` is called while waiting and may raise."""
        with self._changed:
            if self._draft is not None:
                self._waiting_since = time.monotonic()
        self._wait(lambda: self._draft is None, check)

    def is_over_within(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._is_over, timeout_s)

    def wait_sealed(self, check: Callable[[], None]) -> bool:
        """Whether it was sealed, once that is decided."""
        self._wait(lambda: self._is_over, check)
        return self.result()

    def result(self) -> bool:
        """Whether it was sealed. Raises what the Keeper refused a Snapshot that was to be carried to the store with."""
        if self._error is not None and self.ship:
            raise self._error
        return self._is_sealed

    # The side thread's

    @property
    def is_wanted(self) -> bool:
        with self._changed:
            return self._draft is not None

    def note_refused(self) -> None:
        """There is no buffer at present."""
        with self._changed:
            self._is_refused = True
            self._changed.notify_all()

    def begin_copy(self) -> Draft | None:
        """There is a buffer. None: it was taken back."""
        with self._changed:
            self._is_copying = self._draft is not None
            self._changed.notify_all()
            return self._draft

    def end_copy(self) -> None:
        """The tensors are neither looked at nor held any more."""
        with self._changed:
            self._draft = None
            if self._waiting_since is not None:
                self._stall_s += time.monotonic() - self._waiting_since
                self._waiting_since = None
            self._changed.notify_all()

    def end(self, *, is_sealed: bool, error: Exception | None = None) -> None:
        with self._changed:
            self._draft, self._is_over, self._is_sealed, self._error = None, True, is_sealed, error
            self._changed.notify_all()

    def _is_decided(self) -> bool:
        return self._is_copying or self._is_refused or self._draft is None

    def _wait(self, is_reached: Callable[[], bool], check: Callable[[], None]) -> None:
        while True:
            with self._changed:
                if self._changed.wait_for(is_reached, _CHECK_S):
                    return
            check()

"""Keeps the Run's Lease alive from a thread of the driver and says when it was lost.

Which driver may hold it is storage.lease's business; within one cluster the coordinator's actor name excludes already.

The rule for a store that is away: a Lease that cannot be renewed is not lost. It is lost only once the store shows that
another driver took it. Until then this driver trains on, cut off or not, and that is safe: it begins no Attempt, which
takes a plan and a Journal entry from the store, and what it commits later is refused or void when another driver, under
a higher Attempt, has gone on meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
from types import TracebackType
from typing import Protocol, Self

from storage.errors import LeaseHeld, StorageError

__all__ = ["LEASE_TTL_S", "DriverLease", "HeldLease"]

_log = logging.getLogger(__name__)
LEASE_TTL_S = 10.0
_CLOSE_S = 10.0


class HeldLease(Protocol):
    """What this file needs of storage.lease.Lease."""

    def renew(self) -> None: ...

    def release(self) -> None: ...


class DriverLease:
    """Renews every ``interval_s`` until closed; sets ``lost`` when another driver has taken the Run over.

    One failed renewal is nothing to tell; ``warn_after_s`` of them are told once.
    """

    def __init__(self, lease: HeldLease, interval_s: float, *, warn_after_s: float = 10.0) -> None:
        self._lease = lease
        self._interval_s, self._warn_after_s = interval_s, warn_after_s
        self._has_warned = False
        self.lost = threading.Event()
        self._closed = threading.Event()
        self._failing_since: float | None = None
        self._thread = threading.Thread(target=self._keep, name="driver-lease", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closed.set()
        self._thread.join(timeout=_CLOSE_S)
        if self.lost.is_set():
            return
        if self._failing_since is not None:
            _log.warning("the lease cannot be given back while the store is away; it will expire")
            return
        try:
            self._lease.release()
        except StorageError as failure:
            _log.warning("the lease could not be given back and will expire: %s", failure)

    def _keep(self) -> None:
        while not self._closed.wait(self._interval_s):
            try:
                self._lease.renew()
            except LeaseHeld as error:
                _log.error("%s", error)
                self.lost.set()
                return
            except StorageError as error:
                self._note_failure(error)
            else:
                self._note_success()

    def _note_failure(self, error: StorageError) -> None:
        if self._failing_since is None:
            self._failing_since = time.monotonic()
        failing_s = time.monotonic() - self._failing_since
        if failing_s < self._warn_after_s or self._has_warned:
            _log.debug("the lease cannot be renewed: %s", error)
            return
        self._has_warned = True
        _log.warning("the lease could not be renewed for %.0f s, which is tried on and on: %s", failing_s, error)

    def _note_success(self) -> None:
        if self._failing_since is not None and self._has_warned:
            _log.info("the lease is renewed again after %.0f s", time.monotonic() - self._failing_since)
        self._failing_since, self._has_warned = None, False

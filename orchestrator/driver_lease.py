"""Keeps the Run's Lease alive from a thread of the driver and says when it was lost.

Which driver may hold it is storage.lease's business; within one cluster the coordinator's actor name excludes already.
"""

from __future__ import annotations

import logging
import threading
from types import TracebackType
from typing import Protocol, Self

from storage.errors import LeaseHeld, StorageError

__all__ = ["DriverLease", "HeldLease"]

_log = logging.getLogger(__name__)


class HeldLease(Protocol):
    """What this file needs of storage.lease.Lease."""

    def renew(self) -> None: ...

    def release(self) -> None: ...


class DriverLease:
    """Renews every ``interval_s`` until closed; sets ``lost`` when another driver has taken the Run over."""

    def __init__(self, lease: HeldLease, interval_s: float) -> None:
        self._lease = lease
        self._interval_s = interval_s
        self.lost = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="driver-lease", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closed.set()
        self._thread.join(timeout=30.0)
        if self.lost.is_set():
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
                _log.warning("lease: the store does not answer, trying again: %s", error)

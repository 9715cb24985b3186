"""The spool as the Shipper uses it: a trouble of the disk is said, and costs a second upload or a file, never a Shard.

A Shard that the disk does not take goes through memory. That, and which one makes way where it is full, is the
Shipper's to see to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager

from storage.direct_io import DiskFull, FileWriter
from storage.errors import StorageError
from storage.manifest import Receipt
from storage.spool import Spool, SpoolEntry

__all__ = ["LenientSpool"]

logger = logging.getLogger(__name__)


class LenientSpool:
    """``spool`` None: there is no local disk. ``note_error``: takes what the Keeper's status says last."""

    def __init__(self, spool: Spool | None, note_error: Callable[[str], None]) -> None:
        self._spool, self._note_error = spool, note_error
        self._has_said_no_disk = False

    @property
    def is_there(self) -> bool:
        return self._spool is not None

    @property
    def used_bytes(self) -> int:
        return 0 if self._spool is None else self._spool.used_bytes

    def entries(self) -> tuple[SpoolEntry, ...]:
        return () if self._spool is None else self._spool.entries()

    def add(self, key: str, need: int, write: Callable[[FileWriter], Receipt], *, where: str) -> SpoolEntry | None:
        """None where the disk fails the Shard of ``where``. Raises DiskFull."""
        assert self._spool is not None
        try:
            entry = self._spool.add(key, need, write)
        except DiskFull:
            raise
        except StorageError as error:
            self.say_no_disk(where, error)
            return None
        self._has_said_no_disk = False
        return entry

    def say_no_disk(self, where: str, error: StorageError) -> None:
        """Once, until it works again: the Shard of ``where`` goes through memory."""
        if not self._has_said_no_disk:
            logger.warning("%s: kept in memory until it is uploaded: %s", where, error)
        self._has_said_no_disk = True
        self._note_error(f"local disk: {error}")

    def open(self, key: str) -> AbstractContextManager[memoryview]:
        assert self._spool is not None
        return self._spool.open(key)

    def mark_uploaded(self, key: str, receipt: Receipt) -> None:
        self._try(lambda spool: spool.mark_uploaded(key, receipt))

    def mark_acknowledged(self, key: str) -> None:
        self._try(lambda spool: spool.mark_acknowledged(key))

    def drop(self, key: str) -> None:
        self._try(lambda spool: spool.drop(key))

    def close(self, *, keep_unsent: bool) -> None:
        """The files go too, but with ``keep_unsent`` stay when something is unsent."""
        if self._spool is not None:
            self._spool.close(remove=not (keep_unsent and self._spool.has_unsent))

    def _try(self, change: Callable[[Spool], None]) -> None:
        if self._spool is None:
            return
        try:
            change(self._spool)
        except (OSError, StorageError) as error:
            logger.warning("local disk: %s", error)
            self._note_error(f"local disk: {error}")

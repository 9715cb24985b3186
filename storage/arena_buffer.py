"""One shared-memory file of an arena: who has it, for what, and its pages.

It decides nothing and has no lock: its arena does both.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path

from storage.keeper_protocol import LeaseRequest

__all__ = ["Buffer", "Hold"]


class Hold(Enum):
    """Why a sealed buffer is not free: to be shipped, kept as a generation or replica, read by a replication thread."""

    SHIP = auto()
    KEEP = auto()
    READ = auto()


@dataclass(slots=True, kw_only=True, eq=False)
class Buffer:
    """Free while ``lease_id`` is empty, the leaseholder's while ``holds`` is. ``request`` None in use: a replica's."""

    path: Path
    capacity: int
    is_replica: bool
    lease_id: str = ""
    request: LeaseRequest | None = None
    incarnation: int | None = None
    is_allocated: bool = False
    is_grown: bool = False  # longer than its worker has mapped it: not to be leased again
    holds: set[Hold] = field(default_factory=set)
    last_pid: int = 0
    mapping: mmap.mmap | None = None

    def is_held_by(self, request: LeaseRequest) -> bool:
        held = self.request
        return held is not None and held.attempt == request.attempt and held.rank == request.rank

    @property
    def is_open(self) -> bool:
        """Leased by a worker that has not sealed it."""
        return self.request is not None and not self.holds

    @property
    def is_generation(self) -> bool:
        """Kept in memory, or leased to be."""
        return Hold.KEEP in self.holds or (self.is_open and self.request is not None and self.request.is_generation)

    @property
    def is_shipment(self) -> bool:
        """On its way to the store, or leased to be."""
        return Hold.SHIP in self.holds or (self.is_open and not self.is_generation)

    def create(self) -> None:
        """Make the file with all its pages. Raises OSError."""
        descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, self.capacity)  # on tmpfs this makes the pages themselves
        finally:
            os.close(descriptor)
        self.is_allocated = True

    def append(self, data: bytes, offset: int) -> None:
        """Write ``data``, beyond the present end where need be. Raises OSError."""
        descriptor = os.open(self.path, os.O_RDWR)
        try:
            if offset + len(data) > self.capacity:
                os.posix_fallocate(descriptor, 0, offset + len(data))
                self.capacity, self.is_grown = offset + len(data), True
                self.mapping = None  # too short now; the last view of it ends it
            while data:
                written = os.pwrite(descriptor, data, offset)
                data, offset = data[written:], offset + written
        finally:
            os.close(descriptor)

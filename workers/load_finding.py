"""What comes of loading a Checkpoint outside of its Run, and the Protocol of who does it. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from storage.object_store import ObjectStore
from storage.sources import RestorePlan

__all__ = ["LoadFinding", "LoadPort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFinding:
    """Nothing was wrong. ``loss``: of the probe; None where there was none to take, and ``note`` says why.

    ``is_loaded`` False: the Checkpoint is of another model than this program's, which says nothing against it.
    """

    is_loaded: bool = True
    loss: float | None = None
    expected: float | None = None
    note: str | None = None


class LoadPort(Protocol):
    """Loads one Checkpoint at a time (`workers.verification`)."""

    @property
    def state_bytes(self) -> int:
        """What the whole state takes of memory."""
        ...

    def check(self, plan: RestorePlan, store: ObjectStore) -> LoadFinding:
        """Raises CorruptCheckpoint or ManifestMismatch where the Checkpoint is wrong, else StorageError."""
        ...

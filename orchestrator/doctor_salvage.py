"""What can still be saved when no Checkpoint is whole: the newest one of which all of L1 is. Reads only."""

from __future__ import annotations

from dataclasses import dataclass

from storage.commit_log import CommitLog
from storage.errors import StorageError, StoreUnavailable
from storage.inventory import Inventory
from storage.manifest import Level
from storage.object_store import ObjectStore
from storage.salvage import whole_levels

__all__ = ["Salvage", "find_salvage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Salvage:
    """A damaged Checkpoint whose L1 is whole: weights, schedule, data position and random state, without what else
    it held. ``is_quarantined``: that has to be lifted before it can be used."""

    step: int
    attempt: int
    whole: tuple[Level, ...]
    lost: tuple[Level, ...]
    is_quarantined: bool


def find_salvage(store: ObjectStore, log: CommitLog, inventory: Inventory) -> Salvage | None:
    """The newest damaged Checkpoint with all of L1; None where there is none. Raises StoreUnavailable."""
    for step in reversed(inventory.steps):
        if step.commit is None or step.standing == "void":
            continue
        try:
            manifest = log.read_manifest(step.commit)
        except StoreUnavailable:
            raise
        except StorageError:  # without its Manifest nothing of it can be read; already among the findings
            continue
        whole = whole_levels(store, manifest)
        if "L1" in whole:
            levels = {layout.level for layout in manifest.tensors.values()}
            return Salvage(
                step=step.key.step,
                attempt=step.key.attempt.number,
                whole=tuple(sorted(whole)),
                lost=tuple(sorted(levels - whole)),
                is_quarantined=step.standing == "quarantined",
            )
    return None

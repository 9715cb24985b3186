"""Whether and how each Checkpoint was verified, for `raysume checkpoints list` and `show`. Reads only."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime

from storage.inventory import Inventory
from storage.keys import StepKey
from storage.manifest import Commit
from storage.object_store import ObjectStore
from storage.pruning import age_s_of
from storage.verified import VerifiedRecord, read_verified, verified_records

__all__ = ["VerifiedColumn", "verified_facts"]


class VerifiedColumn:
    """By the newest ``most`` Checkpoints, since each record is one more object to read."""

    def __init__(self, store: ObjectStore, inventory: Inventory, *, most: int | None) -> None:
        keys = [step.key for step in inventory.steps]
        self._looked_at = frozenset(keys if most is None else keys[-most:])
        self._records = verified_records(store, self._looked_at)
        self._history = inventory.history

    def of(self, key: StepKey) -> str | None:
        """``load``, ``digests`` or ``no``; None where it was not looked at."""
        record = self._records.get(key)
        return record.by if record is not None else "no" if key in self._looked_at else None

    def line(self, now_s: Callable[[], float] = time.time) -> str | None:
        """How long the newest Checkpoint that is not verified has been there; None where all are."""
        from orchestrator.report_text import duration

        waiting = [commit for commit in self._history if self.of(commit.step_key) == "no"]
        if not waiting:
            return None
        newest = waiting[-1]
        verified = self._newest_verified()
        word = "none is verified yet" if verified is None else f"the newest verified one is of step {verified.step}"
        return f"step {newest.step} has not been verified for {duration(age_s_of(newest, now_s()))}; {word}"

    def _newest_verified(self) -> Commit | None:
        return next((one for one in reversed(self._history) if one.step_key in self._records), None)


def verified_facts(store: ObjectStore, key: StepKey) -> str:
    """One Checkpoint's standing in words."""
    return _words(read_verified(store, key))


def _words(record: VerifiedRecord | None) -> str:
    if record is None:
        return "no"
    try:
        when = datetime.fromisoformat(record.time_utc).strftime("%Y-%m-%d %H:%M:%S")
    except ValueError:
        when = record.time_utc
    probe = "" if record.loss is None else f", its probe gave the loss {record.loss:.6g} again"
    note = "" if record.note is None else f" ({record.note})"
    return f"by {record.by} at {when} UTC{probe}{note}"

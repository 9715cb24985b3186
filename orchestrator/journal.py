"""The Journal: the append-only record of Attempts and Decisions that a new driver continues from.

One small object per entry, its name unique to its driver, so that no store needs to honour an append or a condition.
The controller is its only writer. An entry of a later driver tells this one that it was replaced: it writes no more.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

from orchestrator.crash_loop import repeats_from_plain
from orchestrator.failure_policy import Counters
from storage.errors import LeaseHeld
from storage.keys import JOURNAL, journal_key
from storage.object_store import ObjectStore
from storage.retrying import RetryingStore
from workers.contract import SkippedWindow

__all__ = ["Journal", "JournalEntry"]

_log = logging.getLogger(__name__)
_DEADLINE_S = 10.0  # entries are small; the caller tries again, and looks about between the tries
_NAME = re.compile(r"(?P<sequence>\d{8})\.[0-9a-f]{8}\.json\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    """``kind``: driver, attempt, decision, scale or end. ``fields``: plain JSON."""

    sequence: int
    kind: str
    time_utc: str
    fields: dict[str, Any]


class Journal:
    """Reads every earlier driver's entries once, then appends this driver's."""

    def __init__(self, store: ObjectStore, nonce: str, now_utc: Callable[[], str]) -> None:
        self._store = store
        # To append, which the caller tries again: with retries in here nobody could look about for minutes.
        self._once = store.inner if isinstance(store, RetryingStore) else store
        self._nonce = nonce
        self._now_utc = now_utc
        self.entries: list[JournalEntry] = []
        self._known: set[str] = set()

    def load(self) -> None:
        """Read all entries, in order. A foreign or broken file is named in a warning and left alone."""
        self.entries = []
        for listed in self._store.list(JOURNAL):
            self._known.add(listed.key)
            match = _NAME.search(listed.key)
            try:
                if match is None:
                    raise ValueError("not a journal name")
                body = json.loads(self._store.get(listed.key))
                entry = JournalEntry(
                    sequence=int(match["sequence"]),
                    kind=body["kind"],
                    time_utc=body["time_utc"],
                    fields=body["fields"],
                )
            except (ValueError, KeyError, TypeError) as error:
                _log.warning("journal: %s is left out: %s", listed.key, error)
                continue
            self.entries.append(entry)

    def append(self, kind: str, *, deadline_s: float = _DEADLINE_S, **values: Any) -> JournalEntry:
        """Write one entry; durable when this returns. After StoreUnavailable the same call may be made again.

        Raises LeaseHeld once a later driver has written: its Attempts have the numbers that would be ours.
        """
        self._check_alone(deadline_s)
        sequence = 1 + max((entry.sequence for entry in self.entries), default=0)
        entry = JournalEntry(sequence=sequence, kind=kind, time_utc=self._now_utc(), fields=values)
        body = {"kind": kind, "time_utc": entry.time_utc, "fields": values}
        self._once.put(journal_key(sequence, self._nonce), json.dumps(body, indent=1).encode(), deadline_s=deadline_s)
        self.entries.append(entry)
        return entry

    def _check_alone(self, deadline_s: float) -> None:
        own = f".{self._nonce}.json"
        for listed in self._once.list(JOURNAL, deadline_s=deadline_s):
            if listed.key not in self._known and not listed.key.endswith(own) and _NAME.search(listed.key):
                raise LeaseHeld(self._store.url, f"it wrote {listed.key}")

    def last_attempt_number(self) -> int:
        """The highest Attempt number any driver of this Run used; 0 before the first."""
        return max((int(e.fields["number"]) for e in self.entries if e.kind == "attempt"), default=0)

    def counters(self) -> Counters:
        """The failure counters as the last entry that carries them left them."""
        known = {field.name for field in fields(Counters)}
        for entry in reversed(self.entries):
            saved = entry.fields.get("counters")
            if isinstance(saved, dict):
                plain = {name: value for name, value in saved.items() if name in known}
                plain["repeats"] = repeats_from_plain(plain.get("repeats"))
                plain["skipped"] = tuple(SkippedWindow(**window) for window in plain.get("skipped", ()))
                return Counters(**plain)
        return Counters()

    def append_counters(self, kind: str, counters: Counters, *, deadline_s: float = _DEADLINE_S, **values: Any) -> None:
        """Write an entry that carries the failure counters."""
        self.append(kind, deadline_s=deadline_s, counters=asdict(counters), **values)

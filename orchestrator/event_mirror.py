"""Keeps a copy of the local event file under the Run's URL, for stores that cannot append. Bounded, at intervals."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from storage.errors import ObjectMissing, StorageError
from storage.keys import EVENTS
from storage.object_store import ObjectStore

__all__ = ["EventMirror", "fetch_events"]

_log = logging.getLogger(__name__)
_DEADLINE_S = 30.0
_LAST_S = 5.0  # of each of two tries at the end: an exit waits no longer for a store that is away


def fetch_events(store: ObjectStore, path: Path) -> None:
    """Bring the events of drivers on other machines here; what only this machine has stays, in its place."""
    try:
        stored = store.get(EVENTS)
    except ObjectMissing:
        return
    local = path.read_bytes() if path.exists() else b""  # after the copy: the two may be one growing file
    if local.startswith(stored):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_joined(local, stored))


def _joined(local: bytes, stored: bytes) -> bytes:
    """Lines that both begin with, then the last ones written here that were never copied, then those of later drivers.

    A driver that died here left its last seconds only here; the Run then went on elsewhere.
    """
    here, there = local.splitlines(), stored.splitlines()
    pairs = enumerate(zip(here, there, strict=False))
    num_common = next((index for index, (one, other) in pairs if one != other), min(len(here), len(there)))
    return b"".join(line + b"\n" for line in [*there[:num_common], *here[num_common:], *there[num_common:]])


class EventMirror:
    """Uploads ``path`` every ``interval_s`` when it grew, and once more on close. What a store that is away missed is
    in the next copy, since each is whole; that the last one is missing is warned of."""

    def __init__(self, store: ObjectStore, path: Path, interval_s: float = 10.0) -> None:
        self._store = store
        self._path = path
        self._interval_s = interval_s
        self._uploaded = -1
        self._is_failing = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="event-mirror", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=_LAST_S)
        try:
            self._upload(_LAST_S)
        except StorageError:
            self._upload_or_say(_LAST_S, logging.WARNING)

    def _run(self) -> None:
        while not self._closed.wait(self._interval_s):
            self._upload_or_say(_DEADLINE_S, logging.DEBUG if self._is_failing else logging.INFO)

    def _upload(self, deadline_s: float) -> None:
        size = self._path.stat().st_size
        if size == self._uploaded:
            return
        self._store.put(EVENTS, self._path.read_bytes(), deadline_s=deadline_s)
        self._uploaded = size
        self._is_failing = False

    def _upload_or_say(self, deadline_s: float, level: int) -> None:
        try:
            self._upload(deadline_s)
        except StorageError as error:
            what = "the last events are not" if self._closed.is_set() else "events are not, for now,"
            _log.log(level, "%s copied to %s: %s", what, self._store.url, error)
            self._is_failing = True

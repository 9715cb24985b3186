"""One structured line per event of a Run, in a file next to its process: what happened, when, in which Attempt.

A line is appended in a single write, so that threads and processes may share the file. Nothing is interpreted here.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

__all__ = ["EventLog", "read_events", "utc_text"]

logger = logging.getLogger(__name__)

_FIXED = ("event", "time_utc", "t_s", "run", "attempt", "step", "rank")


def utc_text(epoch_s: float) -> str:
    """Unix time as ISO 8601 in UTC with milliseconds, e.g. ``2026-01-31T12:00:00.250Z``."""
    return datetime.fromtimestamp(epoch_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class EventLog:
    """Appends events of ``run_id`` to ``path``. ``t_s`` of each counts from ``started_at_s`` (Unix time)."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        run_id: str,
        clock: Callable[[], float] = time.time,
        *,
        started_at_s: float | None = None,
    ) -> None:
        self._path = Path(path)
        self._run_id = run_id
        self._clock = clock
        self._started_at_s = clock() if started_at_s is None else started_at_s
        self._lock = threading.Lock()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._end_torn_line()

    def emit(
        self,
        event: str,
        *,
        attempt: int | None = None,
        step: int | None = None,
        rank: int | None = None,
        **fields: Any,
    ) -> None:
        """Append one event. ``fields`` must be plain JSON values and may not reuse a fixed name.

        An Attempt is written as its number.
        """
        clash = [name for name in fields if name in _FIXED]
        if clash:
            raise ValueError(f"event {event}: {', '.join(clash)} are names of fixed fields")
        now_s = self._clock()
        record = {
            "event": event,
            "time_utc": utc_text(now_s),
            "t_s": round(now_s - self._started_at_s, 6),
            "run": self._run_id,
            "attempt": attempt,
            "step": step,
            "rank": rank,
            **fields,
        }
        line = (json.dumps(record, separators=(",", ":"), allow_nan=True) + "\n").encode()
        with self._lock:
            written = os.write(self._descriptor, line)
        if written != len(line):
            raise OSError(f"event {event}: {written} of {len(line)} bytes were written to {self._path}")

    def close(self) -> None:
        """Close the file; later emits fail."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    def _end_torn_line(self) -> None:
        """A process that died in its last write must not spoil the first event of the next."""
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            os.write(self._descriptor, b"\n")


def read_events(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All events in file order. A line that is no event (torn by a crash) is left out with a warning."""
    events: list[dict[str, Any]] = []
    for number, line in enumerate(Path(path).read_bytes().split(b"\n"), start=1):
        if not line:
            continue
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and isinstance(record.get("event"), str):
            events.append(record)
        else:
            logger.warning("%s line %d is torn and left out", path, number)
    return events

"""Looks at processes of this machine through /proc: who is below whom, who still runs. Signals none but on order."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

__all__ = ["descendants", "is_running", "send_signal"]

logger = logging.getLogger(__name__)


def descendants(pid: int) -> list[int]:
    """Every process below ``pid``, nearest first."""
    children: dict[int, list[int]] = {}
    for child, parent in _parents():
        children.setdefault(parent, []).append(child)
    found = list(children.get(pid, []))
    for above in found:  # grows while it is walked
        found.extend(children.get(above, []))
    return found


def is_running(pid: int) -> bool:
    """False once the process is gone, or dead and only waiting for its parent to notice."""
    stat = _stat(pid)
    return stat is not None and stat[0] not in ("Z", "X")


def _parents() -> Iterator[tuple[int, int]]:
    for entry in os.listdir("/proc"):
        stat = _stat(int(entry)) if entry.isdigit() else None
        if stat is not None:
            yield int(entry), int(stat[1])


def _stat(pid: int) -> list[str] | None:
    """State, parent and the rest of /proc/PID/stat; None when the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name stands in brackets and may hold anything, brackets too.
    return text.rpartition(")")[2].split()


def send_signal(pid: int, number: signal.Signals) -> None:
    """Send a signal; nothing when the process is gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        logger.debug("process %s was gone before %s", pid, number.name)

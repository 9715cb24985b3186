"""Whose an arena's directory is: where it lies, how a Keeper claims it, what Keepers that are gone left is removed.

It knows nothing of buffers: those are the arena's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

from storage.errors import StorageError

__all__ = ["arena_directory", "claim", "process_incarnation", "remove"]

logger = logging.getLogger(__name__)

_PID_FILE: Final = "keeper.pid"
_SAFE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")


def arena_directory(run_id: str, node_id: str) -> Path:
    """Where the Keeper of ``node_id`` keeps its buffers; the same path for every caller on that node."""
    for name in (run_id, node_id):
        if _SAFE_NAME.match(name) is None:
            raise ValueError(f"{name!r} cannot be part of an arena's directory name")
    return Path("/dev/shm") / f"raysume-{run_id}-{node_id}"


def process_incarnation(pid: int) -> int | None:
    """Start time of process ``pid`` in clock ticks, which tells a reused pid apart; None when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def claim(directory: Path, run_id: str, incarnation: Callable[[int], int | None]) -> None:
    """Make the directory ours; what Keepers of this Run that are gone left there and beside it is removed."""
    for other in directory.parent.glob(f"raysume-{run_id}-*"):
        words = _read_words(other / _PID_FILE)
        is_ours_to_judge = len(words) == 3 and words[2] == _pid_namespace()
        if is_ours_to_judge and other != directory and str(incarnation(int(words[0]))) != words[1]:
            remove(other)
    if directory.is_symlink() or (directory.exists() and directory.stat().st_uid != os.geteuid()):
        raise StorageError(f"arena {directory} belongs to somebody else; remove it or use another run name")
    if directory.exists():
        words = _read_words(directory / _PID_FILE)
        if len(words) == 3 and str(incarnation(int(words[0]))) == words[1]:
            raise StorageError(f"arena {directory} belongs to the living Keeper with pid {words[0]}")
        logger.info("run %s: removing the arena %s of a Keeper that is gone", run_id, directory)
        remove(directory)
    directory.mkdir(mode=0o700, parents=True)
    (directory / _PID_FILE).write_text(f"{os.getpid()} {incarnation(os.getpid())} {_pid_namespace()}")


def remove(directory: Path) -> None:
    """Remove an arena, its pid file last: a removal cut short in between is taken up by the next Keeper."""
    with contextlib.suppress(OSError):  # what cannot be removed, the caller sees or another Keeper removes
        for path in directory.iterdir():
            if path.name != _PID_FILE:
                path.unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)


def _read_words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except FileNotFoundError:
        return []


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")

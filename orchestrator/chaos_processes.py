"""What chaos does to processes of a local node: finds them by title, starves them of memory, slows them down.

It knows nothing of schedules. Whatever it holds stopped goes on when it is closed.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

from orchestrator.errors import SupervisorError
from orchestrator.processes import descendants, is_running, send_signal

__all__ = ["COORDINATOR_TITLE", "KEEPER_TITLE", "SlowedNode", "pids_titled", "signal_pid", "starve"]

KEEPER_TITLE: Final = "ray::KeeperActor"
COORDINATOR_TITLE: Final = "ray::CoordinatorShell"
_HALF_PERIOD_S: Final = 0.02
_REFRESH_PERIODS: Final = 25  # looking for processes reads all of /proc
_JOIN_S: Final = 5.0
# What is mapped at all, and of that what is its own and writable: an allocator may still have addresses in reserve.
_LIMITS: Final = {"VmSize": resource.RLIMIT_AS, "VmData": resource.RLIMIT_DATA}
_USED = re.compile(r"^(Vm\w+):\s+(\d+) kB$", re.MULTILINE)


def pids_titled(below: int, title: str) -> list[int]:
    """Live processes below ``below`` whose title, which Ray sets to the actor's class, begins with ``title``."""
    return sorted(pid for pid in descendants(below) if is_running(pid) and _title(pid).startswith(title))


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""  # it ended meanwhile


def signal_pid(pid: int, number: signal.Signals, *, what: str) -> None:
    """Send a signal; SupervisorError when the process was gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError as error:
        raise SupervisorError(f"{what} (pid {pid}) ended by itself just before") from error


def starve(pid: int) -> int:
    """Leave ``pid`` no memory beyond what it has now; returns its writable part, in bytes.

    The next memory that any thread of it asks the kernel for is refused, as on a machine without any left.
    """
    try:
        used = {name: int(kib) * 1024 for name, kib in _USED.findall(Path(f"/proc/{pid}/status").read_text())}
        if not _LIMITS.keys() <= used.keys():
            raise SupervisorError(f"process {pid} has no memory any more")
        for name, limit in _LIMITS.items():
            _, hard = resource.prlimit(pid, limit)
            resource.prlimit(pid, limit, (used[name], hard))
    except (FileNotFoundError, ProcessLookupError) as error:
        raise SupervisorError(f"process {pid} ended by itself just before") from error
    except PermissionError as error:
        raise SupervisorError(f"the memory of process {pid} cannot be limited: {error}") from error
    return used["VmData"]


class SlowedNode:
    """Stops some processes every other 20 ms, so that they get half of the time, until `close`.

    ``pids`` is asked again and again: a process that starts meanwhile is slowed too. ``left_alone``: never touched.
    """

    def __init__(self, pids: Callable[[], Collection[int]], left_alone: Collection[int]) -> None:
        self._pids, self._left_alone = pids, left_alone
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="slowed-node", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let them run freely again. The second time, nothing happens."""
        self._is_over.set()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        pids: list[int] = []
        period = 0
        while not self._is_over.is_set():
            if period % _REFRESH_PERIODS == 0:
                pids = [pid for pid in self._pids() if pid not in self._left_alone]
            period += 1
            _send_all(pids, signal.SIGSTOP)
            self._is_over.wait(_HALF_PERIOD_S)
            _send_all([pid for pid in pids if pid not in self._left_alone], signal.SIGCONT)
            self._is_over.wait(_HALF_PERIOD_S)


def _send_all(pids: Collection[int], number: signal.Signals) -> None:
    for pid in pids:
        send_signal(pid, number)

"""Knows whether the kernel has killed a process of this node for want of memory a moment ago.

A worker that the OOM killer takes says nothing: for the driver it is one more lost worker. The kernel counts its kills,
for the processes of one cgroup where there is such a count, else for the machine. Which process it was is not asked.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

__all__ = ["OomWatch", "count_oom_kills"]

_EVERY_S: Final = 1.0
_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
_CGROUPS: Final = Path("/sys/fs/cgroup")


class OomWatch:
    """Looks at the count once a second, in a thread that ends with the process; `was_recent` answers from that."""

    def __init__(
        self,
        count: Callable[[], int | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        is_watching: bool = True,
    ) -> None:
        self._count = count or count_oom_kills
        self._clock = clock
        self._lock = threading.Lock()
        self._known = self._count()
        self._grew_at_s: float | None = None
        if is_watching and self._known is not None:
            threading.Thread(target=self._watch, name="oom-watch", daemon=True).start()

    def was_recent(self, within_s: float) -> bool:
        """Whether the kernel killed for want of memory within the last ``within_s`` seconds, as far as it tells."""
        self.look()
        with self._lock:
            return self._grew_at_s is not None and self._clock() - self._grew_at_s <= within_s

    def look(self) -> None:
        """Read the count now."""
        found = self._count()
        with self._lock:
            if found is not None and self._known is not None and found > self._known:
                self._grew_at_s = self._clock()
            self._known = found if found is not None else self._known

    def _watch(self) -> None:
        while True:
            time.sleep(_EVERY_S)
            self.look()


def count_oom_kills() -> int | None:
    """The kernel's count of OOM kills: of this process's cgroup, else of the machine; None where it keeps none."""
    for path in (*_cgroup_files(), Path("/proc/vmstat")):
        try:
            found = _COUNT.search(path.read_text())
        except OSError:
            continue
        if found is not None:
            return int(found[1])
    return None


def _cgroup_files() -> list[Path]:
    """Where the cgroup of this process has its count: version 2, then version 1; inside a container at the root."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    places: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            places += [_CGROUPS / path.lstrip("/") / "memory.events", _CGROUPS / "memory.events"]
        elif "memory" in controllers.split(","):
            places += [_CGROUPS / "memory" / path.lstrip("/") / "memory.oom_control"]
            places += [_CGROUPS / "memory" / "memory.oom_control"]
    return places

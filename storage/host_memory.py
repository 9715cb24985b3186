"""How much memory this node has left for a process: the machine's, or what its container may still take.

It reserves nothing and remembers nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

__all__ = ["available_bytes", "used_share"]

_MEMINFO: Final = Path("/proc/meminfo")
_GROUPS: Final = Path("/sys/fs/cgroup")
_LIMITS: Final = (  # of the second and of the first version of control groups: limit, use, statistics, key in these
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


def available_bytes(meminfo: Path = _MEMINFO, groups: Path = _GROUPS) -> int:
    """Bytes that can be had without swapping: the kernel's estimate, or what a container's limit leaves."""
    return max(0, min(free for free, _ in _rooms(meminfo, groups)))


def used_share(meminfo: Path = _MEMINFO, groups: Path = _GROUPS) -> float:
    """Share of the memory that is in use, between 0 and 1: the machine's, or the container's where that is fuller."""
    return max(min(1.0, max(0.0, 1.0 - free / size)) for free, size in _rooms(meminfo, groups))


def _rooms(meminfo: Path, groups: Path) -> Iterator[tuple[int, int]]:
    """Free bytes and size of all that bounds a process here."""
    pairs = (line.split()[:2] for line in meminfo.read_text().splitlines())
    machine = {words[0]: int(words[1]) << 10 for words in pairs if words[0] in ("MemTotal:", "MemAvailable:")}
    yield machine["MemAvailable:"], machine["MemTotal:"]
    for limit_file, used_file, stat_file, key in _LIMITS:
        limit = _number(groups / limit_file)  # "max", or more than any machine has, where there is none
        used = _number(groups / used_file)
        if limit and used is not None:
            yield limit - used + _reclaimable(groups / stat_file, key), limit


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _reclaimable(path: Path, key: str) -> int:
    """Pages of files that nobody used lately: they count as used, but give way."""
    try:
        pairs = (line.split() for line in path.read_text().splitlines())
        return sum(int(words[1]) for words in pairs if words[:1] == [key])
    except OSError:
        return 0

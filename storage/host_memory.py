"""How much memory this node has left for a process: the machine's, or what its container may still take.

Read once, where a Keeper starts; it reserves nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

__all__ = ["available_bytes"]

_GROUPS: Final = Path("/sys/fs/cgroup")
_LIMITS: Final = (  # of the second and of the first version of control groups: limit, use, statistics, key in these
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


def available_bytes(meminfo: Path = Path("/proc/meminfo"), groups: Path = _GROUPS) -> int:
    """Bytes that can be had without swapping: the kernel's estimate, or what a container's limit leaves."""
    lines = (line.split() for line in meminfo.read_text().splitlines())
    free = next(int(words[1]) << 10 for words in lines if words[:1] == ["MemAvailable:"])
    for limit_file, used_file, stat_file, key in _LIMITS:
        limit = _number(groups / limit_file)  # "max", or more than any machine has, where there is none
        used = _number(groups / used_file)
        if limit is not None and used is not None:
            free = min(free, limit - used + _reclaimable(groups / stat_file, key))
    return max(0, free)


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

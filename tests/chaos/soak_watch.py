"""What the processes of a run hold while it is under soak: descriptors, memory, shared memory, placement groups.

Samples are taken when nothing is going wrong. Growth is told by comparing the first quarter of them with the last,
without those of processes that had just begun.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.chaos_processes import COORDINATOR_TITLE, KEEPER_TITLE, pids_titled
from storage.arena import process_incarnation

__all__ = ["Growth", "Sample", "Watch", "growth_of"]

WORKER_TITLE = "ray::WorkerActor"
AGENT_TITLE = "ray::NodeAgent"
MIN_SAMPLES = 8
# Importing torch takes a worker 3-5 s on a quiet machine, several at a time on a busy one; its memory grows meanwhile.
GROWN_UP_S = 20.0
# A quarter may hold more members, or fuller caches, than another. A leak of one a fault is far more in 200 faults.
FD_TOLERANCE, FD_SHARE = 16.0, 0.15
RSS_TOLERANCE_MB, RSS_SHARE = 48.0, 0.15
SHM_TOLERANCE_MB, SHM_SHARE = 16.0, 0.25
_ROLES = {
    "coordinator": COORDINATOR_TITLE,
    "keeper": KEEPER_TITLE,
    "worker": WORKER_TITLE,
    "agent": AGENT_TITLE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One process after one strike. ``incarnation`` tells it from a later one with its pid."""

    role: str
    pid: int
    incarnation: int
    strike: int
    age_s: float
    num_fds: int
    rss_mb: float
    num_threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Medians of the first and the last quarter of some samples, and whether the difference is within its tolerance."""

    what: str
    early: float
    late: float
    tolerance: float
    num_samples: int

    @property
    def is_flat(self) -> bool:
        return self.late - self.early <= self.tolerance

    def __str__(self) -> str:
        return (
            f"{self.what}: {self.early:.0f} -> {self.late:.0f} over {self.num_samples} samples "
            f"(tolerance +{self.tolerance:.0f})"
        )


class Watch:
    """Looks at all processes below ``root_pid``, this one's cluster."""

    def __init__(self, root_pid: int, run_id: str) -> None:
        self._root_pid, self._run_id = root_pid, run_id
        self.samples: list[Sample] = []
        self.shm_mb: list[float] = []

    def take(self, strike: int, driver_pid: int) -> None:
        pids = [("driver", driver_pid)]
        for role, title in _ROLES.items():
            pids += [(role, pid) for pid in pids_titled(self._root_pid, title)]
        self.samples += [sample for role, pid in pids if (sample := _sample(role, pid, strike)) is not None]
        self.shm_mb.append(sum(_size_mb(path) for path in Path("/dev/shm").glob(f"raysume-{self._run_id}*")))

    def growths(self) -> list[Growth]:
        """Of each role over the run, and of each process that lived through enough strikes."""
        by_role: dict[str, list[Sample]] = defaultdict(list)
        by_process: dict[str, list[Sample]] = defaultdict(list)
        for sample in self.samples:
            by_role[f"{sample.role}s" if sample.role in ("keeper", "worker", "agent") else sample.role].append(sample)
            by_process[f"{sample.role} {sample.pid}"].append(sample)
        found = [
            growth for groups in (by_role, by_process) for name, s in groups.items() for growth in _growths(name, s)
        ]
        shm = growth_of("shared memory MB", self.shm_mb, SHM_TOLERANCE_MB, SHM_SHARE)
        return found if shm is None else [*found, shm]


def growth_of(what: str, values: Sequence[float], tolerance: float, share: float) -> Growth | None:
    """None where there are too few values to tell."""
    if len(values) < MIN_SAMPLES:
        return None
    quarter = max(2, len(values) // 4)
    early, late = statistics.median(values[:quarter]), statistics.median(values[-quarter:])
    return Growth(what=what, early=early, late=late, tolerance=max(tolerance, share * early), num_samples=len(values))


def _growths(name: str, samples: Sequence[Sample]) -> list[Growth]:
    samples = [sample for sample in samples if sample.age_s >= GROWN_UP_S]
    fds = growth_of(f"{name}: descriptors", [s.num_fds for s in samples], FD_TOLERANCE, FD_SHARE)
    threads = growth_of(f"{name}: threads", [s.num_threads for s in samples], FD_TOLERANCE, FD_SHARE)
    rss = growth_of(f"{name}: MB", [s.rss_mb for s in samples], RSS_TOLERANCE_MB, RSS_SHARE)
    return [growth for growth in (fds, threads, rss) if growth is not None]


def _sample(role: str, pid: int, strike: int) -> Sample | None:
    incarnation = process_incarnation(pid)
    try:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        num_fds = len(os.listdir(f"/proc/{pid}/fd"))
        started = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None  # it ended just now
    if incarnation is None or "VmRSS" not in status:
        return None
    return Sample(
        role=role,
        pid=pid,
        incarnation=incarnation,
        strike=strike,
        age_s=time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK"),
        num_fds=num_fds,
        # Anonymous memory alone: pages of the arenas are shared, and counted as shared memory.
        rss_mb=int(status["RssAnon"].split()[0]) / 1024,
        num_threads=int(status["Threads"].split()[0]),
    )


def _size_mb(directory: Path) -> float:
    total = 0
    for path in [directory, *directory.rglob("*")]:
        try:
            total += path.stat().st_blocks * 512
        except FileNotFoundError:
            continue  # a buffer that was given back meanwhile
    return total / 2**20

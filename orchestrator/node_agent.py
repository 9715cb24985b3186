"""The node agent: one small Ray actor per node that answers for its processes: alive or not, and SIGKILL.

It exists because `ray.kill` takes seconds on a stopped process, while a local signal takes milliseconds.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from orchestrator.oom_watch import OomWatch
from workers.lifeline import Lifeline, LifelineSpec, Role

__all__ = ["NodeAgent", "NodeAgentActor"]

KILL_TIMEOUT_S = 5.0


class NodeAgent:
    """Plain class: acts on processes of this machine by pid. With ``lifeline`` the driver learns of its end at once."""

    def __init__(self, node_id: str = "", lifeline: LifelineSpec | None = None) -> None:
        self._lifeline = (
            None if lifeline is None else Lifeline(lifeline, role=Role.AGENT, name=node_id, node_id=node_id)
        )

        self._oom_watch = OomWatch()

    def ping(self) -> int:
        """Liveness: this process's pid."""
        return os.getpid()

    def has_starved(self, within_s: float) -> bool:
        """Whether the kernel killed a process of this node for want of memory within the last ``within_s``."""
        return self._oom_watch.was_recent(within_s)

    def living(self, pids: Sequence[int]) -> tuple[int, ...]:
        """Those of ``pids`` that exist and are not zombies."""
        return tuple(pid for pid in pids if _is_living(pid))

    def kill(self, pids: Sequence[int]) -> tuple[int, ...]:
        """SIGKILL each process (a stopped one too) and wait until it is gone; returns the pids that are not.

        A pid that does not exist counts as gone. Bounded by KILL_TIMEOUT_S.
        """
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        deadline = time.monotonic() + KILL_TIMEOUT_S
        left = self.living(pids)
        while left and time.monotonic() < deadline:
            time.sleep(0.002)
            left = self.living(left)
        return left


def _is_living(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


NodeAgentActor: Any = ray.remote(NodeAgent)

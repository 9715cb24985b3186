"""Hosts the store through which the ranks of every Attempt find each other, outside all of them.

A rank that dies then never takes the store with it. Each Attempt uses names of its own in it, so nothing is ever reset.
The driver imports this file and does not load torch: that happens inside the actor.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import ray

__all__ = ["Rendezvous", "RendezvousActor"]

_TIMEOUT_S = 60.0


class Rendezvous:
    """A TCPStore server on a free port of ``host``, the address at which all nodes reach this process."""

    def __init__(self, host: str) -> None:
        from torch._C._distributed_c10d import TCPStore  # loads torch: here, never in the driver that names this class

        self._host = host
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_TIMEOUT_S))

    def address(self) -> tuple[str, int]:
        """Host and port that go into an AttemptSpec."""
        return self._host, self._store.port


RendezvousActor: Any = ray.remote(num_cpus=0, max_restarts=0)(Rendezvous)

"""Ranks that hold something else than the others: what the refused Commit told, and what it means for a World.

The World ends, members that are in the wrong are replaced, and nothing newer than the last Commit is trusted. Ending
and choosing are the callers' work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.signals import SaveFailed, Signal
from storage.keys import Attempt
from storage.replicas import Disagreement
from workers.contract import World

__all__ = ["Doubt", "ReplicaDoubt"]

_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """``workers``: whose processes are to be replaced; none where nobody can tell who is in the wrong."""

    workers: tuple[str, ...]
    detail: str


class ReplicaDoubt:
    """One per driver; listens to the recorder."""

    def __init__(self) -> None:
        self._failed: dict[Attempt, SaveFailed] = {}

    def on_signal(self, signal: Signal) -> None:
        if isinstance(signal, SaveFailed) and signal.disagreement is not None:
            self._failed.setdefault(signal.attempt, signal)

    def of(self, world: World) -> Doubt | None:
        """What is held against members of ``world``, if anything is."""
        failed = self._failed.get(world.attempt)
        if failed is None or failed.disagreement is None:
            return None
        return _doubt(world, failed.step, failed.disagreement)

    def of_ended(self, attempt: Attempt, workers: Sequence[str]) -> Doubt | None:
        """The same of a World that has ended, as the refused Commit put it. ``workers``: of each rank."""
        failed = self._failed.get(attempt)
        if failed is None or failed.disagreement is None:
            return None
        found = failed.disagreement
        accused = tuple(workers[rank] for rank in found.ranks if rank < len(workers))
        return Doubt(workers=accused if found.is_settled else (), detail=failed.reason)


def _doubt(world: World, step: int, found: Disagreement) -> Doubt:
    accused = [world.members[rank] for rank in found.ranks if rank < world.size]
    who = "; ".join(f"rank {m.rank} (worker {m.worker_id}, node {m.node_id[:12]})" for m in accused[:_SHOWN])
    more = f" and {len(accused) - _SHOWN} more" if len(accused) > _SHOWN else ""
    how = "not what the others hold" if found.is_settled else "not the same, and no majority tells who is right"
    where = "" if found.tensor is None else f", first in {found.tensor}"
    return Doubt(
        workers=tuple(member.worker_id for member in accused) if found.is_settled else (),
        detail=f"replicas disagree at step {step}{where}: {who}{more}: {how}; going on from the last Commit",
    )

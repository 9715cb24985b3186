"""One sealed Snapshot that a Keeper holds in memory, and how far the memory Tier of one rank is.

Records alone: storage.generations owns and locks them.
"""

from __future__ import annotations

from dataclasses import dataclass

from storage.keeper_protocol import GenerationFacts, SealedSnapshot
from storage.keys import Attempt
from storage.manifest import Receipt
from storage.transport import ReplicaRef

__all__ = ["Generation", "Lane"]


@dataclass(slots=True, kw_only=True, eq=False)
class Generation:
    """``snapshot`` None: a peer's replica. ``ref`` None: not indexed yet, so not whole.

    ``is_stalled``: its replica failed several times and is tried again only now and then.
    """

    attempt: Attempt
    step: int
    rank: int
    world_size: int
    lease_id: str
    path: str
    snapshot: SealedSnapshot | None = None
    ref: ReplicaRef | None = None
    receipt: Receipt | None = None
    is_at_work: bool = False
    is_replicated: bool = False
    is_given_up: bool = False
    is_stalled: bool = False
    num_failures: int = 0
    retry_at_s: float = 0.0

    @property
    def is_replica(self) -> bool:
        return self.snapshot is None

    @property
    def num_bytes(self) -> int:
        return self.ref.num_bytes if self.ref else 0

    @property
    def where(self) -> str:
        return f"attempt {self.attempt.label} step {self.step} rank {self.rank}"

    def facts(self) -> GenerationFacts:
        return GenerationFacts(
            attempt=self.attempt,
            step=self.step,
            rank=self.rank,
            world_size=self.world_size,
            num_bytes=self.num_bytes,
            path=self.path,
            is_replica=self.is_replica,
        )


@dataclass(slots=True)
class Lane:
    """One rank in one Attempt."""

    sealed_step: int = -1
    replicated_step: int = -1
    error: str | None = None

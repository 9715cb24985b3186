"""What a worker group keeps: of each node that is in use or on its way, and of each worker. Plain records."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from orchestrator.node_bundles import Bundle, NodeBundles
from workers.contract import WorkerFacts
from workers.lifeline import LifelineSpec

__all__ = [
    "MAX_STARTS_PER_NODE",
    "Admission",
    "NodeParts",
    "SpawnWorker",
    "StartKeeper",
    "Worker",
    "WorkerLost",
]

MAX_STARTS_PER_NODE = 3  # worker starts that may fail on one node before it is left alone


class SpawnWorker(Protocol):
    """Creates one worker actor; `orchestrator.launch` supplies it."""

    def __call__(
        self, *, worker_id: str, node_id: str, keeper: Any, options: dict[str, Any], lifeline: LifelineSpec
    ) -> Any: ...


StartKeeper = Callable[[str], Any]  # node id -> Keeper actor handle; may block


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    """A worker that could not be started or is gone, and why. ``is_refusal``: its own code raised, and would again."""

    worker_id: str
    node_id: str
    reason: str
    is_refusal: bool = False


@dataclass(slots=True, kw_only=True)
class NodeParts:
    """What this driver keeps on one node."""

    node_id: str
    agent: Any
    keeper: Any
    bundles: NodeBundles
    failed_starts: int = 0
    refusal: WorkerLost | None = None

    @property
    def is_exhausted(self) -> bool:
        """Nothing more is started here."""
        return self.failed_starts >= MAX_STARTS_PER_NODE


@dataclass(slots=True, kw_only=True)
class Admission:
    """A node on its way in, for ``count`` workers."""

    count: int
    future: Future[NodeParts]
    began_at: float


@dataclass(slots=True, kw_only=True)
class Worker:
    """One worker process. ``facts`` is set once it is warm."""

    worker_id: str
    node_id: str
    bundle: Bundle
    actor: Any
    ready_ref: Any
    started_at: float
    facts: WorkerFacts | None = None
    is_member: bool = False

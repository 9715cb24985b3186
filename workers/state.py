"""TrainingState: everything of a rank that a Checkpoint must hold, in one object that outlives the loop call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from workers.ledger import EMPTY_CHAIN

__all__ = ["EMPTY_CHAIN", "Progress", "Tracker", "TrainingState"]


@runtime_checkable
class Tracker(Protocol):
    """Any user object (EMA, metric, GradScaler) that keeps state across a resume: tensors and plain JSON types only."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


@dataclass(slots=True, kw_only=True)
class Progress:
    """Where the Run stands after ``step`` finished optimizer steps. Equal on every rank.

    ``position``: samples consumed since step 0; ``sample_chain``: chained xxh3_128 over the ids of those samples.
    ``skipped``: windows of the stream that are left out, see `workers.skipped_windows`; no part of ``position``.
    ``ledger``: how it came here, see `workers.ledger`; "" before an Attempt has begun with it.
    """

    step: int = 0
    epoch: int = 0
    position: int = 0
    tokens: int = 0
    sample_chain: str = EMPTY_CHAIN
    best_metric: float | None = None
    best_step: int | None = None
    skipped: tuple[tuple[int, int], ...] = ()
    ledger: str = ""


@dataclass(slots=True, kw_only=True)
class TrainingState:
    """Model (sharded), optimizer, scheduler, progress and user trackers of one rank.

    ``trackers`` are equal on all ranks; ``rank_trackers`` are each rank's own. ``scaler`` None: no loss scaling.
    """

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler
    progress: Progress = field(default_factory=Progress)
    trackers: dict[str, Tracker] = field(default_factory=dict)
    rank_trackers: dict[str, Tracker] = field(default_factory=dict)
    scaler: GradScaler | None = None

"""The values that cross the border between driver side and worker processes. No torch, no ray.

Each is frozen, keyword-only and carries its Attempt; a receiver refuses an older Attempt. Those of `exchange` are part
of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from storage.keeper_protocol import TransportAddress
from storage.keys import Attempt, StepKey
from storage.manifest import Tier
from storage.sources import RestorePlan
from workers.exchange import (
    BoundOrder,
    CoordinatorPort,
    EvalReport,
    ExchangeReply,
    ExchangeRequest,
    Order,
    OrderKind,
    ShareReport,
    StepReport,
)

__all__ = [
    "AbandonReport",
    "AttemptSpec",
    "BoundOrder",
    "CauseKind",
    "CoordinatorPort",
    "EvalReport",
    "ExchangeReply",
    "ExchangeRequest",
    "FailureCause",
    "FieldPair",
    "Heartbeat",
    "Member",
    "MemorySpec",
    "Order",
    "OrderKind",
    "Outcome",
    "OutcomeKind",
    "Phase",
    "ProofReport",
    "Restored",
    "ShareReport",
    "SkippedWindow",
    "StepReport",
    "WorkerFacts",
    "World",
]


class Phase(StrEnum):
    """What a worker is doing; each phase has its own heartbeat limit."""

    STARTING = "starting"
    IDLE = "idle"
    FORMING = "forming"
    LOADING = "loading"
    COMPILING = "compiling"  # the first step of an Attempt, torch.compile or not
    TRAINING = "training"
    WAITING_FOR_DATA = "waiting-for-data"  # in a step, while the data's store does not answer
    EVALUATING = "evaluating"
    CHECKPOINTING = "checkpointing"
    LEAVING = "leaving"


class OutcomeKind(StrEnum):
    FINISHED = "finished"
    LEFT = "left"
    FAILED = "failed"


class CauseKind(StrEnum):
    """Why a training thread ended in failure. COLLECTIVE is an echo of somebody else's trouble."""

    COLLECTIVE = "collective"
    USER = "user"
    CONFIGURATION = "configuration"  # what is asked for cannot be had: trying again is of no use
    CORRUPT_CHECKPOINT = "corrupt-checkpoint"
    CHECKPOINT_MISMATCH = "checkpoint-mismatch"
    DATA = "data"
    BAD_STEP = "bad-step"  # it was finished, but its loss or gradient is of no use
    STORAGE = "storage"
    OUT_OF_MEMORY = "out-of-memory"
    ACCELERATOR = "accelerator"  # the device itself is at fault, or gone, not what was asked of it
    MEMORY = "memory"  # a generation that the plan named could not be read
    ABANDONED = "abandoned"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """What a worker process says of itself once it is warm (torch imported, model template built, data opened).

    ``state_bytes``: of the whole training state, weights and AdamW's moments, where the model is the built-in one.
    """

    worker_id: str
    node_id: str
    pid: int
    host: str
    device: str
    state_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    rank: int
    worker_id: str
    node_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The fixed membership of one Attempt, in rank order."""

    attempt: Attempt
    members: tuple[Member, ...]

    @property
    def size(self) -> int:
        return len(self.members)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySpec:
    """The memory Tier of one rank: ``peer`` takes its replicas (None: it has none), ``key`` opens the transport."""

    peer: TransportAddress | None
    key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedWindow:
    """Samples that are left out of the stream because ``step`` went wrong with them. ``place``: where they begin.
    ``reason``: in a word what went wrong, "" where an older release wrote it."""

    place: int
    samples: int
    step: int
    reason: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSpec:
    """All that one worker needs to take part in an Attempt. ``restore`` None: start from step 0.

    ``memory`` None: no generations are taken.
    """

    run_id: str
    world: World
    rank: int
    store_host: str
    store_port: int
    group_timeout_s: float
    restore: RestorePlan | None
    data_override: bool = False
    skipped: tuple[SkippedWindow, ...] = ()
    memory: MemorySpec | None = None

    @property
    def attempt(self) -> Attempt:
        return self.world.attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureCause:
    """A plain, pickle-safe picture of an exception: no traceback objects, which would keep the model alive.

    ``windows``: the samples of a step that may not stand. ``is_restoring``: ``step`` is that of the Checkpoint
    that was being loaded, not one that was being trained. ``is_forming``: the rank had not even found the others.
    """

    kind: CauseKind
    error_type: str
    message: str
    traceback: str
    rank: int
    step: int
    corrupt_step: StepKey | None = None
    corrupt_key: str | None = None
    windows: tuple[SkippedWindow, ...] = ()
    is_restoring: bool = False
    is_forming: bool = False

    @property
    def where(self) -> str:
        return f"rank {self.rank}, {f'while restoring step {self.step}' if self.is_restoring else f'step {self.step}'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How the training thread of one worker ended. ``last_step`` is its last finished optimizer step."""

    attempt: Attempt
    worker_id: str
    rank: int
    kind: OutcomeKind
    last_step: int
    cause: FailureCause | None = None
    weights_digest: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldPair:
    """One part of the plain state as its Checkpoint has it, and as the living objects hold it after the load."""

    name: str
    saved: str
    restored: str

    @property
    def is_equal(self) -> bool:
        return self.saved == self.restored


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofReport:
    """The recorded loss of a Checkpoint's probe, and what was found after the load. ``skipped``: why it was not taken
    again; the losses then mean nothing."""

    expected: float = 0.0
    found: float = 0.0
    tolerance: float = 0.0
    seconds: float = 0.0
    skipped: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What one rank read of the Checkpoint that its Attempt began with, and how long that took, its probe included.
    ``bound`` None: every tensor is exact. ``side_by_side``: rank 0's. ``schedule_steps``: how long the built-in LR
    schedule was and is, where the two differ."""

    attempt: Attempt
    step: int
    bytes_by_tier: Mapping[Tier, int]
    bound: float | None
    reseeded: bool
    load_s: float = 0.0
    proof: ProofReport | None = None
    side_by_side: tuple[FieldPair, ...] = ()
    schedule_steps: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """``age_s`` is the time since the training thread last made progress, on the worker's monotonic clock.

    ``restored``: set once the state is loaded, where it came from a Checkpoint. ``spent_s``: length of the
    phases that the Attempt has left.
    """

    worker_id: str
    attempt: Attempt | None
    phase: Phase
    step: int
    age_s: float
    restored: Restored | None = None
    spent_s: Mapping[Phase, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AbandonReport:
    """``is_clean``: the training thread has ended, groups are gone and the old model is released."""

    attempt: Attempt
    worker_id: str
    is_clean: bool
    last_step: int

"""The values that cross the border between driver side and worker processes. No torch, no ray.

Each is frozen, keyword-only and carries its Attempt; a receiver refuses an older Attempt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Protocol

from storage.keeper_protocol import TransportAddress
from storage.keys import Attempt, StepKey
from storage.manifest import Tier
from storage.sources import RestorePlan

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


class OrderKind(IntEnum):
    """The closed set of Orders. A Leave includes a Snapshot of its step that is carried to the store; a Part one that
    only stays in memory, for a World that regroups at once. The bounded ones store the optimizer's moments rounded
    within ``checkpoint.moment_bound``, where time is too short for the form that the configuration asks for."""

    NONE = 0
    SNAPSHOT = 1
    LEAVE = 2
    PART = 3
    LEAVE_BOUNDED = 4

    @property
    def ends_attempt(self) -> bool:
        return self in (OrderKind.LEAVE, OrderKind.PART, OrderKind.LEAVE_BOUNDED)

    @property
    def is_bounded(self) -> bool:
        return self is OrderKind.LEAVE_BOUNDED


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
class Order:
    """The coordinator's numbered word. Rank 0 binds it to max(not_before_step, own step + 2)."""

    attempt: Attempt
    number: int
    kind: OrderKind
    not_before_step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundOrder:
    """An Order (number 0: the fixed cadence) that all ranks carry out at the end of ``step``."""

    number: int
    kind: OrderKind
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One finished optimizer step as rank 0 saw it.

    ``position`` counts samples consumed since step 0; ``sample_chain`` is the chained xxh3_128 of their ids;
    ``finished_at_s`` is Unix time. ``memory_step``: the newest step that every rank was to keep in memory,
    ``safe_step`` the newest that is whole there, replicas included; -1: none. ``memory_stall_s``: rank 0's wait for the
    Snapshot of ``memory_step``. ``compute_s``: by rank, how long it computed itself, see `workers.compute_clock`; 0:
    not measured. ``grad_variance``: of the gradient's elements before clipping, every ``policy.evaluate_every_steps``
    steps, None in between. ``ranks_pressed``: how many ranks' device or host memory is nearly full, ``pressed_share``
    rank 0's own share in use, the larger of the two; None: not measured at this step. The digests are those of
    `workers.step_trace`; None: the step is not traced. ``loss_scale``: what the loss was multiplied by, None without
    loss scaling; ``is_update_skipped``: the gradient overflowed and changed no weight, ``grad_norm`` is infinite.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    position: int
    sample_chain: str
    step_s: float
    finished_at_s: float
    memory_step: int = -1
    safe_step: int = -1
    memory_stall_s: float = 0.0
    compute_s: tuple[float, ...] = ()
    grad_variance: float | None = None
    ranks_pressed: int = 0
    pressed_share: float | None = None
    weights_digest: str | None = None
    optimizer_digest: str | None = None
    schedule_digest: str | None = None
    rest_digest: str | None = None
    rng_digest: str | None = None
    own_digest: str | None = None
    loss_scale: float | None = None
    is_update_skipped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalReport:
    step: int
    loss: float
    best: float
    best_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareReport:
    """What one save takes of the memory in use, of the device, or of the process where the device has none of its own:
    rank 0's, at the first Snapshot of an Attempt.

    ``share``: of ``extra_bytes``, what the save takes there while it is copied; ``snapshot_share``: of its own size.
    ``is_measured``: else ``extra_bytes`` follows from the way of the copy. ``why``: where one of them is large.
    """

    step: int
    share: float
    extra_bytes: int
    snapshot_share: float
    snapshot_bytes: int
    in_use_bytes: int
    is_measured: bool
    why: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeRequest:
    """What rank 0's side thread brings: news since its last call. ``skipped``: steps whose due save was left out."""

    attempt: Attempt
    reports: tuple[StepReport, ...] = ()
    evals: tuple[EvalReport, ...] = ()
    bound: tuple[BoundOrder, ...] = ()
    skipped: tuple[int, ...] = ()
    shares: tuple[ShareReport, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeReply:
    """What it takes back: the newest Order and the steps whose saves are over (committed or given up)."""

    attempt: Attempt
    order: Order | None
    settled_steps: tuple[int, ...]
    is_current: bool


class CoordinatorPort(Protocol):
    """The coordinator as rank 0 sees it."""

    def exchange(self, request: ExchangeRequest) -> ExchangeReply: ...


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
    ``bound`` None: every tensor is exact. ``side_by_side``: rank 0's."""

    attempt: Attempt
    step: int
    bytes_by_tier: Mapping[Tier, int]
    bound: float | None
    reseeded: bool
    load_s: float = 0.0
    proof: ProofReport | None = None
    side_by_side: tuple[FieldPair, ...] = ()


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

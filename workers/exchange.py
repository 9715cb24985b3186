"""What rank 0 and the coordinator tell each other: reports of steps and saves one way, Orders the other.

Part of the contract: everyone imports it from `workers.contract`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from storage.keys import Attempt

__all__ = [
    "BoundOrder",
    "CoordinatorPort",
    "EvalReport",
    "ExchangeReply",
    "ExchangeRequest",
    "Order",
    "OrderKind",
    "ShareReport",
    "StepReport",
]


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

"""What the save policies are asked with, and what they answer. Frozen values; no clock, no opinion of their own.

All ``*_at_s`` are seconds of one monotonic clock, the coordinator's or a simulator's; deadlines are on it as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

__all__ = [
    "ClusterFacts",
    "Notice",
    "Opinion",
    "SaveFacts",
    "SavePolicy",
    "SaveTimes",
    "SaveWish",
    "TrainingFacts",
    "Weighed",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTimes:
    """What one save took, the largest over the ranks, in seconds. ``write_s``: from Snapshot to Commit, all included.

    ``slowdown_s``: training time it cost beside the stall, None where that could not be told.
    """

    step: int
    stall_s: float
    encode_s: float
    upload_s: float
    commit_s: float
    write_s: float
    stored_bytes: int
    raw_bytes: int
    slowdown_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A preemption notice for a node of the World. ``deadline_in_s``: seconds left when it was told; None: unknown."""

    node_id: str
    deadline_in_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """What the driver knows of the cluster and tells the coordinator at the start of an Attempt and when it changes.

    ``faults``: losses of nodes, workers or the driver that came without a notice, over all drivers of the Run, and
    ``preemptions`` those with one; ``survived``: after how many of the faults the Run went on from memory;
    ``exposure_node_s``: node-seconds of training in which they came. ``node_ages_s``: of the World's nodes, since they
    were first seen. ``notices``: those that memory does not cover. ``state_bytes`` None: not known yet.
    ``num_ranks`` 0: one on each node.
    """

    num_nodes: int
    faults: int = 0
    preemptions: int = 0
    survived: int = 0
    exposure_node_s: float = 0.0
    node_ages_s: tuple[float, ...] = ()
    notices: tuple[Notice, ...] = ()
    state_bytes: int | None = None
    num_ranks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFacts:
    """Signals of the training at ``step``, every ``policy.evaluate_every_steps`` steps. None: not enough seen yet.

    ``loss_curvature``: second difference of the loss under a median filter of window 5, the one of largest magnitude
    since the last evaluation. ``grad_variance``: of the elements of the gradient, before clipping, where it was
    measured last; ``peak_variance``: the largest since the last evaluation, by the norm of the steps in between.
    ``*_scale``: running quantiles of what ``loss_curvature`` and ``peak_variance`` were some time ago.
    ``ranks_pressed``: of how many ranks device or host memory was nearly full, the most since the last evaluation, and
    ``pressed_share`` the largest share rank 0 used; ``pressed_since_step``: where this episode of pressure began, None:
    there is none.
    """

    step: int
    loss_curvature: float | None = None
    grad_variance: float | None = None
    peak_variance: float | None = None
    grad_norm: float | None = None
    curvature_scale: float | None = None
    variance_scale: float | None = None
    ranks_pressed: int = 0
    pressed_share: float | None = None
    pressed_since_step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFacts:
    """Everything a policy may look at. ``durable_*``: the newest committed step, or where the Attempt began;
    ``nearest_*``: the newest step that survives the loss of one failure domain, in memory or in the store.

    ``*_at_s``: when that step was finished; minus infinity for a Commit of an earlier driver that is older than the
    memory that the Attempt began with. ``last_save_*``: the newest save that was bound, or where the Attempt began.
    ``step_s`` None: fewer than two steps were finished. ``saves``: of this driver, newest last. ``best_step``: of the
    best evaluation so far; ``saved_best_step`` the newest such step that a save has covered. ``failed_in_row``: saves
    that failed since the last Commit; the next is not tried before ``next_try_at_s``. ``noticed_at_s``: when the first
    preemption notice of the Attempt was told, None: none is pending; ``deadline_at_s``: the earliest, None: unknown.
    """

    now_s: float
    newest_step: int
    total_steps: int
    unsettled: int
    last_save_step: int
    last_save_at_s: float
    durable_step: int
    durable_at_s: float
    nearest_step: int
    nearest_at_s: float
    step_s: float | None = None
    saves: tuple[SaveTimes, ...] = ()
    cluster: ClusterFacts = field(default_factory=lambda: ClusterFacts(num_nodes=1))
    training: TrainingFacts | None = None
    threshold_offset: float = 0.0
    last_instability_step: int | None = None
    best_step: int | None = None
    saved_best_step: int | None = None
    failed_in_row: int = 0
    next_try_at_s: float = -math.inf
    noticed_at_s: float | None = None
    deadline_at_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Opinion:
    """When one policy wants the next save. ``due_at_s`` None: it does not ask for one.

    ``why``: its figures in words, e.g. "12 min since commit, MTBF 41 min, cost 3.1 s". ``is_pressing``: waits for no
    minimum interval.
    """

    policy: str
    due_at_s: float | None
    why: str
    is_pressing: bool = False


class SavePolicy(Protocol):
    """A pure policy: the same facts give the same opinion, live and in simulation."""

    @property
    def name(self) -> str: ...

    def opinion(self, facts: SaveFacts) -> Opinion: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveWish:
    """Save at the next step boundary; ``policy`` asked first, ``reason`` is carried to events, status and report."""

    policy: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """All opinions at one moment and what came of them. ``held_back``: why nothing was ordered although one was due."""

    step: int
    now_s: float
    opinions: tuple[Opinion, ...]
    wish: SaveWish | None = None
    held_back: str | None = None

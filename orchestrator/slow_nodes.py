"""Finds nodes that compute slower than the others, from how long each rank computed in each step. Pure.

A step's time of one rank is set against the median of the ranks on other nodes in the same step; the median of the
logarithm of that ratio over a window tells how much slower the rank is. How far this can be trusted is told by the
scatter within the windows, and by how much the same figure has come and gone before: a machine that is short of cores
slows now this rank, now that one, for many steps in a row. All ranks run equally many leaves, surplus ones included, so
their times compare as they are. A node is as slow as its slowest rank.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from orchestrator.config import WorldConfig
from orchestrator.decisions import Keep, Leave
from orchestrator.scaling_policy import WorkerView, choose_members

__all__ = ["NodeRecovered", "NodeSlow", "SlowNodes", "decide_exclusion"]

WINDOW = 16
MIN_STEPS = 12  # in the window, before anything is said
WARM_STEPS = 2  # of an Attempt, which compile and allocate
PERSISTENCE = 3  # steps in a row that say the same
MIN_SHARE = 0.05  # of a step that the node's excess must be; less is not worth a word
_CERTAINTY = 3.5  # standard errors
_PAST = 32  # figures of one rank that are kept, one in half a window
_MIN_PAST = 4
_UNTRIED = 2.0  # times the error within a window, before the past has told how slowly it comes and goes
_DEVIATION = 1.4826  # from the median absolute deviation to the standard deviation
_MEDIAN_ERROR = 1.2533  # from the standard deviation to the standard error of a median, times sqrt(n)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSlow:
    """``ratio``: its time over the others'. ``compute_s``, ``others_s``: medians over ``steps`` steps."""

    node_id: str
    ratio: float
    steps: int
    compute_s: float
    others_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecovered:
    node_id: str
    ratio: float


@dataclass(slots=True, kw_only=True)
class _Rank:
    """``past``: what ``middle`` was before, once in half a window."""

    node_id: str
    own_s: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    others_s: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    past: deque[float] = field(default_factory=lambda: deque(maxlen=_PAST))
    middle: float = 0.0
    deviation: float = 0.0

    def add(self, own_s: float, others_s: float) -> None:
        self.own_s.append(own_s)
        self.others_s.append(others_s)
        logs = [math.log(own / others) for own, others in zip(self.own_s, self.others_s, strict=True)]
        self.middle = median(logs)
        self.deviation = _DEVIATION * median(abs(value - self.middle) for value in logs)


@dataclass(slots=True)
class _Node:
    slow_for: int = 0
    fast_for: int = 0
    is_slow: bool = False


class SlowNodes:
    """``ratio``: from which on a node counts as slow; it has recovered at less than half of the excess."""

    def __init__(self, ratio: float) -> None:
        if ratio <= 1.0:
            raise ValueError(f"a slow node takes longer than the others: the ratio must be above 1, not {ratio:g}")
        self._slow, self._fast = math.log(ratio), math.log(1.0 + (ratio - 1.0) / 2.0)
        self._certain = math.log(1.0 + (ratio - 1.0) / 5.0)
        self._ranks: list[_Rank] = []
        self._nodes: dict[str, _Node] = {}
        self._num_seen = 0
        self._step_s: deque[float] = deque(maxlen=WINDOW)

    def begin(self, node_of_rank: Sequence[str]) -> None:
        """A new World: what was measured of the last one does not count."""
        self._ranks = [_Rank(node_id=node_id) for node_id in node_of_rank]
        self._nodes = {node_id: _Node() for node_id in node_of_rank}
        self._num_seen = 0
        self._step_s.clear()

    @property
    def slow(self) -> dict[str, float]:
        """The nodes that are slow now, and how many times as long they compute."""
        return {
            node_id: math.exp(self._slowest(node_id).middle) for node_id, node in self._nodes.items() if node.is_slow
        }

    def add(self, compute_s: Sequence[float], step_s: float) -> tuple[NodeSlow | NodeRecovered, ...]:
        """Take in one step, by rank; what has changed with it. A step that was not measured everywhere is left out."""
        if len(compute_s) != len(self._ranks) or len(self._nodes) < 2 or min(compute_s) <= 0.0:
            return ()
        self._num_seen += 1
        if self._num_seen <= WARM_STEPS:
            return ()
        for rank, own_s in zip(self._ranks, compute_s, strict=True):
            others = [s for other, s in zip(self._ranks, compute_s, strict=True) if other.node_id != rank.node_id]
            rank.add(own_s, median(others))
        self._step_s.append(step_s)
        if self._num_seen < WARM_STEPS + MIN_STEPS:
            return ()
        error = self._error()
        if self._num_seen % (WINDOW // 2) == 0:
            for rank in self._ranks:
                rank.past.append(rank.middle)
        changes = [self._judge(node_id, node, error) for node_id, node in self._nodes.items()]
        return tuple(change for change in changes if change is not None)

    def _error(self) -> float:
        """By how much a rank's figure is off, one standard error: what its scatter makes it, or what it has been."""
        typical = median(rank.deviation for rank in self._ranks)
        within = _MEDIAN_ERROR * typical / math.sqrt(len(self._ranks[0].own_s))
        if len(self._ranks[0].past) < _MIN_PAST:
            return _UNTRIED * within
        moves = [abs(value - median(rank.past)) for rank in self._ranks for value in rank.past]
        return max(within, _DEVIATION * median(moves))

    def _judge(self, node_id: str, node: _Node, error: float) -> NodeSlow | NodeRecovered | None:
        rank = self._slowest(node_id)
        own_s, others_s = median(rank.own_s), median(rank.others_s)
        is_sure = rank.middle >= self._slow and rank.middle - _CERTAINTY * error >= self._certain
        is_slow = is_sure and own_s - others_s >= MIN_SHARE * median(self._step_s)
        node.slow_for = node.slow_for + 1 if is_slow else 0
        node.fast_for = node.fast_for + 1 if rank.middle < self._fast else 0
        ratio = math.exp(rank.middle)
        if not node.is_slow and node.slow_for >= PERSISTENCE:
            node.is_slow = True
            return NodeSlow(node_id=node_id, ratio=ratio, steps=len(rank.own_s), compute_s=own_s, others_s=others_s)
        if node.is_slow and node.fast_for >= PERSISTENCE:
            node.is_slow = False
            return NodeRecovered(node_id=node_id, ratio=ratio)
        return None

    def _slowest(self, node_id: str) -> _Rank:
        return max((rank for rank in self._ranks if rank.node_id == node_id), key=lambda rank: rank.middle)


def decide_exclusion(
    slow: Mapping[str, float],
    workers: Sequence[WorkerView],
    config: WorldConfig,
    *,
    num_leaves: int,
    steps_left: int,
    step_s: float,
    regroup_s: float,
) -> tuple[Keep | Leave, str]:
    """Whether the World should part to go on without its slowest node, and which that is. Only if enough workers stay,
    and the time that the steps left then save is more than parting takes."""
    members = [worker for worker in workers if worker.is_member]
    present = {node_id: ratio for node_id, ratio in slow.items() if any(w.node_id == node_id for w in members)}
    if not present:
        return Keep(), ""
    node_id, ratio = max(present.items(), key=lambda found: found[1])
    rest = choose_members([worker for worker in workers if worker.node_id != node_id], config)
    if not rest or len(rest) < config.min_workers:
        return Keep(reason=f"slow node {node_id[:12]} stays: {len(rest)} workers would be left"), node_id
    before, after = (-(-num_leaves // size) for size in (len(members), len(rest)))
    gain_s = steps_left * step_s * (1.0 - after / (before * ratio))
    if gain_s <= regroup_s:
        return Keep(reason=f"slow node {node_id[:12]} stays: {len(rest)} workers without it are no faster"), node_id
    reason = (
        f"node {node_id[:12]} computes {ratio:.1f} times as long as the others; without it {gain_s:.0f} s are saved"
    )
    return Leave(cause="slow-node", reason=reason), node_id

"""The layout of the one fp64 vector that all ranks sum at the end of a step.

Pure arithmetic on sequences of floats; who sums it, and when it is read, is the Session's business. A slot is filled
by one rank alone, or by all with whole numbers (the step, counts), so the sums are exact at any world size: order
numbers, steps and 48-bit digests lie below 2**53. The sum of the gradient's elements alone is rounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workers.contract import BoundOrder, OrderKind
from workers.reduction import ordered_mean

__all__ = ["NUM_REPLICAS_TOLD", "NUM_STATISTICS", "StepTotals", "StepVectorLayout"]

(
    _ORDER_NUMBER,
    _ORDER_KIND,
    _ORDER_STEP,
    _GRAD_NORM,
    _LR,
    _STEP_S,
    _STEP_WORD,
    _MEMORY_STEP,
    _MEMORY_STALL_S,
    _NUM_REPLICATED,
) = range(10)
NUM_REPLICAS_TOLD = 3
"""Of how many Snapshots in memory a vector says whether they have their replicas: as many as a rank holds."""
_NUM_LEFT_OUT = _NUM_REPLICATED + NUM_REPLICAS_TOLD
_STATISTICS = _NUM_LEFT_OUT + NUM_REPLICAS_TOLD
NUM_STATISTICS = 8
"""Words for training statistics. The last of them are reserved, and zero."""
_GRADIENT_SUM, _GRADIENT_COUNT, _RANKS_PRESSED, _PRESSED_SHARE = range(_STATISTICS, _STATISTICS + 4)
_LOSSES = _STATISTICS + NUM_STATISTICS
_NO_ORDER = BoundOrder(number=0, kind=OrderKind.NONE, step=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTotals:
    """The summed vector of one step, taken apart. ``mean_step`` tells whether all ranks meant the same step.

    ``memory_step``: the step that rank 0 binds for the next Snapshot in memory, 0: none. ``num_replicated``: of some
    earlier ones, in an order known to all, on how many ranks each has its replica, ``num_left_out`` on how many it was
    never made. ``compute_s``: by rank, its own computing time in this step, waiting for others left out; 0 where it was
    not measured.
    """

    order: BoundOrder
    loss: float
    grad_norm: float
    lr: float
    step_s: float
    mean_step: float
    leaf_digests: tuple[int, ...]
    memory_step: int = 0
    memory_stall_s: float = 0.0
    num_replicated: tuple[int, ...] = (0,) * NUM_REPLICAS_TOLD
    num_left_out: tuple[int, ...] = (0,) * NUM_REPLICAS_TOLD
    compute_s: tuple[float, ...] = ()
    gradient_sum: float = 0.0
    gradient_count: int = 0
    ranks_pressed: int = 0
    pressed_share: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepVectorLayout:
    """Where each word stands for a batch of ``num_leaves`` leaves and a World of ``world_size`` ranks."""

    num_leaves: int
    world_size: int

    @property
    def size(self) -> int:
        return _LOSSES + 2 * self.num_leaves + self.world_size

    def compute_slot(self, rank: int) -> int:
        return _LOSSES + 2 * self.num_leaves + rank

    @property
    def grad_norm_slot(self) -> int:
        return _GRAD_NORM

    @property
    def gradient_sum_slot(self) -> int:
        return _GRADIENT_SUM

    def loss_slot(self, leaf_index: int) -> int:
        return _LOSSES + self._checked(leaf_index)

    def digest_slot(self, leaf_index: int) -> int:
        return _LOSSES + self.num_leaves + self._checked(leaf_index)

    def rank_part(
        self,
        *,
        step: int,
        digests: Mapping[int, int],
        rank: int = 0,
        compute_s: float = 0.0,
        replicated: Sequence[bool] = (),
        left_out: Sequence[bool] = (),
        gradient_count: int = 0,
        is_pressed: bool = False,
    ) -> list[float]:
        """What every rank adds without asking its device: the step, the digests of its own leaves by index, how long
        it computed, which of its Snapshots in memory have their replicas or were left out, how many elements of the
        gradient it has summed, and whether its memory is nearly full."""
        words = [0.0] * self.size
        words[_STEP_WORD] = float(step)
        for first, flags in ((_NUM_REPLICATED, replicated), (_NUM_LEFT_OUT, left_out)):
            words[first : first + len(flags)] = [float(flag) for flag in flags]
        words[self.compute_slot(rank)] = compute_s
        words[_GRADIENT_COUNT], words[_RANKS_PRESSED] = float(gradient_count), float(is_pressed)
        for leaf_index, digest in digests.items():
            words[self.digest_slot(leaf_index)] = float(digest)
        return words

    def add_rank0_part(
        self,
        words: list[float],
        *,
        order: BoundOrder | None,
        lr: float,
        step_s: float,
        memory_step: int = 0,
        memory_stall_s: float = 0.0,
        pressed_share: float = 0.0,
    ) -> None:
        """What rank 0 alone adds. The gradient norm lies on its device and goes straight into its slot, as every rank's
        sum of its gradient's elements does."""
        words[_PRESSED_SHARE] = pressed_share
        words[_MEMORY_STEP], words[_MEMORY_STALL_S] = float(memory_step), memory_stall_s
        bound = _NO_ORDER if order is None else order
        words[_ORDER_NUMBER], words[_ORDER_KIND], words[_ORDER_STEP] = bound.number, int(bound.kind), bound.step
        words[_LR], words[_STEP_S] = lr, step_s

    def read(self, words: Sequence[float]) -> StepTotals:
        """Take the sum over all ranks apart."""
        if len(words) != self.size:
            raise ValueError(f"a step vector of {len(words)} words; {self.num_leaves} leaves need {self.size}")
        losses = words[_LOSSES : _LOSSES + self.num_leaves]
        digests_end = _LOSSES + 2 * self.num_leaves
        return StepTotals(
            order=BoundOrder(
                number=int(words[_ORDER_NUMBER]), kind=OrderKind(int(words[_ORDER_KIND])), step=int(words[_ORDER_STEP])
            ),
            loss=ordered_mean(losses),
            grad_norm=words[_GRAD_NORM],
            lr=words[_LR],
            step_s=words[_STEP_S],
            mean_step=words[_STEP_WORD] / self.world_size,
            leaf_digests=tuple(int(word) for word in words[_LOSSES + self.num_leaves : digests_end]),
            memory_step=int(words[_MEMORY_STEP]),
            memory_stall_s=words[_MEMORY_STALL_S],
            num_replicated=tuple(int(word) for word in words[_NUM_REPLICATED:_NUM_LEFT_OUT]),
            num_left_out=tuple(int(word) for word in words[_NUM_LEFT_OUT:_STATISTICS]),
            compute_s=tuple(words[digests_end:]),
            gradient_sum=words[_GRADIENT_SUM],
            gradient_count=int(words[_GRADIENT_COUNT]),
            ranks_pressed=int(words[_RANKS_PRESSED]),
            pressed_share=words[_PRESSED_SHARE],
        )

    def _checked(self, leaf_index: int) -> int:
        if not 0 <= leaf_index < self.num_leaves:
            raise ValueError(f"leaf {leaf_index} of a batch of {self.num_leaves} leaves")
        return leaf_index

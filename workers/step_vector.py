"""The layout of the one fp64 vector that all ranks sum at the end of a step.

Pure arithmetic on sequences of floats; who sums it, and when it is read, is the Session's business. Every slot is
filled by exactly one rank (or, for the step word, by all with the same value), so the sums are exact at any world size:
order numbers, steps and 48-bit digests are whole numbers below 2**53.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workers.contract import BoundOrder, OrderKind
from workers.reduction import ordered_mean

__all__ = ["NUM_STATISTICS", "StepTotals", "StepVectorLayout"]

_ORDER_NUMBER, _ORDER_KIND, _ORDER_STEP, _GRAD_NORM, _LR, _STEP_S, _STEP_WORD = range(7)
_STATISTICS = 7
NUM_STATISTICS = 8
"""Reserved words for training statistics; zero for now."""
_LOSSES = _STATISTICS + NUM_STATISTICS
_NO_ORDER = BoundOrder(number=0, kind=OrderKind.NONE, step=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTotals:
    """The summed vector of one step, taken apart. ``mean_step`` tells whether all ranks meant the same step."""

    order: BoundOrder
    loss: float
    grad_norm: float
    lr: float
    step_s: float
    mean_step: float
    leaf_digests: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepVectorLayout:
    """Where each word stands for a batch of ``num_leaves`` leaves."""

    num_leaves: int

    @property
    def size(self) -> int:
        return _LOSSES + 2 * self.num_leaves

    @property
    def grad_norm_slot(self) -> int:
        return _GRAD_NORM

    def loss_slot(self, leaf_index: int) -> int:
        return _LOSSES + self._checked(leaf_index)

    def digest_slot(self, leaf_index: int) -> int:
        return _LOSSES + self.num_leaves + self._checked(leaf_index)

    def rank_part(self, *, step: int, digests: Mapping[int, int]) -> list[float]:
        """What every rank adds without asking its device: the step, and the digests of its own leaves by index."""
        words = [0.0] * self.size
        words[_STEP_WORD] = float(step)
        for leaf_index, digest in digests.items():
            words[self.digest_slot(leaf_index)] = float(digest)
        return words

    def add_rank0_part(self, words: list[float], *, order: BoundOrder | None, lr: float, step_s: float) -> None:
        """What rank 0 alone adds. The gradient norm lies on its device and goes straight into its slot."""
        bound = _NO_ORDER if order is None else order
        words[_ORDER_NUMBER], words[_ORDER_KIND], words[_ORDER_STEP] = bound.number, int(bound.kind), bound.step
        words[_LR], words[_STEP_S] = lr, step_s

    def read(self, words: Sequence[float], *, world_size: int) -> StepTotals:
        """Take the sum over all ranks apart."""
        if len(words) != self.size:
            raise ValueError(f"a step vector of {len(words)} words; {self.num_leaves} leaves need {self.size}")
        losses = words[_LOSSES : _LOSSES + self.num_leaves]
        return StepTotals(
            order=BoundOrder(
                number=int(words[_ORDER_NUMBER]), kind=OrderKind(int(words[_ORDER_KIND])), step=int(words[_ORDER_STEP])
            ),
            loss=ordered_mean(losses),
            grad_norm=words[_GRAD_NORM],
            lr=words[_LR],
            step_s=words[_STEP_S],
            mean_step=words[_STEP_WORD] / world_size,
            leaf_digests=tuple(int(word) for word in words[_LOSSES + self.num_leaves :]),
        )

    def _checked(self, leaf_index: int) -> int:
        if not 0 <= leaf_index < self.num_leaves:
            raise ValueError(f"leaf {leaf_index} of a batch of {self.num_leaves} leaves")
        return leaf_index

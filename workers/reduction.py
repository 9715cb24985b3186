"""The arithmetic that keeps a step independent of the world size: fixed leaves, fixed weights, ordered sums.

A global batch is cut into leaves, micro-batches of one shape. Rank r of W runs leaves r, r + W, r + 2W, ...; where a
rank has none left it runs a surplus leaf that counts zero, since the collectives of forward and backward need every
rank. Each loss is weighted by 1 / num_leaves and gradients are summed over ranks, never averaged. Pure: no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["leaf_weight", "num_rounds", "ordered_mean"]


def num_rounds(num_leaves: int, world_size: int) -> int:
    """Micro-steps per optimizer step, equal on every rank."""
    return -(-num_leaves // world_size)


def leaf_weight(*, num_leaves: int, is_surplus: bool) -> float:
    """The weight of one leaf's loss in the gradient."""
    return 0.0 if is_surplus else 1.0 / num_leaves


def ordered_mean(losses: Sequence[float]) -> float:
    """The mean in leaf order: the same bits whichever rank ran which leaf."""
    total = 0.0
    for loss in losses:
        total += loss
    return total / len(losses)

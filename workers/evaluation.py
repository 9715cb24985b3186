"""The loss on the held-out split: a fixed set of leaves, summed in order, equal on all ranks and at any world size.

When to evaluate, and what a better value means, is `held_out`'s business.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from workers.data_patience import DataPatience
from workers.dataset_mix import TokenRows
from workers.leaf_rng import LeafRng
from workers.reduction import ordered_mean
from workers.stream import Leaf, validation_leaves

__all__ = ["evaluate", "move_leaf", "reshard"]


def evaluate(
    model: nn.Module,
    loss_of: Callable[[Leaf], torch.Tensor],
    dataset: TokenRows,
    *,
    num_leaves: int,
    micro_batch: int,
    rank: int,
    world_size: int,
    device: torch.device,
    start_sum: Callable[[torch.Tensor], dist.Work],
    check: Callable[[], None],
    must_stop: Callable[[], bool] = lambda: False,
    patience: DataPatience | None = None,
    leaf_rng: LeafRng | None = None,
    step: int = 0,
) -> float | None:
    """Mean loss over the leaves that the split really has, at most ``num_leaves``. Collective.

    ``must_stop`` is asked before the first leaf is read and before each is computed, and must say the same on all
    ranks. None: it said yes. ``leaf_rng``: what the forwards draw is then fixed by ``step`` and leaf.
    """
    if must_stop():
        return None
    losses = torch.zeros(num_leaves, dtype=torch.float64, device=device)
    present = torch.zeros_like(losses)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for leaf in validation_leaves(dataset, num_leaves, micro_batch, rank, world_size, patience):
                check()
                if must_stop():
                    return None
                if leaf_rng is not None:
                    leaf_rng.begin(step, leaf.index, purpose="eval")
                loss = loss_of(move_leaf(leaf, device))
                if not leaf.is_surplus:
                    losses[leaf.index] = loss
                    present[leaf.index] = 1.0
    finally:
        if leaf_rng is not None:
            leaf_rng.end()
        model.train(was_training)
        reshard(model)
    both = torch.stack((losses, present))
    start_sum(both).wait()
    summed, counted = both.tolist()
    return ordered_mean([loss for loss, count in zip(summed, counted, strict=True) if count])


def reshard(model: nn.Module) -> None:
    """Put a sharded model's parameters back into shards: after a forward without a backward some are whole still, and
    then are not the ones that the optimizer holds."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def move_leaf(leaf: Leaf, device: torch.device) -> Leaf:
    """The leaf with its tensors on ``device``. Pinned first: otherwise the host may wait for the device."""
    if device.type == "cpu":
        return leaf
    return Leaf(
        index=leaf.index,
        is_surplus=leaf.is_surplus,
        input_ids=leaf.input_ids.pin_memory().to(device, non_blocking=True),
        labels=leaf.labels.pin_memory().to(device, non_blocking=True),
        sample_ids=leaf.sample_ids,
    )

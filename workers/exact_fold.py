"""Each gradient as one sum in leaf order, in fp64, rounded once at the end: the same bits at any number of ranks.

After every leaf each rank sends the parts of its whole gradient to the ranks that hold them, which add them to a sum of
their own, leaf after leaf. FSDP2 is told zeros until the last round and then the sum. Surplus leaves are left out. The
gradient of one leaf is the business of whoever computes it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

__all__ = ["LeafFold", "Round", "fold"]


class Round:
    """Which leaves the ranks run just now: ``num_leaves`` in a row, rank 0 the first. All folds of a model share it."""

    def __init__(self) -> None:
        self.num_leaves, self.is_last = 1, True

    def begin(self, number: int, *, num_leaves: int, world_size: int) -> None:
        left = num_leaves - number * world_size
        self.num_leaves, self.is_last = min(world_size, left), left <= world_size


def fold(total: torch.Tensor, in_order: Sequence[torch.Tensor]) -> None:
    """Add one after the other into the fp64 ``total``."""
    for one in in_order:
        total.add_(one)


class LeafFold(ReduceScatter):
    """The reduce-scatter of one FSDP module, called once in every round.

    FSDP2 never calls that of a world of one: there its hook folds what would have been sent.
    """

    def __init__(self, current: Round) -> None:
        self._round = current
        self._total: torch.Tensor | None = None

    def install(self, module: FSDPModule, world_size: int) -> None:
        if world_size == 1:
            module.set_all_reduce_hook(lambda gradient: self._add((gradient,), gradient))
        else:
            module.set_custom_reduce_scatter(self)

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: object,  # noqa: ARG002  sums are all that is asked for here, and at once
        async_op: bool = False,  # noqa: ARG002
    ) -> None:
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        self._add(received.view(group.size(), -1).unbind(), output_tensor)

    def _add(self, by_rank: Sequence[torch.Tensor], output: torch.Tensor) -> None:
        if self._total is None:
            self._total = torch.zeros(output.shape, dtype=torch.float64, device=output.device)
        fold(self._total, by_rank[: self._round.num_leaves])
        if not self._round.is_last:
            output.zero_()
            return
        output.copy_(self._total)
        self._total = None

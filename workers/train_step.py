"""One optimizer step as a train loop sees it: leaves in, one update out.

It keeps what the step vector needs of this rank (losses and id digests of its leaves, gradient norm, LR) and talks to
no other rank except through the model's own collectives.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from workers.errors import LoopMisused
from workers.evaluation import move_leaf
from workers.gradient_statistics import GradientSum, sum_elements
from workers.leaf_rng import LeafRng
from workers.local_step import step_locally
from workers.loss_scaling import LossScaling
from workers.parallelize import invariance_of, reduced_gradients, scale_gradients
from workers.reduction import leaf_weight, num_rounds
from workers.sample_order import leaf_digest
from workers.schedule import advance_schedule
from workers.state import TrainingState
from workers.stream import Leaf, LeafStream
from workers.unused_parameters import count_unused

__all__ = ["TrainStep"]


class TrainStep:
    """Step ``number``, counted from 1 over the whole Run. ``measured``: of it the sum of the gradient is taken."""

    def __init__(
        self,
        number: int,
        *,
        state: TrainingState,
        stream: LeafStream,
        device: torch.device,
        num_leaves: int,
        rank: int,
        world_size: int,
        clip_norm: float,
        measured: bool,
        check: Callable[[], None],
        leaf_rng: LeafRng | None = None,
    ) -> None:
        self.number = number
        self._state, self._stream, self._check = state, stream, check
        self._device = device
        self._num_leaves, self._rank, self._world_size, self._clip_norm = num_leaves, rank, world_size, clip_norm
        self._measured, self._leaf_rng = measured, leaf_rng
        self._invariance = invariance_of(state.model)
        self._started_at = time.monotonic()
        self.scaling = LossScaling(state.scaler)
        self.losses: dict[int, torch.Tensor] = {}
        self.digests: dict[int, int] = {}
        self.grad_norm: torch.Tensor | None = None
        self.gradient_sum: GradientSum | None = None
        self.lr = 0.0
        self._num_taken = self._num_backward = 0

    def leaves(self) -> Iterator[Leaf]:
        """This rank's micro-batches. Gradients are reduced over ranks in the backward of the last one, or, where each
        leaf's is folded by itself, of every one."""
        for round_index, leaf in enumerate(self._stream.leaves(self.number)):
            self._check()
            self._begin_leaf(round_index, leaf)
            self._num_taken += 1
            yield move_leaf(leaf, self._device)
            if self._invariance is not None:
                self._invariance.end_leaf()
        self._end_leaves()

    def _begin_leaf(self, round_index: int, leaf: Leaf) -> None:
        model, invariance = self._state.model, self._invariance
        if isinstance(model, FSDPModule):
            is_last = round_index == num_rounds(self._num_leaves, self._world_size) - 1
            is_folded = invariance is not None and invariance.is_exact
            is_reduced = is_last or is_folded
            if is_last and round_index and not is_folded:
                count_unused(model)
            model.set_requires_gradient_sync(is_reduced)
            model.set_is_last_backward(is_reduced)
        if invariance is not None:
            invariance.begin_leaf(round_index, self._num_leaves)
        if self._leaf_rng is not None:
            # A surplus leaf computes what leaf 0 does, and so nothing that could not be counted as zero.
            self._leaf_rng.begin(self.number, 0 if leaf.is_surplus else leaf.index)

    def _end_leaves(self) -> None:
        if self._leaf_rng is not None:
            self._leaf_rng.end()

    def backward(self, leaf: Leaf, loss: torch.Tensor) -> None:
        """Add the leaf's share of the gradient; a surplus leaf adds zero and leaves no trace in the records."""
        weight = leaf_weight(num_leaves=self._num_leaves, is_surplus=leaf.is_surplus)
        torch.autograd.backward(self.scaling.scaled(loss * weight))
        self._num_backward += 1
        if leaf.is_surplus:
            return
        if leaf.index in self.losses:
            raise LoopMisused(f"step {self.number}: leaf {leaf.index} went through backward twice")
        self.losses[leaf.index] = loss.detach()
        self.digests[leaf.index] = leaf_digest(leaf.sample_ids)

    def apply(self) -> torch.Tensor:
        """Clip, update weights, move the schedule on, drop gradients. Returns the gradient norm before clipping.

        Where scaling the loss made a gradient overflow, weights and optimizer stay as they are, on all ranks. It is a
        step all the same: its samples are consumed, it is counted, and the schedule, a function of the step, moves on.
        """
        if self.grad_norm is not None:
            raise LoopMisused(f"step {self.number}: apply was called twice")
        self._require_all_leaves()
        self._check()
        self._end_leaves()  # of a loop that did not ask whether there is another
        state = self._state
        gradients = reduced_gradients(state.model)
        self.scaling.unscale(gradients)
        if self._measured:
            self.gradient_sum = sum_elements(gradients.counted_by(self._rank), gradients.device)
        self.grad_norm = self.scaling.judge(scale_gradients(gradients, self._clip_norm), state.optimizer)
        del gradients
        self._require_gradients(state.optimizer)
        self.lr = float(state.optimizer.param_groups[0]["lr"])
        if not self.scaling.is_skipped:
            step_locally(state.optimizer)
        advance_schedule(state.scheduler, is_update_skipped=self.scaling.is_skipped)
        state.optimizer.zero_grad(set_to_none=True)
        return self.grad_norm

    def _require_all_leaves(self) -> None:
        """Else the sum would lack a leaf, or hold one of another weight, and the record of the step its samples."""
        due = num_rounds(self._num_leaves, self._world_size)
        if self._num_taken != due:
            raise LoopMisused(
                f"step {self.number}: {self._num_taken} of this rank's {due} leaves were taken before step.apply; "
                "go through all of step.leaves()"
            )
        if self._num_backward != due:
            raise LoopMisused(
                f"step {self.number}: {self._num_backward} of this rank's {due} leaves went through step.backward; "
                "call step.backward(leaf, loss) once for each, in place of loss.backward()"
            )

    def _require_gradients(self, optimizer: Optimizer) -> None:
        """Nothing would train, and nothing would show it: FSDP2 does not find the tensors of just any output."""
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        sharded = [parameter for parameter in trained if isinstance(parameter, DTensor)]
        if not any(parameter.grad is not None for parameter in sharded or trained):
            raise LoopMisused(
                f"step {self.number}: no parameter of the optimizer has a gradient. Call step.backward for every leaf; "
                "the model must return tensors, alone or in a tuple, list, dict or registered dataclass"
            )

    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_at

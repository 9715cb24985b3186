"""Turns a meta model into one that a World trains: FSDP2, then activation checkpointing, then compile, in that order.

Neither of the last two changes a name: they replace the block's `forward` and wrap no module. Gradients are summed over
ranks, never averaged: the loss carries the weight of its leaf, so the sum is right at any world size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from workers.config import ActivationCheckpointConfig, ModelConfig, Reproducible
from workers.exact_norm import exact_norm
from workers.invariance import Invariance, require_invariant_modules
from workers.replicated import compute_in, is_first_replica, sum_gradients
from workers.unused_parameters import send_unused
from workers.view_outputs import return_no_views

__all__ = [
    "Gradients",
    "decoder_blocks",
    "invariance_of",
    "parallelize",
    "reduced_gradients",
    "scale_gradients",
]

_INVARIANCE: Final = "_raysume_invariance"  # where a model keeps its own


def invariance_of(model: nn.Module) -> Invariance | None:
    """What keeps this model's steps reproducible; None where that was not asked for."""
    invariance: Invariance | None = model.__dict__.get(_INVARIANCE)
    return invariance


def decoder_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks: members of the outermost ModuleList that holds the most parameters; empty when none."""
    lists: list[nn.ModuleList] = []
    pending = [model]
    while pending:
        module = pending.pop()
        if isinstance(module, nn.ModuleList):
            lists.append(module)
        else:
            pending.extend(module.children())
    if not lists:
        return []
    return list(max(lists, key=_num_values).children())


def _num_values(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def parallelize(
    model: nn.Module, config: ModelConfig, mesh: DeviceMesh, *, reproducible: Reproducible = False
) -> nn.Module:
    """Shard ``model`` over ``mesh`` in place, or leave it whole on every rank. A world of one takes the same path."""
    if reproducible:
        require_invariant_modules(model)
    compute = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[config.compute_dtype]
    blocks = decoder_blocks(model)
    if config.parallelism == "ddp":
        if compute is not torch.float32:
            compute_in(model, compute, mesh.device_type)
    else:
        # Leaves add up in this dtype, on a rank and over ranks; the exact fold gets each of them by itself.
        _shard(model, blocks, compute, mesh, torch.float64 if reproducible is True else torch.float32)
    if reproducible:
        model.__dict__[_INVARIANCE] = Invariance(model, reproducible, mesh.size())
    _checkpoint_activations(blocks, config.activation_checkpointing)
    if config.compile:
        for block in blocks:
            block.forward = torch.compile(block.forward)
    return model


def _shard(
    model: nn.Module, blocks: list[nn.Module], compute: torch.dtype, mesh: DeviceMesh, reduce_dtype: torch.dtype
) -> None:
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce_dtype)
    scalars = {parameter for parameter in model.parameters() if parameter.ndim == 0 or not parameter.numel()}
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, ignored_params=scalars)
    fully_shard(model, mesh=mesh, mp_policy=policy, ignored_params=scalars)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            return_no_views(module)
    send_unused(model)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """A step's gradients as they lie here: this rank's parts of sharded ones, and whole ones that every rank holds."""

    sharded: tuple[torch.Tensor, ...]
    replicated: tuple[torch.Tensor, ...]
    device: torch.device
    num_exact: int | None = None
    """Elements of the whole model, where the norm is to have the same bits however they are cut."""

    is_first_replica: bool = True
    """Whether ``sharded`` are counted here: under HSDP other ranks hold the same."""

    def counted_by(self, rank: int) -> tuple[torch.Tensor, ...]:
        """Those that ``rank`` answers for, where every element of the model's gradient is to be met exactly once."""
        return self.counted_shards + self.replicated if rank == 0 else self.counted_shards

    @property
    def counted_shards(self) -> tuple[torch.Tensor, ...]:
        return self.sharded if self.is_first_replica else ()


def reduced_gradients(model: nn.Module) -> Gradients:
    """Once per optimizer step, on every rank: all gradients, summed over ranks.

    FSDP2 has summed those of what it shards in the last backward. What is whole on every rank is summed here.
    """
    if isinstance(model, FSDPModule):
        model.reshard()  # after an evaluation of the loop's own its outermost parameters are whole still
    parameters = list(model.parameters())
    whole = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
    invariance = invariance_of(model)
    replicated = sum_gradients(whole) if invariance is None else invariance.sum_whole(whole)
    sharded = [parameter.grad.to_local() for parameter in parameters if isinstance(parameter.grad, DTensor)]
    device = parameters[0].device
    num_exact = None
    if invariance is not None and sharded + replicated:
        torch._foreach_add_(sharded + replicated, 0.0)  # -0.0 to 0.0: a surplus leaf's zeros decide which of them it is
        num_exact = sum(parameter.numel() for parameter in parameters)
    return Gradients(
        sharded=tuple(sharded),
        replicated=tuple(replicated),
        device=device,
        num_exact=num_exact,
        is_first_replica=is_first_replica(model),
    )


def scale_gradients(gradients: Gradients, max_norm: float) -> torch.Tensor:
    """Scale all gradients so that their global L2 norm is at most ``max_norm``; returns the norm before.

    Squares are summed in fp64, so the norm hardly depends on how shards are cut. Those of what every rank holds are one
    rank's word: machines that differ must not come to scales that differ, and their replicas apart.
    """
    norm = _norm(gradients)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in (*gradients.sharded, *gradients.replicated):
        gradient.mul_(scale.to(gradient.dtype))
    return norm


def _norm(gradients: Gradients) -> torch.Tensor:
    rank = dist.get_rank() if dist.is_initialized() else 0
    if gradients.num_exact is not None:
        return exact_norm(gradients.counted_by(rank), count=gradients.num_exact, device=gradients.device)
    whole = gradients.replicated if rank == 0 else ()
    parts = (_sum_of_squares(gradients.counted_shards, gradients.device), _sum_of_squares(whole, gradients.device))
    totals = torch.stack(parts)
    if dist.is_initialized():
        dist.all_reduce(totals)
    return totals.sum().sqrt()


def _sum_of_squares(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64, device=device)
    for tensor in tensors:
        total += torch.linalg.vector_norm(tensor, dtype=torch.float64).square()
    return total


def _checkpoint_activations(blocks: list[nn.Module], config: ActivationCheckpointConfig) -> None:
    if not config.enabled:
        return
    for index, block in enumerate(blocks):
        if index % config.every_kth_block == 0:
            _recompute_in_backward(block, index)


def _recompute_in_backward(block: nn.Module, index: int) -> None:
    if any(isinstance(module, _BatchNorm) for module in block.modules()):
        raise ValueError(
            f"activation checkpointing of block {index}: it holds a BatchNorm, whose running statistics would be "
            "updated twice; turn model.activation_checkpointing off"
        )
    forward = block.forward

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not block.training or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    block.forward = recomputed

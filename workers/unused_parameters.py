"""Parameters that only some leaves use, as experts of a mixture: under FSDP2 each has its place in every sum, as zero.

Left to itself FSDP2 sends what a rank has a gradient for, and adds it to whatever another rank sends: where two ranks
have used different parameters these are added to each other. What stays whole on every rank is `replicated`'s matter.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

__all__ = ["count_unused", "send_unused"]

_SHARDED: Final = "_raysume_sharded"  # where a model keeps what of it is sharded


def send_unused(model: nn.Module) -> None:
    """Once, when ``model`` has been sharded: every rank sends the same, zeros where it has no gradient."""
    sharded: list[FSDPParam] = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_reduce_scatter_unused_params(True, recurse=False)
            for group in module._get_fsdp_state()._fsdp_param_groups:
                sharded.extend(group.fsdp_params)
    model.__dict__[_SHARDED] = tuple(sharded)


def count_unused(model: nn.Module) -> None:
    """Before the last leaf of several: zero as the sum of each parameter that none of them has used.

    Gradients of earlier leaves are kept in the dtype of the reduction, and all of a module's are reduced in one: what
    only the last leaf uses would come in another.
    """
    sharded: tuple[FSDPParam, ...] = model.__dict__.get(_SHARDED, ())
    for part in sharded:
        if part.reduce_dtype is None or part.unsharded_accumulated_grad is not None:
            continue  # without a dtype it is that of the gradients themselves
        whole: torch.Tensor | None = getattr(part, "_unsharded_param", None)
        if whole is not None and whole.requires_grad:
            part.unsharded_accumulated_grad = torch.zeros(whole.shape, dtype=part.reduce_dtype, device=whole.device)

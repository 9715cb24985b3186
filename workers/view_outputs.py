"""What a sharded module returns is no view, so that the loop may change it in place, as `logits /= temperature` does.

FSDP2 hangs what begins a module's backward on the tensors it returns. An operation in place on a view, as a Linear with
a bias returns of a batch of sequences, throws that away: gradients of the outermost module were never reduced, and its
parameters never trained. Nothing is copied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["return_no_views"]


def return_no_views(module: nn.Module) -> None:
    """Once ``module`` has been sharded."""
    module.register_forward_hook(_whole_output, prepend=True)  # before FSDP2's own sees the output


class _SameValues(torch.autograd.Function):
    """The same memory under another tensor, with the version counter that tells of changes in place."""

    @staticmethod
    def forward(_context: Any, view: torch.Tensor) -> torch.Tensor:
        return view.detach()

    @staticmethod
    def backward(_context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def _whole_output(_module: nn.Module, _inputs: object, output: Any) -> Any:
    if not any(isinstance(one, torch.Tensor) and _is_hookable_view(one) for one in tree_leaves(output)):
        return output
    return tree_map_only(torch.Tensor, _whole, output)


def _is_hookable_view(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and tensor._is_view()


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    if not _is_hookable_view(tensor):
        return tensor
    same: torch.Tensor = _SameValues.apply(tensor)  # type: ignore[no-untyped-call]
    return same

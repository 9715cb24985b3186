"""The loss that is trained on when the loop brings none of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from workers.stream import Leaf

__all__ = ["LossOf", "mean_token_loss"]

LossOf = Callable[[nn.Module, Leaf], torch.Tensor]
"""The mean loss of a model on one leaf, as a tensor without dimensions."""


def mean_token_loss(model: nn.Module, leaf: Leaf) -> torch.Tensor:
    """In fp32, of a Hugging Face causal LM. A leaf's labels are its inputs moved on by one token."""
    logits = model(input_ids=leaf.input_ids).logits
    return functional.cross_entropy(logits.float().flatten(0, 1), leaf.labels.flatten())

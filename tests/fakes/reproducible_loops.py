"""Training loops of models that make it hard to have the same bits at every world size, and some that make it vain."""

from __future__ import annotations

import math
import random

import numpy as np
import torch
from torch import nn

from tests.fakes.small_training import Block, OddModel
from workers.session import Session
from workers.stream import Leaf

__all__ = [
    "train_batch_normed",
    "train_cancelling",
    "train_fused",
    "train_odd",
    "train_twice_called",
    "train_with_a_running_buffer",
]

_VOCAB = 7


class NoisyModel(OddModel):
    """Draws from every generator in its forward, and uses its scalar twice."""

    def __init__(self) -> None:
        super().__init__(num_blocks=3, width=12, dropout=0.2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = super().forward(ids) * (1.0 + 0.01 * self.temperature)
        if not self.training:
            return logits
        return logits * (1.0 + 0.01 * random.random() + 0.01 * float(np.random.rand()))


class TwiceCalled(OddModel):
    """Its first block is also its last."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.blocks[0](self.blocks[1](self.blocks[0](self.embedding(ids)))))
        return logits


class Running(OddModel):
    """Counts in a stored buffer what it has seen."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.count += ids.numel()
        return super().forward(ids)


def _loss(model: nn.Module, leaf: Leaf) -> torch.Tensor:
    logits = model(leaf.input_ids.remainder(_VOCAB)).flatten(0, 1).float()
    # By the place in the sequence, so that rows of one token still have something to learn.
    labels = (leaf.labels + torch.arange(leaf.labels.shape[1])).remainder(_VOCAB)
    return nn.functional.cross_entropy(logits, labels.flatten())


def _train(session: Session) -> None:
    for step in session.steps():
        for leaf in step.leaves():
            step.backward(leaf, _loss(session.state.model, leaf))
        step.apply()
        session.step_end(step)


def train_odd(session: Session) -> None:
    session.build(make_model=NoisyModel)
    _train(session)


def train_twice_called(session: Session) -> None:
    session.build(make_model=TwiceCalled)
    _train(session)


def train_with_a_running_buffer(session: Session) -> None:
    session.build(make_model=Running)
    _train(session)


def train_fused(session: Session) -> None:
    session.build(make_model=OddModel, make_optimizer=lambda model: torch.optim.AdamW(model.parameters(), fused=True))
    _train(session)


class Line(nn.Module):
    """Its gradient is what it is multiplied by."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(5))
        self.offset = nn.Parameter(torch.empty(()))

    def reset_parameters(self) -> None:
        for parameter in (self.weight, self.offset):
            if parameter is not None:
                nn.init.zeros_(parameter)

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        return (self.weight * factor).sum() + self.offset * factor.squeeze()


def train_cancelling(session: Session) -> None:
    """Four leaves whose gradients all but cancel: in fp64 it depends on the order what is left of them. A surplus
    leaf's is not a number."""
    by_leaf = (2.0**60, 1.0, -(2.0**60), 1.0)
    state = session.build(
        make_model=Line, make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0, foreach=True)
    )
    for step in session.steps():
        for leaf in step.leaves():
            factor = math.nan if leaf.is_surplus else len(by_leaf) * by_leaf[leaf.index]
            step.backward(leaf, state.model(torch.tensor([factor])))
        step.apply()
        session.step_end(step)


class NormedBlock(Block):
    """Keeps running statistics."""

    def __init__(self) -> None:
        super().__init__(5, 0.0)
        self.normed = nn.BatchNorm1d(16)


class Normed(OddModel):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = NormedBlock()


def train_batch_normed(session: Session) -> None:
    session.build(make_model=Normed)
    _train(session)

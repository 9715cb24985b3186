"""Loops of a user's own for `test_training_state`: small models, and what they keep beside them.

Each checks on every rank what must hold there, and an Attempt in which it does not ends in an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor

from workers.session import Session
from workers.stream import Leaf
from workers.train_loop import train


class Bigram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(257, 32)
        self.drop = nn.Dropout(0.25)
        self.head = nn.Linear(32, 257)
        self.nothing = nn.Parameter(torch.empty(0, 4))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.drop(self.table(input_ids)))
        return logits + self.nothing.sum()


def mean_loss(model: nn.Module, leaf: Leaf) -> torch.Tensor:
    logits = model(leaf.input_ids)
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), leaf.labels.flatten())


class NoDropout(Bigram):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)


class Overflow(torch.autograd.Function):
    """Zeros, and a gradient that is not finite in the last place alone: in the shard of the last rank."""

    @staticmethod
    def forward(_ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(values)

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        wrong = torch.zeros_like(gradients[0])
        wrong[-1] = float("inf")
        return wrong


class Overflowing(NoDropout):
    """Where it ``is_wrong``, only the loss is what it would be."""

    is_wrong = False

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits = super().forward(input_ids)
        if self.is_wrong:
            logits = logits + Overflow.apply(self.head.bias)  # type: ignore[no-untyped-call]
        return logits


def local(model: nn.Module) -> list[torch.Tensor]:
    return [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]


def train_scaled(session: Session) -> None:
    """In step 3 one leaf makes the gradient overflow, in one place that one rank holds."""
    state = session.build(
        make_model=Overflowing,
        make_scaler=lambda: GradScaler("cpu", init_scale=1024.0, growth_interval=3),
        loss=mean_loss,
    )
    model = state.model
    assert isinstance(model, Overflowing)
    for step in session.steps():
        before = [part.detach().clone() for part in local(state.model)]
        for leaf in step.leaves():
            model.is_wrong = step.number == 3 and leaf.index == 1
            step.backward(leaf, session.loss(leaf))
        step.apply()
        if step.scaling.is_skipped is not (step.number == 3):
            raise ValueError(f"rank {session.rank}: step {step.number}: skipped is {step.scaling.is_skipped}")
        same = all(torch.equal(now, then) for now, then in zip(local(state.model), before, strict=True))
        if same is not step.scaling.is_skipped:
            raise ValueError(f"rank {session.rank}: step {step.number}: weights changed: {not same}")
        counts = {int(entry["step"]) for entry in state.optimizer.state.values()}
        if counts != {step.number - (step.number >= 3)}:
            raise ValueError(f"rank {session.rank}: step {step.number}: the optimizer counts {counts}")
        session.step_end(step)


class Experts(NoDropout):
    """Two layers of one shape, of which a leaf uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd = nn.Linear(32, 32), nn.Linear(32, 32)
        self.is_odd = False

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.table(input_ids)
        logits: torch.Tensor = self.head(x + (self.odd if self.is_odd else self.even)(x))
        return logits


def train_experts(session: Session) -> None:
    state = session.build(make_model=Experts, loss=mean_loss)
    model = state.model
    assert isinstance(model, Experts)
    for step in session.steps():
        for leaf in step.leaves():
            model.is_odd = leaf.index % 2 == 1
            step.backward(leaf, session.loss(leaf))
        step.apply()
        session.step_end(step)


class Wrapped:
    """An output that torch cannot look into."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


class Hidden(NoDropout):
    def forward(self, input_ids: torch.Tensor) -> Wrapped:  # type: ignore[override]
        return Wrapped(super().forward(input_ids))


def train_hidden(session: Session) -> None:
    session.build(make_model=Hidden)
    train(session)


def train_plainly(session: Session) -> None:
    """The built-in loop with a model of one's own."""
    session.build(make_model=NoDropout, loss=mean_loss)
    train(session)


def train_with_dropout(session: Session) -> None:
    session.build(make_model=Bigram, loss=mean_loss)
    train(session)


class OwnState:
    """What each rank keeps for itself: a number, a tensor of its own length, and its own generator."""

    def __init__(self, rank: int) -> None:
        self.position, self.rank = 100 + rank, rank
        self.values = torch.zeros(1 + rank)
        self.generator = torch.Generator().manual_seed(1000 + rank)

    def state_dict(self) -> dict[str, Any]:
        return {"pos": self.position, "values": self.values, "generator": self.generator.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position, self.values = state_dict["pos"], state_dict["values"]
        self.generator.set_state(state_dict["generator"])


class Average:
    """A moving average of the weights, sharded as they are."""

    def __init__(self, model: nn.Module) -> None:
        self.values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        self.steps = 0

    def update(self, model: nn.Module) -> None:
        self.steps += 1
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                self.values[name].lerp_(parameter.detach(), 0.5)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.values, self.steps = state_dict["values"], state_dict["steps"]

    def total(self) -> float:
        return sum(
            float((one.full_tensor() if isinstance(one, DTensor) else one).sum()) for one in self.values.values()
        )


def train_with_own_state(session: Session) -> None:
    """Each rank writes what it holds at every step, restored state first, into a file of its own."""
    own: dict[str, OwnState] = {}
    averages: dict[str, Average] = {}

    def make_own(_: nn.Module) -> dict[str, OwnState]:
        own["loader"] = OwnState(session.rank)
        return own

    def make_averages(model: nn.Module) -> dict[str, Average]:
        averages["average"] = Average(model)
        return averages

    state = session.build(make_model=Bigram, make_trackers=make_averages, make_rank_trackers=make_own, loss=mean_loss)
    mine, average = own["loader"], averages["average"]
    folder = Path(str(session.loop_config["folder"]))
    log = folder / f"rank-{session.rank}.txt"

    def write(step: int) -> None:
        draws = torch.get_rng_state().sum().item()
        values = mine.values.tolist()
        generator = int(mine.generator.get_state().sum())
        with log.open("a") as file:
            file.write(f"{(step, mine.position, values, generator, draws, average.steps, average.total())}\n")

    write(session.finished_step)
    for step in session.steps():
        for leaf in step.leaves():
            step.backward(leaf, session.loss(leaf))
        step.apply()
        average.update(state.model)
        mine.position += 10
        mine.values += torch.rand(len(mine.values), generator=mine.generator)
        write(step.number)
        session.step_end(step)


def train_holding_progress(session: Session) -> None:
    """Keeps the Progress that it was given, and its own count beside it."""
    state = session.build(make_model=NoDropout, loss=mean_loss)
    progress, begun_at = state.progress, state.progress.step
    own = 0
    for step in session.steps():
        for leaf in step.leaves():
            step.backward(leaf, session.loss(leaf))
        step.apply()
        session.step_end(step)
        own += 1
    session.drain()
    if state.progress is not progress or progress.step != begun_at + own:
        raise ValueError(f"{own} steps after {begun_at} the progress that the loop holds says {progress.step}")

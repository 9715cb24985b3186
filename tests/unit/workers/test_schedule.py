"""Every kind of torch schedule through a whole save and resume; real: torch's schedulers, the record path. No sharding.

The LR of each step after the resume is compared with that of a run which was never stopped.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import SWALR

from storage.errors import ManifestMismatch
from storage.memory_store import MemoryStore
from tests.fakes.small_training import newest_plan, save_alone
from workers.plain_state import NotPlain
from workers.resume import restore
from workers.schedule import advance_schedule, schedule_kind
from workers.snapshot import capture
from workers.state import TrainingState

PEAK = 1e-3
STOPPED_AT, LAST = 40, 60
Make = Callable[[Optimizer], LRScheduler]


class WarmUp:
    """A callable with state of its own, which torch stores."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, finished: int) -> float:
        return min(1.0, (finished + 1) / self.steps)


def sequential(optimizer: Optimizer) -> LRScheduler:
    """Warm-up 5, cosine to 100."""
    warm_up = lr_scheduler.LinearLR(optimizer, start_factor=0.2, total_iters=4)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=95)
    return lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], milestones=[5])


def chained(optimizer: Optimizer) -> LRScheduler:
    parts = [lr_scheduler.ConstantLR(optimizer, total_iters=45), lr_scheduler.ExponentialLR(optimizer, gamma=0.99)]
    return lr_scheduler.ChainedScheduler(parts, optimizer=optimizer)


def cosine_after(start: int, finished: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * max(0, finished - start) / 100))


KINDS: dict[str, Make] = {
    "lambda": lambda one: lr_scheduler.LambdaLR(one, functools.partial(cosine_after, 5)),
    "lambda-object": lambda one: lr_scheduler.LambdaLR(one, WarmUp(50)),
    "multiplicative": lambda one: lr_scheduler.MultiplicativeLR(one, lambda _: 0.97),
    "step": lambda one: lr_scheduler.StepLR(one, step_size=7, gamma=0.5),
    "multi-step": lambda one: lr_scheduler.MultiStepLR(one, milestones=[10, 42, 42, 55], gamma=0.5),
    "constant": lambda one: lr_scheduler.ConstantLR(one, factor=0.25, total_iters=50),
    "linear": lambda one: lr_scheduler.LinearLR(one, start_factor=0.1, total_iters=55),
    "exponential": lambda one: lr_scheduler.ExponentialLR(one, gamma=0.95),
    "polynomial": lambda one: lr_scheduler.PolynomialLR(one, total_iters=58, power=2.0),
    "cosine": lambda one: lr_scheduler.CosineAnnealingLR(one, T_max=100),
    "cosine-restarts": lambda one: lr_scheduler.CosineAnnealingWarmRestarts(one, T_0=12, T_mult=2),
    "one-cycle": lambda one: lr_scheduler.OneCycleLR(one, max_lr=[PEAK, PEAK / 10], total_steps=100),
    "cyclic": lambda one: lr_scheduler.CyclicLR(
        one, base_lr=PEAK / 10, max_lr=PEAK, step_size_up=9, cycle_momentum=False
    ),
    "sequential": sequential,
    "chained": chained,
}


def build(make: Make, *, lr: float | torch.Tensor = PEAK, backwards: bool = False) -> TrainingState:
    """A model without sharding and two groups, of which the second has a tenth of the LR."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    groups: list[dict[str, Any]] = [
        {"params": [model[0].weight, model[1].weight], "lr": lr},
        {"params": [model[0].bias, model[1].bias], "lr": lr / 10, "weight_decay": 0.0},
    ]
    optimizer = AdamW(groups[::-1] if backwards else groups, lr=lr)
    return TrainingState(model=model, optimizer=optimizer, scheduler=make(optimizer))


def train(state: TrainingState, until: int) -> list[dict[str, float]]:
    """The LR with which each step was taken, by the names of the groups' parameters."""
    names = {id(parameter): name for name, parameter in state.model.named_parameters()}
    taken = []
    while state.progress.step < until:
        state.progress.step += 1
        groups = state.optimizer.param_groups
        taken.append({names[id(group["params"][0])]: float(group["lr"]) for group in groups})
        for parameter in state.model.parameters():
            parameter.grad = torch.full_like(parameter, 0.1)
        state.optimizer.step()
        advance_schedule(state.scheduler)
    return taken


def assert_close(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(found) == len(expected)
    for here, there in zip(found, expected, strict=True):
        assert here == pytest.approx(there, rel=0, abs=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_41_to_60_have_the_learning_rate_of_the_run_that_was_not_stopped(kind: str) -> None:
    """B39, for every schedule of torch's that goes by the step."""
    unbroken = train(build(KINDS[kind]), LAST)
    store = MemoryStore()
    stopped = build(KINDS[kind])
    train(stopped, STOPPED_AT)
    plan = save_alone(stopped, store)
    resumed = build(KINDS[kind])
    restore(resumed, plan, store, rank=0, world_size=1)
    assert_close(train(resumed, LAST), unbroken[STOPPED_AT:])


def test_a_schedule_that_follows_a_metric_goes_on_with_its_patience() -> None:
    """ReduceLROnPlateau is moved on by the loop itself: the LR falls at the very step at which it would have."""

    def run(state: TrainingState, until: int) -> list[float]:
        taken = []
        while state.progress.step < until:
            train(state, state.progress.step + 1)
            assert isinstance(state.scheduler, lr_scheduler.ReduceLROnPlateau)
            state.scheduler.step(1.0)  # the metric never improves: the LR is halved every 4 steps
            taken.append(float(state.optimizer.param_groups[0]["lr"]))
        return taken

    def plateau(optimizer: Optimizer) -> LRScheduler:
        return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=3)

    unbroken = run(build(plateau), 12)
    store = MemoryStore()
    stopped = build(plateau)
    run(stopped, 6)
    resumed = build(plateau)
    restore(resumed, save_alone(stopped, store), store, rank=0, world_size=1)
    assert run(resumed, 12) == unbroken[6:]
    assert len(set(unbroken[6:])) > 1


@pytest.mark.parametrize("kind", ["cosine", "one-cycle", "cyclic", "sequential", "chained", "lambda"])
def test_groups_in_another_order_keep_each_their_own_schedule(kind: str) -> None:
    """Nothing is shifted from one group to the other: base, peak and last LR go by the names of the parameters."""
    make = KINDS[kind]
    if kind == "one-cycle":  # built the other way round, its peaks are given the other way round too
        make = lambda one: lr_scheduler.OneCycleLR(  # noqa: E731
            one, max_lr=[group["lr"] for group in one.param_groups], total_steps=100
        )
    unbroken = train(build(make), LAST)
    store = MemoryStore()
    stopped = build(make)
    train(stopped, STOPPED_AT)
    plan = save_alone(stopped, store)
    resumed = build(make, backwards=True)
    restore(resumed, plan, store, rank=0, world_size=1)
    assert_close(train(resumed, LAST), unbroken[STOPPED_AT:])
    assert [group["weight_decay"] for group in resumed.optimizer.param_groups] == [0.0, 0.01]


class PlaceSchedule(LRScheduler):
    """A user's own, with a list of which nobody knows whether it goes by groups."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.factors = [1.0, 2.0]
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        return [base * factor for base, factor in zip(self.base_lrs, self.factors, strict=True)]


def test_groups_in_another_order_are_refused_where_the_schedule_may_go_by_their_place() -> None:
    store = MemoryStore()
    stopped = build(PlaceSchedule)
    train(stopped, 2)
    plan = save_alone(stopped, store)
    restore(build(PlaceSchedule), plan, store, rank=0, world_size=1)
    with pytest.raises(ManifestMismatch, match=r"scheduler \(param groups stand in another order, and PlaceSchedule"):
        restore(build(PlaceSchedule, backwards=True), plan, store, rank=0, world_size=1)


@pytest.mark.parametrize("saved_as_tensor", [True, False])
@pytest.mark.parametrize("kind", ["cosine", "one-cycle", "lambda", "sequential"])
def test_a_learning_rate_goes_from_a_number_into_a_tensor_and_back(kind: str, saved_as_tensor: bool) -> None:
    """What was saved as one goes into the other, and it stays the object that was there."""
    tensor, number = torch.tensor(PEAK, dtype=torch.float64), PEAK
    store = MemoryStore()
    stopped = build(KINDS[kind], lr=tensor.clone() if saved_as_tensor else number)
    train(stopped, STOPPED_AT)
    plan = save_alone(stopped, store)
    resumed = build(KINDS[kind], lr=number if saved_as_tensor else tensor.clone())
    held = resumed.optimizer.param_groups[0]["lr"]
    restore(resumed, plan, store, rank=0, world_size=1)
    here = resumed.optimizer.param_groups[0]["lr"]
    assert isinstance(here, torch.Tensor) is not saved_as_tensor
    assert here is held or saved_as_tensor
    assert_close(train(resumed, LAST), train(build(KINDS[kind]), LAST)[STOPPED_AT:])


def test_another_kind_of_schedule_is_refused_with_both() -> None:
    store = MemoryStore()
    stopped = build(KINDS["cosine"])
    train(stopped, 3)
    plan = save_alone(stopped, store)
    with pytest.raises(ManifestMismatch, match=r"scheduler \(saved CosineAnnealingLR, here SequentialLR\(LinearLR, "):
        restore(build(sequential), plan, store, rank=0, world_size=1)
    resumed = build(sequential)
    report = restore(resumed, newest_plan(store, allow_partial=True), store, rank=0, world_size=1)
    assert resumed.scheduler.last_epoch == 0
    assert any("scheduler (saved CosineAnnealingLR" in line for line in report.lines)


def test_a_schedule_that_holds_a_function_is_refused_by_its_path() -> None:
    state = build(lambda one: SWALR(one, swa_lr=1e-4))
    state.scheduler.own_function = lambda: None  # type: ignore[attr-defined]
    with pytest.raises(NotPlain, match=r"scheduler\.own_function is a builtins\.function"):
        capture(state, rank=0, world_size=1)


def test_the_kind_names_what_is_inside() -> None:
    state = build(sequential)
    assert schedule_kind(state.scheduler) == "SequentialLR(LinearLR, CosineAnnealingLR)"

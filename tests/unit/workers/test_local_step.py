"""A step on the local parts is the step on the sharded parameters. Real: FSDP2, gloo of one rank, the optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from workers.local_step import step_locally

MAKERS: dict[str, Callable[[list[nn.Parameter]], optim.Optimizer]] = {
    "adamw-foreach": lambda params: optim.AdamW(params, lr=0.1, foreach=True),
    "adamw-amsgrad": lambda params: optim.AdamW(params, lr=0.1, amsgrad=True),
    "sgd": lambda params: optim.SGD(params, lr=0.1),
    "sgd-momentum": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda params: optim.RMSprop(params, lr=0.1, momentum=0.9, centered=True),
    "adagrad": lambda params: optim.Adagrad(params, lr=0.1),
}


def sharded_pair(mesh: DeviceMesh) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    one: nn.Module = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))
    one[0].weight.requires_grad_(False)
    other = copy.deepcopy(one)
    return fully_shard(one, mesh=mesh), fully_shard(other, mesh=mesh)


def train(model: nn.Module, optimizer: optim.Optimizer, step: Callable[[optim.Optimizer], Any]) -> None:
    torch.manual_seed(4)
    for _ in range(3):
        model(torch.randn(4, 5)).square().mean().backward()
        step(optimizer)
        optimizer.zero_grad(set_to_none=True)


@pytest.mark.parametrize("name", MAKERS)
def test_parameters_and_state_are_those_of_the_ordinary_step(mesh: DeviceMesh, name: str) -> None:
    plain, local = sharded_pair(mesh)
    by_plain, by_local = MAKERS[name](list(plain.parameters())), MAKERS[name](list(local.parameters()))
    lists = [group["params"] for group in by_local.param_groups]
    before = [parameter.full_tensor().clone() for parameter in local.parameters()]
    train(plain, by_plain, lambda optimizer: optimizer.step())
    train(local, by_local, step_locally)
    after = [parameter.full_tensor() for parameter in local.parameters()]
    assert not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "nothing was updated"
    assert all(group["params"] is params for group, params in zip(by_local.param_groups, lists, strict=True))
    for mine, theirs in zip(local.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), theirs.full_tensor())
        assert_same_state(by_local.state[mine], by_plain.state[theirs])


def test_no_part_keeps_a_gradient_after_the_step(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = sharded_pair(mesh)
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    seen: list[tuple[torch.Tensor, bool]] = []
    step = optimizer.step

    def watched_step() -> None:
        seen.extend((part, part.grad is not None) for group in optimizer.param_groups for part in group["params"])
        step()

    monkeypatch.setattr(optimizer, "step", watched_step)
    train(model, optimizer, step_locally)
    assert any(had_gradient for _, had_gradient in seen), "the step saw no gradients, so none could stay"
    assert [part.grad for part, _ in seen] == [None] * len(seen)


def assert_same_state(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert list(mine) == list(theirs)
    for key, value in theirs.items():
        assert type(mine[key]) is type(value), key
        if isinstance(value, DTensor):
            assert mine[key].placements == value.placements
            assert torch.equal(mine[key].full_tensor(), value.full_tensor())
        elif isinstance(value, torch.Tensor):
            assert torch.equal(mine[key], value)
        else:
            assert mine[key] == value


def test_an_elementwise_optimizer_meets_plain_tensors_and_another_one_what_it_was_given(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Own(optim.AdamW):
        """May do with whole tensors what it likes."""

    model, _ = sharded_pair(mesh)
    met: list[bool] = []
    for optimizer in (optim.AdamW(model.parameters()), Own(model.parameters())):

        def spy(self: optim.Optimizer, closure: Any = None) -> None:
            del closure
            met.append(any(isinstance(p, DTensor) for group in self.param_groups for p in group["params"]))

        monkeypatch.setattr(type(optimizer), "step", spy)
        step_locally(optimizer)
    hooked = optim.AdamW(model.parameters())
    hooked.register_step_pre_hook(lambda *_: None)
    step_locally(hooked)
    assert met == [False, True, True]


def test_a_step_that_fails_leaves_the_optimizer_whole(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = sharded_pair(mesh)
    optimizer = optim.AdamW(model.parameters())
    train(model, optimizer, step_locally)
    state, keys = optimizer.state, list(optimizer.state)

    def fail(_: optim.Optimizer) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(optim.AdamW, "step", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        step_locally(optimizer)
    assert optimizer.state is state
    assert list(optimizer.state) == keys
    assert all(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])

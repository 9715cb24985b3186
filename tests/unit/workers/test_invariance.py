"""What keeps bits independent of the number of ranks: updates of any cut, one gradient a leaf; and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tests.fakes.small_training import OddModel
from workers.config import ModelConfig, Reproducible
from workers.errors import NotReproducible
from workers.invariance import require_invariant_modules, require_invariant_optimizer
from workers.models import materialize
from workers.names import named_parameters
from workers.parallelize import invariance_of, parallelize, reduced_gradients
from workers.unused_parameters import count_unused

NUM = 4099
CUTS = ((), (1,), (5, 6, 9, 1000), (1025, 2050, 3075), tuple(range(7, 3500, 7)))
OPTIMIZERS: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (optim.AdamW, {"amsgrad": True}),
    "Adam": (optim.Adam, {"weight_decay": 0.1}),
    "SGD": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "NAdam": (optim.NAdam, {}),
    "RAdam": (optim.RAdam, {}),
    "Adamax": (optim.Adamax, {}),
    "RMSprop": (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "Adagrad": (optim.Adagrad, {}),
}


def updated(make: type[optim.Optimizer], settings: dict[str, Any], cuts: tuple[int, ...]) -> torch.Tensor:
    """One long parameter after four steps, held in pieces whose memory is aligned in every possible way."""
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(NUM, generator=generator)
    edges = list(pairwise((0, *cuts, NUM)))
    parts = [nn.Parameter(whole[start:stop].clone()) for start, stop in edges]
    optimizer = make(parts, **settings)
    require_invariant_optimizer(optimizer)
    for _ in range(4):
        gradient = torch.randn(NUM, generator=generator) * torch.exp(3 * torch.randn(NUM, generator=generator))
        for index, (part, (start, stop)) in enumerate(zip(parts, edges, strict=True)):
            part.grad = torch.empty(stop - start + 7)[index % 7 :][: stop - start].copy_(gradient[start:stop])
        optimizer.step()
    return torch.cat([part.detach() for part in parts])


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_is_allowed_has_the_same_bits_however_parameters_are_cut(name: str, foreach: bool) -> None:
    make, settings = OPTIMIZERS[name]
    expected, *others = [updated(make, {**settings, "foreach": foreach}, cuts) for cuts in CUTS]
    assert all(torch.equal(other, expected) for other in others)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: optim.AdamW(p, fused=True), "AdamW has fused=True in group 0"),
        (lambda p: optim.LBFGS(p), "optimizer LBFGS is not known"),
        (lambda p: optim.Adafactor(p), "optimizer Adafactor is not known"),
        (lambda p: type("MyAdamW", (optim.AdamW,), {})(p), "optimizer MyAdamW is not known"),
    ],
)
def test_an_optimizer_that_may_depend_on_the_cut_is_refused(
    make: Callable[[list[nn.Parameter]], optim.Optimizer], message: str
) -> None:
    with pytest.raises(NotReproducible, match=message) as caught:
        require_invariant_optimizer(make([nn.Parameter(torch.ones(2, 2))]))
    assert "set reproducible: false" in str(caught.value)


@pytest.mark.parametrize(
    "module", [nn.BatchNorm1d(4), nn.SyncBatchNorm(4), nn.InstanceNorm1d(4, track_running_stats=True)]
)
def test_a_module_that_remembers_the_leaves_of_its_rank_is_refused_by_name(module: nn.Module) -> None:
    with pytest.raises(NotReproducible, match=f"1 is a {type(module).__name__}, which"):
        require_invariant_modules(nn.Sequential(nn.Linear(4, 4), module))
    require_invariant_modules(nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), nn.LayerNorm(4)))


LEAVES = list(torch.randint(7, (12, 1, 4), generator=torch.Generator().manual_seed(1)))


def model_of(mesh: DeviceMesh, mode: Reproducible, make: type[OddModel] = OddModel) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = make()
    parallelize(model, ModelConfig(), mesh, reproducible=mode)
    materialize(model, "cpu", 0)
    return model


def backward(model: nn.Module, ids: torch.Tensor, weight: float = 1 / 12) -> None:
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(1, 1).flatten())
    torch.autograd.backward(loss * weight)


def gradient_of(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad


def alone(mesh: DeviceMesh) -> Iterator[dict[str, torch.Tensor]]:
    """Each leaf's gradient by itself."""
    for ids in LEAVES:
        model = model_of(mesh, False)
        backward(model, ids)
        reduced_gradients(model)
        yield {name: gradient_of(parameter) for name, parameter in named_parameters(model)}


def in_order(gradients: list[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros_like(gradients[0], dtype=torch.float64)
    for gradient in gradients:
        total += gradient
    return total.float()


@pytest.mark.parametrize("mode", [True, "exact"])
def test_a_gradient_is_the_fp64_sum_of_its_leaves_in_their_order_rounded_once(
    mesh: DeviceMesh, mode: Reproducible
) -> None:
    model = model_of(mesh, mode)
    invariance = invariance_of(model)
    assert invariance is not None
    for number, ids in enumerate(LEAVES):
        is_last = number == len(LEAVES) - 1
        model.set_requires_gradient_sync(is_last or invariance.is_exact)  # type: ignore[operator]
        invariance.begin_leaf(number, len(LEAVES))
        backward(model, ids)
        invariance.end_leaf()
    reduced_gradients(model)
    leaves = list(alone(mesh))
    for name, parameter in named_parameters(model):
        assert torch.equal(gradient_of(parameter), in_order([leaf[name] for leaf in leaves])), name


def step_of(model: nn.Module, leaves: list[torch.Tensor] = LEAVES) -> dict[str, torch.Tensor | None]:
    """Leaf after leaf as TrainStep does it; the gradient by name."""
    invariance = invariance_of(model)
    assert invariance is not None
    for number, ids in enumerate(leaves):
        is_last = number == len(leaves) - 1
        model.set_requires_gradient_sync(is_last or invariance.is_exact)  # type: ignore[operator]
        if is_last and number and not invariance.is_exact:
            count_unused(model)
        invariance.begin_leaf(number, len(leaves))
        backward(model, ids)
        invariance.end_leaf()
    reduced_gradients(model)
    return {name: None if p.grad is None else gradient_of(p) for name, p in named_parameters(model)}


@pytest.mark.parametrize("mode", [True, "exact"])
def test_what_an_evaluation_of_the_loops_own_left_whole_is_summed_like_all_else(
    mesh: DeviceMesh, mode: Reproducible
) -> None:
    model = model_of(mesh, mode)
    with torch.no_grad():
        model(LEAVES[0])
    expected = step_of(model_of(mesh, mode))
    for name, gradient in step_of(model).items():
        assert gradient is not None
        assert torch.equal(gradient, expected[name]), name  # type: ignore[arg-type]


class WithNothing(OddModel):
    """It has a parameter without elements, as the bias of an adapter of rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 5))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) + self.nothing.sum()


@pytest.mark.parametrize("mode", [True, "exact"])
def test_a_parameter_without_elements_is_no_hindrance(mesh: DeviceMesh, mode: Reproducible) -> None:
    found = step_of(model_of(mesh, mode, WithNothing))
    nothing = found.pop("nothing")
    assert nothing is None or nothing.shape == (0, 5)
    for name, gradient in step_of(model_of(mesh, mode)).items():
        assert gradient is not None
        assert torch.equal(gradient, found[name]), name  # type: ignore[arg-type]


class SometimesUsing(OddModel):
    """Two of its own parameters are for some ids only."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        is_odd = bool(ids[0, 0] % 2)
        x = self.blocks[1](self.blocks[0](self.embedding(ids)))
        logits: torch.Tensor = self.head(x + self.few.sum(0) if is_odd else x + self.frozen_later.sum(0))
        return logits


@pytest.mark.parametrize("mode", [True, "exact"])
@pytest.mark.parametrize("order", [[1, 0, 0], [0, 0, 1], [0, 1, 0], [0, 0, 0]])
def test_a_parameter_that_some_leaves_do_not_use_counts_as_zero_there(
    mesh: DeviceMesh, mode: Reproducible, order: list[int]
) -> None:
    leaves = [torch.full((1, 4), number) for number in order]
    found = step_of(model_of(mesh, mode, SometimesUsing), leaves)
    single = {number: step_of(model_of(mesh, mode, SometimesUsing), [leaves[order.index(number)]]) for number in order}
    for name, gradient in found.items():
        parts = [single[number][name] for number in order]
        if gradient is None:
            assert name == "temperature"  # nothing uses it, and it is not sharded
        else:
            assert torch.equal(gradient, in_order([part for part in parts if part is not None])), name


def test_a_plain_model_sums_in_float32_and_knows_nothing_of_it(mesh: DeviceMesh) -> None:
    model = model_of(mesh, False)
    assert invariance_of(model) is None
    for ids in LEAVES:
        model.set_requires_gradient_sync(ids is LEAVES[-1])  # type: ignore[operator]
        backward(model, ids)
    assert reduced_gradients(model).num_exact is None
    leaves = list(alone(mesh))
    wrong = 0
    for name, parameter in named_parameters(model):
        wrong += int((gradient_of(parameter) != in_order([leaf[name] for leaf in leaves])).sum())
    assert wrong > 0  # else the test above could not fail

"""A loop may change in place what its sharded model returns, on a real gloo group of one rank."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from workers.config import ModelConfig
from workers.parallelize import parallelize

IDS = torch.arange(12).view(3, 4)
CONFIG = ModelConfig.model_validate({"config": {"model_type": "llama"}})


class Net(nn.Module):
    """As in docs/user-loops.md: no blocks, and a Linear with a bias at the end, which returns a view."""

    def __init__(self, pack: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.tokens, self.output = nn.Embedding(13, 8), nn.Linear(8, 13)
        self.pack = pack

    def forward(self, ids: torch.Tensor) -> Any:
        return self.pack(self.output(self.tokens(ids)))


def gradients(model: nn.Module, take: Callable[[Any], torch.Tensor], *, in_place: bool) -> dict[str, torch.Tensor]:
    logits = take(model(IDS))
    if in_place:
        logits /= 2.0
    else:
        logits = logits / 2.0
    torch.autograd.backward(nn.functional.cross_entropy(logits.flatten(0, 1), IDS.flatten()))
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
    return found


PACKED: list[tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = [
    (lambda logits: logits, lambda output: output),
    (lambda logits: (None, logits), lambda output: output[1]),
    (lambda logits: OrderedDict(logits=logits, hidden=[logits]), lambda output: output["logits"]),
]


@pytest.mark.parametrize(("pack", "take"), PACKED)
def test_an_output_that_is_changed_in_place_is_trained_on_like_any_other(
    mesh: DeviceMesh, pack: Callable[[torch.Tensor], Any], take: Callable[[Any], torch.Tensor]
) -> None:
    torch.manual_seed(3)
    model = Net(pack)
    expected = gradients(model, take, in_place=False)
    model.zero_grad()
    parallelize(model, CONFIG, mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = gradients(model, take, in_place=True)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters()), "backward has not ended"
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_an_output_that_backward_needs_is_still_not_changed_behind_its_back(mesh: DeviceMesh) -> None:
    model = parallelize(Net(lambda logits: logits.exp().view(12, 13)), CONFIG, mesh)
    output = model(IDS)
    output *= 2.0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_an_evaluation_gets_what_the_model_returns(mesh: DeviceMesh) -> None:
    model = parallelize(Net(lambda logits: logits), CONFIG, mesh)
    with torch.no_grad():
        assert torch.equal(model(IDS), model(IDS))

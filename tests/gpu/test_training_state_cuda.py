"""Loss scaling and random state on a CUDA device; real: torch's generators and its GradScaler there."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from workers.loss_scaling import LossScaling
from workers.parallelize import reduced_gradients, scale_gradients
from workers.rng import capture_rng, restore_rng, seed_rng

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_scales_go_on_as_torchs_own_step_would_have_them() -> None:
    ours, torchs = (GradScaler("cuda", init_scale=1024.0, growth_interval=3) for _ in range(2))
    for gradient in (1.0, math.nan, 1.0, 1.0, 1.0, math.inf, 1.0):
        model = nn.Linear(2, 1, bias=False, device="cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scaling = LossScaling(ours)
        torch.autograd.backward(scaling.scaled((model.weight * gradient).sum()))
        gradients = reduced_gradients(model)
        scaling.unscale(gradients)
        scaling.judge(scale_gradients(gradients, 1e9), optimizer)
        assert scaling.is_skipped is not math.isfinite(gradient)
        optimizer.zero_grad()
        torch.autograd.backward(torchs.scale((model.weight * gradient).sum()))
        torchs.step(optimizer)
        torchs.update()
        assert ours.state_dict() == torchs.state_dict()


def test_the_devices_generators_go_on_where_they_were_and_one_without_state_is_seeded() -> None:
    torch.zeros(1, device="cuda")  # capture asks only a process that uses the device
    seed_rng(1, 2, 3)
    torch.rand(5, device="cuda")
    states = {name: tensor.clone() for name, tensor in capture_rng(2).items()}
    expected = torch.rand(5, device="cuda")
    seed_rng(9, 9, 9)
    assert restore_rng(2, states) == ()
    assert torch.equal(torch.rand(5, device="cuda"), expected)
    without = {name: state for name, state in states.items() if ".cuda_" not in name}
    assert "cuda:0" in restore_rng(2, without, seed=7, step=40)
    seeded = torch.rand(5, device="cuda")
    restore_rng(2, without, seed=7, step=40)
    assert torch.equal(torch.rand(5, device="cuda"), seeded)

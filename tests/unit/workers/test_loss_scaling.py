"""Loss scaling on one rank: what is scaled, when an update is left out, and which of those steps may stand."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from workers.config import ModelConfig, OptimConfig
from workers.errors import StepNotFinite
from workers.loss_scaling import LossScaling, build_scaler, is_in_use
from workers.parallelize import reduced_gradients, scale_gradients
from workers.schedule import advance_schedule
from workers.state import Progress
from workers.step_check import StepCheck

CPU = torch.device("cpu")


def make_scaler(init_scale: float = 1024.0, growth_interval: int = 3) -> GradScaler:
    return GradScaler("cpu", init_scale=init_scale, growth_interval=growth_interval)


def one_step(scaler: GradScaler | None, gradient: float) -> tuple[LossScaling, torch.Tensor, nn.Linear]:
    """Backward of a loss whose gradient is ``gradient``, then all that `TrainStep.apply` does before the update."""
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaling = LossScaling(scaler)
    torch.autograd.backward(scaling.scaled((model.weight * gradient).sum()))
    gradients = reduced_gradients(model)
    scaling.unscale(gradients)
    norm = scaling.judge(scale_gradients(gradients, 1e9), optimizer)
    return scaling, norm, model


@pytest.mark.parametrize("scaler", [None, GradScaler("cpu", enabled=False)])
def test_without_a_scaler_nothing_is_scaled_and_nothing_skipped(scaler: GradScaler | None) -> None:
    assert not is_in_use(scaler)
    scaling, norm, _ = one_step(scaler, math.inf)
    assert (scaling.scale, scaling.is_skipped, scaling.is_overflow) == (None, False, False)
    assert math.isinf(float(norm))


def test_the_gradient_and_its_norm_are_those_without_scaling_to_the_bit() -> None:
    _, plain_norm, plain = one_step(None, 0.37)
    scaling, norm, model = one_step(make_scaler(), 0.37)
    assert scaling.scale == 1024.0
    assert model.weight.grad is not None
    assert plain.weight.grad is not None
    assert torch.equal(model.weight.grad, plain.weight.grad)
    assert float(norm) == float(plain_norm)


def test_the_scale_grows_after_its_interval_and_is_halved_by_an_overflow() -> None:
    scaler = make_scaler()
    scales = []
    for gradient in (1.0, 1.0, 1.0, 1.0, math.inf, 1.0):
        scaling, _, _ = one_step(scaler, gradient)
        scales.append((scaling.scale, scaling.is_skipped))
    assert scales == [(1024, False)] * 3 + [(2048, False), (2048, True), (1024, False)]
    assert scaler.state_dict()["_growth_tracker"] == 1


def test_scales_go_on_as_torchs_own_step_would_have_them() -> None:
    ours, torchs = make_scaler(), make_scaler()
    for gradient in (1.0, math.nan, 1.0, 1.0, 1.0, math.inf, math.inf, 1.0):
        one_step(ours, gradient)
        model = nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        torch.autograd.backward(torchs.scale((model.weight * gradient).sum()))
        torchs.step(optimizer)
        torchs.update()
        assert ours.state_dict() == torchs.state_dict()


@pytest.mark.parametrize("gradient", [math.inf, math.nan])
def test_the_norm_of_a_skipped_update_is_recorded_as_infinite(gradient: float) -> None:
    scaling, norm, _ = one_step(make_scaler(), gradient)
    assert scaling.is_overflow
    assert float(norm) == math.inf


def test_an_overflow_may_stand_and_a_gradient_that_no_scale_can_mend_may_not() -> None:
    check = StepCheck(rank=0, global_batch=4, must_be_finite=True, loss_spike=None)
    scaling, norm, _ = one_step(make_scaler(init_scale=2.0), math.inf)
    check.require_sound(3, loss=1.0, grad_norm=float(norm), before=Progress(), is_overflow=scaling.is_overflow)
    with pytest.raises(StepNotFinite):  # its forward went wrong: no scale is to blame
        check.require_sound(4, loss=math.nan, grad_norm=math.inf, before=Progress(), is_overflow=True)
    scaling, norm, _ = one_step(make_scaler(init_scale=1.0), math.inf)
    assert (scaling.is_skipped, scaling.is_overflow) == (True, False)
    with pytest.raises(StepNotFinite, match="gradient norm inf"):
        check.require_sound(5, loss=1.0, grad_norm=float(norm), before=Progress(), is_overflow=scaling.is_overflow)


def test_a_first_step_without_an_update_moves_the_schedule_on_without_torchs_warning() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 + step)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        advance_schedule(scheduler, is_update_skipped=True)
    assert optimizer.param_groups[0]["lr"] == 2.0


@pytest.mark.parametrize(
    ("dtype", "asked", "is_on"),
    [("float32", None, False), ("bfloat16", None, False), ("float16", None, True), ("float32", True, True)],
)
def test_the_built_in_scaler_follows_the_compute_type_unless_it_is_asked_for(
    dtype: str, asked: bool | None, is_on: bool
) -> None:
    model = ModelConfig.model_validate({"compute_dtype": dtype})
    assert is_in_use(build_scaler(OptimConfig(loss_scaling=asked), model, CPU)) is is_on
    assert build_scaler(OptimConfig(loss_scaling=False), model, CPU) is None

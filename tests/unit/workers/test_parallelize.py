"""Activation checkpointing, mixed precision and clipping on a real gloo group of one rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tests.fakes.small_training import OddModel, build_state
from workers.config import ActivationCheckpointConfig, ModelConfig
from workers.models import materialize
from workers.names import named_parameters
from workers.parallelize import decoder_blocks, parallelize, reduced_gradients, scale_gradients


def config(**settings: object) -> ModelConfig:
    return ModelConfig.model_validate({"config": {"model_type": "llama"}, **settings})


def meta(dropout: float = 0.0) -> OddModel:
    with torch.device("meta"):
        return OddModel(num_blocks=3, dropout=dropout)


def gradients(model: nn.Module) -> tuple[float, dict[str, torch.Tensor]]:
    torch.manual_seed(11)
    ids = torch.arange(12).remainder(7).view(3, 4)
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())
    torch.autograd.backward(loss)
    found = {}
    for name, parameter in named_parameters(model):
        gradient = parameter.grad
        assert gradient is not None, name
        found[name] = (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).clone()
    return loss.item(), found


@pytest.mark.parametrize("every_kth_block", [1, 2])
def test_recomputing_blocks_changes_no_name_no_loss_and_no_gradient(mesh: DeviceMesh, every_kth_block: int) -> None:
    plain = build_state(mesh, model=meta(dropout=0.5), config=config()).model
    settings = {"enabled": True, "every_kth_block": every_kth_block}
    recomputed = build_state(mesh, model=meta(dropout=0.5), config=config(activation_checkpointing=settings)).model
    assert [name for name, _ in recomputed.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert list(recomputed.state_dict()) == list(plain.state_dict())
    loss, expected = gradients(plain)
    other_loss, found = gradients(recomputed)
    assert other_loss == loss
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def count_calls(model: nn.Module) -> list[int]:
    counts = [0] * len(decoder_blocks(model))
    for index, block in enumerate(decoder_blocks(model)):

        def count(*_: object, index: int = index) -> None:
            counts[index] += 1

        block.norm.register_forward_pre_hook(count)  # type: ignore[union-attr]
    return counts


def test_every_kth_block_is_recomputed_in_training_only(mesh: DeviceMesh) -> None:
    chosen = ActivationCheckpointConfig(enabled=True, every_kth_block=2)
    model = parallelize(meta(), config(activation_checkpointing=chosen.model_dump()), mesh)
    materialize(model, "cpu", 0)
    counts = count_calls(model)
    gradients(model)
    assert counts == [2, 1, 2]
    model.eval()
    gradients(model)
    assert counts == [3, 2, 3]


def test_batch_norm_inside_a_recomputed_block_is_refused(mesh: DeviceMesh) -> None:
    model = meta()
    model.blocks[1].norm = nn.BatchNorm1d(5, device="meta")
    with pytest.raises(ValueError, match="block 1: it holds a BatchNorm"):
        parallelize(model, config(activation_checkpointing={"enabled": True}), mesh)


def test_bfloat16_computes_in_bfloat16_and_keeps_weights_and_gradients_in_float32(mesh: DeviceMesh) -> None:
    model = build_state(mesh, model=meta(), config=config(compute_dtype="bfloat16")).model
    seen: list[torch.dtype] = []
    first = decoder_blocks(model)[0]
    first.register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
    _, found = gradients(model)
    assert seen == [torch.bfloat16]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert {found[name].dtype for name, p in named_parameters(model) if isinstance(p, DTensor)} == {torch.float32}


def test_clipping_returns_the_norm_before_and_leaves_the_norm_asked_for(mesh: DeviceMesh) -> None:
    model = build_state(mesh, model=meta()).model
    _, found = gradients(model)
    expected = torch.cat([gradient.double().flatten() for gradient in found.values()]).norm()
    assert scale_gradients(reduced_gradients(model), 0.01).item() == pytest.approx(expected.item(), rel=1e-12)
    assert scale_gradients(reduced_gradients(model), 100.0).item() == pytest.approx(0.01, rel=1e-3)


def test_a_loop_may_evaluate_between_backward_and_clipping(mesh: DeviceMesh) -> None:
    model = build_state(mesh, model=meta()).model
    _, found = gradients(model)
    expected = torch.cat([gradient.double().flatten() for gradient in found.values()]).norm()
    with torch.no_grad():
        model(torch.zeros(1, 4, dtype=torch.int64))
    assert scale_gradients(reduced_gradients(model), 0.01).item() == pytest.approx(expected.item(), rel=1e-12)
    assert scale_gradients(reduced_gradients(model), 100.0).item() == pytest.approx(0.01, rel=1e-3)


def test_blocks_are_the_outermost_list_not_the_experts_inside() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(nn.ModuleList([nn.Linear(2, 2)]) for _ in range(3))
    model.small = nn.ModuleList([nn.Linear(1, 1)])
    assert decoder_blocks(model) == list(model.layers)
    assert decoder_blocks(nn.Linear(2, 2)) == []

"""Weights and buffers of a real, tiny Hugging Face model; sharding on a real gloo group of one rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tests.fakes.small_training import OddModel, build_state
from workers.config import ModelConfig
from workers.models import ModelTemplate, UnfilledTensors, assert_all_filled, instantiate, materialize, state_bytes
from workers.names import named_parameters, persistent_buffers
from workers.parallelize import parallelize

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 61,
}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 61, "n_positions": 32}
GEMMA = {
    "model_type": "gemma",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 61,
}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def sharded(mesh: DeviceMesh, config: ModelConfig, seed: int = 0) -> nn.Module:
    model = parallelize(instantiate(ModelTemplate.build(config)), config, mesh)
    materialize(model, "cpu", seed)
    return model


@pytest.mark.parametrize("parallelism", ["fsdp", "ddp"])
@pytest.mark.parametrize("settings", [LLAMA, {**LLAMA, "tie_word_embeddings": True}, GPT2, GEMMA])
def test_a_model_of_a_world_computes_what_a_plain_one_with_its_weights_does(
    mesh: DeviceMesh, settings: dict[str, object], parallelism: str
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = sharded(mesh, ModelConfig.model_validate({"config": settings, "parallelism": parallelism})).eval()
    plain_settings = dict(settings)
    config = AutoConfig.for_model(str(plain_settings.pop("model_type")), **plain_settings)
    plain = AutoModelForCausalLM.from_config(config).eval()  # type: ignore[no-untyped-call]
    plain.load_state_dict({name: whole(value) for name, value in model.state_dict().items()})
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        ours, theirs = model(input_ids=ids).logits, plain(input_ids=ids).logits
    assert torch.equal(ours, theirs)
    assert ours.isfinite().all()


@pytest.mark.parametrize("settings", [LLAMA, GPT2, GEMMA])
def test_weights_are_drawn_with_the_models_own_rules(mesh: DeviceMesh, settings: dict[str, object]) -> None:
    model = sharded(mesh, ModelConfig.model_validate({"config": settings}))
    norm_value = 0.0 if settings["model_type"] == "gemma" else 1.0
    for name, parameter in named_parameters(model):
        values = whole(parameter)
        if parameter.ndim >= 2:
            assert values.std().item() == pytest.approx(0.02, rel=0.3), name
        elif name.endswith("bias"):
            assert not values.any(), name
        else:
            assert (values == norm_value).all(), name


def test_weights_follow_the_seed_and_nothing_else(mesh: DeviceMesh) -> None:
    config = ModelConfig.model_validate({"config": LLAMA})
    torch.manual_seed(1)
    first = {name: whole(p).clone() for name, p in named_parameters(sharded(mesh, config, seed=1))}
    state_before = torch.get_rng_state()
    again = {name: whole(p).clone() for name, p in named_parameters(sharded(mesh, config, seed=1))}
    assert torch.equal(state_before, torch.get_rng_state())  # the ranks' own generators are left alone
    other = {name: whole(p).clone() for name, p in named_parameters(sharded(mesh, config, seed=2))}
    layers = [first[f"model.layers.{index}.self_attn.q_proj.weight"] for index in range(2)]
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    assert not torch.equal(*layers)


@pytest.mark.parametrize("parallelism", ["fsdp", "ddp"])
def test_ties_survive_copy_sharding_and_memory(mesh: DeviceMesh, parallelism: str) -> None:
    tied = {**LLAMA, "tie_word_embeddings": True}
    model = sharded(mesh, ModelConfig.model_validate({"config": tied, "parallelism": parallelism}))
    assert model.lm_head.weight is model.model.embed_tokens.weight  # type: ignore[union-attr]
    assert [name for name, _ in named_parameters(model)].count("lm_head.weight") == 0


def test_weights_from_scratch_do_not_depend_on_how_they_are_held(mesh: DeviceMesh) -> None:
    first, other = (
        dict(named_parameters(sharded(mesh, ModelConfig.model_validate({"config": LLAMA, "parallelism": how}), seed=1)))
        for how in ("fsdp", "ddp")
    )
    assert first.keys() == other.keys()
    assert all(torch.equal(whole(first[name]), whole(other[name])) for name in first)


def test_a_copy_of_the_template_leaves_the_template_on_meta(mesh: DeviceMesh) -> None:
    config = ModelConfig.model_validate({"config": LLAMA})
    template = ModelTemplate.build(config)
    for _ in range(2):
        model = parallelize(instantiate(template), config, mesh)
        materialize(model, "cpu", 0)
    assert all(tensor.is_meta for tensor in (*template.model.parameters(), *template.model.buffers()))


class Forgetful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.gain = nn.Parameter(torch.empty(2))
        self.register_buffer("mask", torch.empty(2, dtype=torch.bool), persistent=False)
        self.register_buffer("table", torch.empty(2, dtype=torch.int32))


def test_values_that_nobody_filled_are_named() -> None:
    with torch.device("meta"):
        model = Forgetful()
    with pytest.raises(UnfilledTensors) as caught:
        materialize(model, "cpu", 0)
    assert set(caught.value.names) == {"gain", "mask", "table"}


def test_weights_left_for_a_restore_count_as_unfilled(mesh: DeviceMesh) -> None:
    state = build_state(mesh, init_weights=False)
    with pytest.raises(UnfilledTensors, match=r"blocks\.0\.linear\.weight"):
        assert_all_filled(state.model)


def test_only_persistent_buffers_belong_to_the_state() -> None:
    assert [name for name, _ in persistent_buffers(OddModel())] == ["count"]


def test_the_size_of_the_training_state_counts_moments_of_what_trains_and_stored_buffers() -> None:
    model = OddModel()
    weights = sum(parameter.numel() for parameter in model.parameters())  # tied ones once
    assert state_bytes(model) == 12 * weights + 8
    model.frozen_later.requires_grad_(False)
    assert state_bytes(model) == 12 * weights + 8 - 8 * model.frozen_later.numel()

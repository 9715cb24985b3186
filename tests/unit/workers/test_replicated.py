"""What every rank holds whole: who writes it, and how its gradients are summed. Real: a gloo group of one rank."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tests.fakes.small_training import OddModel, build_state
from workers import replicated
from workers.config import ModelConfig
from workers.names import named_parameters
from workers.replicated import accumulate_in_double, deal, sum_gradients


@given(
    st.dictionaries(st.text("abc", min_size=1, max_size=4), st.integers(0, 1 << 20), max_size=40),
    st.integers(1, 9),
)
def test_everything_is_dealt_and_nobody_has_much_more_than_the_others(units: dict[str, int], num_ranks: int) -> None:
    owners = deal(units, num_ranks)
    assert owners.keys() == units.keys()
    loads = [sum(size for name, size in units.items() if owners[name] == rank) for rank in range(num_ranks)]
    assert max(loads) - min(loads) <= max([*units.values(), 0]) + 4096 * len(units)
    assert deal(dict(reversed(units.items())), num_ranks) == owners


def test_equal_layers_are_written_in_a_share_of_the_time() -> None:
    units = {f"layer-{index}": 1_000_000 for index in range(12)} | {f"bias-{index}": 400 for index in range(12)}
    for num_ranks in (1, 2, 3, 4):
        owners = deal(units, num_ranks)
        most = max(sum(size for name, size in units.items() if owners[name] == rank) for rank in range(num_ranks))
        assert most <= 12_000_000 / num_ranks + 4800


@pytest.mark.parametrize("is_double", [False, True])
def test_many_small_buckets_give_what_one_does(
    mesh: DeviceMesh, is_double: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicated, "_BUCKET_BYTES", 64)
    del mesh
    model = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 2).double()])
    if is_double:
        accumulate_in_double(model)
    for _ in range(2):
        torch.autograd.backward(model[1](model[0](torch.ones(2, 5))).square().sum())
        torch.autograd.backward(model[2].get_parameter("weight").square().sum())
    expected = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 2).double()])
    expected.load_state_dict(model.state_dict())
    for _ in range(2):
        torch.autograd.backward(expected[1](expected[0](torch.ones(2, 5))).square().sum())
        torch.autograd.backward(expected[2].get_parameter("weight").square().sum())
    found = sum_gradients(model.parameters())
    assert len(found) == 5
    assert model[2].bias.grad is None
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        if theirs.grad is not None:
            assert mine.grad is not None
            assert mine.grad.dtype == theirs.dtype
            assert torch.equal(mine.grad, theirs.grad)


def test_a_second_step_starts_from_nothing(mesh: DeviceMesh) -> None:
    del mesh
    model = nn.Linear(3, 3)
    accumulate_in_double(model)
    gradients = []
    for _ in range(2):
        torch.autograd.backward(model(torch.ones(1, 3)).sum())
        gradients.append([gradient.clone() for gradient in sum_gradients(model.parameters())])
        model.zero_grad(set_to_none=True)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_sparse_gradient_is_refused_with_the_remedy() -> None:
    model = nn.Embedding(5, 3, sparse=True)
    torch.autograd.backward(model(torch.tensor([1])).sum())
    with pytest.raises(ValueError, match=r"shape \(5, 3\) .* build its module with sparse=False"):
        sum_gradients(model.parameters())


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_lower_precision_is_of_the_computation_alone(mesh: DeviceMesh, name: str) -> None:
    with torch.device("meta"):
        model = OddModel()
    config = ModelConfig(parallelism="ddp", compute_dtype=name, activation_checkpointing={"enabled": True})
    state = build_state(mesh, model=model, config=config)
    ids = torch.arange(12).remainder(7).view(3, 4)
    logits = state.model(ids)
    assert logits.dtype is getattr(torch, name)
    torch.autograd.backward(logits.float().sum())
    for _, parameter in named_parameters(state.model):
        assert parameter.dtype is torch.float32
        assert parameter.grad is not None
        assert parameter.grad.dtype is torch.float32

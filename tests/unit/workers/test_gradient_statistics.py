"""The spread of a gradient's elements against numpy, and in worlds of one to four ranks. Real there: FSDP2 and gloo."""

from __future__ import annotations

import multiprocessing
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tests.fakes.small_training import OddModel, build_state
from workers import gradient_statistics
from workers.gradient_statistics import element_variance, sum_elements
from workers.mesh import join_group, leave_group, world_mesh
from workers.names import named_parameters
from workers.parallelize import reduced_gradients, scale_gradients

CPU = torch.device("cpu")


def spread_of(gradients: list[torch.Tensor]) -> float | None:
    summed = sum_elements(gradients, CPU)
    norm = sum(gradient.double().square().sum() for gradient in gradients) ** 0.5
    return element_variance(total=summed.total.item(), count=summed.count, norm=float(norm))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_variance_is_numpys(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_statistics, "_PIECE", 7)
    torch.manual_seed(1)
    gradients = [(torch.randn(shape) * 3 + 0.5).to(dtype) for shape in ((50, 11), (), (0, 4), (33,))]
    whole = np.concatenate([gradient.double().numpy().ravel() for gradient in gradients])
    assert spread_of(gradients) == pytest.approx(whole.var(), rel=1e-12)


def test_a_gradient_that_is_no_contiguous_block_counts_in_full() -> None:
    turned = torch.arange(12.0).view(3, 4).t()
    assert spread_of([turned]) == pytest.approx(np.arange(12.0).var())


def test_values_near_the_end_of_float16_do_not_overflow() -> None:
    gradient = torch.full((4096,), 6e4, dtype=torch.float16)
    gradient[::2] *= -1
    assert spread_of([gradient]) == pytest.approx(float(gradient[1]) ** 2)
    assert sum_elements([gradient.abs()], CPU).total.item() == 4096 * float(gradient[1])


@pytest.mark.parametrize(("total", "count", "norm"), [(0.0, 0, 1.0), (float("nan"), 3, 1.0), (1.0, 3, float("inf"))])
def test_what_has_no_finite_variance_has_none(total: float, count: int, norm: float) -> None:
    assert element_variance(total=total, count=count, norm=norm) is None


def test_equal_elements_have_no_variance_and_never_one_below_zero() -> None:
    for count in range(1, 200):
        spread = spread_of([torch.full((count,), 0.1)])
        assert spread is not None
        assert 0.0 <= spread < 1e-16


def backward(mesh: DeviceMesh, world_size: int) -> nn.Module:
    """One backward of a model with tied weights, one without dimension, and fewer rows than ranks."""
    model = build_state(mesh).model
    for name, parameter in named_parameters(model):
        parameter.requires_grad_(name != "frozen_later")
    ids = torch.arange(12).remainder(7).view(3, 4)
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(1, 1).flatten())
    torch.autograd.backward(loss / world_size)
    return model


def measure(mesh: DeviceMesh, rank: int, world_size: int) -> tuple[float, int, float]:
    gradients = reduced_gradients(backward(mesh, world_size))
    summed = sum_elements(gradients.counted_by(rank), CPU)
    return summed.total.item(), summed.count, scale_gradients(gradients, 1e-3).item()


def one_rank(rank: int, world_size: int, port: int, results: Any) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    join_group(store, rank=rank, world_size=world_size, device=CPU, timeout_s=60.0)
    results.put(measure(world_mesh(CPU), rank, world_size))
    torch.distributed.barrier()
    leave_group()


def in_a_world_of(world_size: int) -> list[tuple[float, int, float]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # torch is imported once, not by every rank
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = context.Queue()
    processes = [
        context.Process(target=one_rank, args=(rank, world_size, store.port, results)) for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        return [results.get(timeout=120.0) for _ in processes]
    finally:
        for process in processes:
            process.join(30.0)
            process.kill()


def test_the_parts_of_all_ranks_give_the_variance_of_one_process(mesh: DeviceMesh) -> None:
    whole = [
        gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        for _, parameter in named_parameters(backward(mesh, 1))
        if (gradient := parameter.grad) is not None
    ]
    assert len({gradient.ndim for gradient in whole}) == 3, "one without dimension is among them"
    expected = float(np.concatenate([gradient.double().numpy().ravel() for gradient in whole]).var())
    num_elements = sum(gradient.numel() for gradient in whole)
    assert num_elements < sum(p.numel() for p in OddModel().parameters()), "the frozen one counts for nothing"
    for world_size in (1, 2, 3, 4):
        parts = [measure(mesh, 0, 1)] if world_size == 1 else in_a_world_of(world_size)
        total, count = sum(part[0] for part in parts), sum(part[1] for part in parts)
        assert count == num_elements, f"a world of {world_size}"
        found = element_variance(total=total, count=count, norm=parts[0][2])
        assert found == pytest.approx(expected, rel=1e-5), f"a world of {world_size}"

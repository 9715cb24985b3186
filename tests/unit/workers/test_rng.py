"""Generator states as tensors, and seeds of ranks without one."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from workers.rng import capture_rng, restore_rng, seed_rng


def draws() -> list[float]:
    return [random.random(), random.gauss(), float(np.random.rand()), float(np.random.randn()), torch.rand(()).item()]


@pytest.mark.parametrize("half_way", [False, True])
def test_every_generator_goes_on_where_it_was(half_way: bool) -> None:
    """Half way: the second of a pair of Gaussian numbers is still kept back."""
    seed_rng(1, 2, 3)
    if half_way:
        draws()
    states = {name: tensor.clone() for name, tensor in capture_rng(2).items()}
    expected = [draws(), draws()]
    seed_rng(9, 9, 9)
    restore_rng(2, states)
    assert [draws(), draws()] == expected


def test_names_and_types_are_those_of_the_rank() -> None:
    states = capture_rng(7)
    assert {"rng.rank-00007.python", "rng.rank-00007.numpy", "rng.rank-00007.torch_cpu"} == set(states)
    assert states["rng.rank-00007.torch_cpu"].dtype == torch.uint8


def test_seeds_differ_by_seed_rank_and_step_and_repeat() -> None:
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]

    def first(key: tuple[int, int, int]) -> tuple[float, ...]:
        seed_rng(*key)
        return tuple(draws())

    assert len({first(key) for key in keys}) == len(keys)
    assert [first(key) for key in keys] == [first(key) for key in keys]

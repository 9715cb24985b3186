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


class FakeCuda:
    """``num`` devices whose generators are numbers; this process's own is ``own``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, states: list[int], own: int) -> None:
        self.states = [torch.tensor([state], dtype=torch.uint8) for state in states]
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(states))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: own)
        monkeypatch.setattr(torch.cuda, "get_rng_state", lambda index: self.states[index].clone())
        monkeypatch.setattr(torch.cuda, "set_rng_state", self._set)
        generators = [FakeGenerator(self, index) for index in range(len(states))]
        monkeypatch.setattr(torch.cuda, "default_generators", generators)

    def _set(self, state: torch.Tensor, index: int) -> None:
        self.states[index] = state.clone()

    @property
    def values(self) -> list[int]:
        return [int(state) for state in self.states]


class FakeGenerator:
    def __init__(self, cuda: FakeCuda, index: int) -> None:
        self._cuda, self._index = cuda, index

    def manual_seed(self, value: int) -> None:
        self._cuda.states[self._index] = torch.tensor([value % 97 + 100], dtype=torch.uint8)


@pytest.mark.parametrize(
    ("own_then", "own_here", "expected"),
    [(0, 0, [10, 11, 12]), (1, 0, [11, 12, 10]), (0, 2, [11, 12, 10])],
)
def test_a_rank_goes_on_with_its_own_devices_state_at_whatever_index(
    monkeypatch: pytest.MonkeyPatch, own_then: int, own_here: int, expected: list[int]
) -> None:
    FakeCuda(monkeypatch, [10, 11, 12], own_then)
    states = capture_rng(0)
    there = FakeCuda(monkeypatch, [1, 1, 1], own_here)
    assert restore_rng(0, states) == ()
    assert there.values == expected
    assert there.values[own_here] == 10 + own_then


def test_a_device_more_than_was_saved_is_seeded_and_named_and_one_less_keeps_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    FakeCuda(monkeypatch, [10], 0)
    states = capture_rng(3)
    seeded = []
    for _ in range(2):
        there = FakeCuda(monkeypatch, [1, 1], 0)
        assert restore_rng(3, states, seed=7, step=40) == ("cuda:1",)
        assert there.values[0] == 10
        seeded.append(there.values[1])
    assert seeded[0] == seeded[1] != 1
    FakeCuda(monkeypatch, [20, 21], 1)
    states = capture_rng(3)
    alone = FakeCuda(monkeypatch, [1], 0)
    assert restore_rng(3, states) == ()
    assert alone.values == [21]


def test_a_state_saved_without_a_cuda_device_leaves_none_unseeded(monkeypatch: pytest.MonkeyPatch) -> None:
    states = capture_rng(0)
    there = FakeCuda(monkeypatch, [1, 1], 0)
    assert restore_rng(0, states, seed=7, step=40) == ("cuda:0", "cuda:1")
    assert 1 not in there.values

"""The clock counts the forward of sharded blocks while training, and nothing else."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from itertools import count

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.fakes.small_training import OddModel, build_state, train_step
from workers.compute_clock import ComputeClock
from workers.evaluation import reshard

CPU = torch.device("cpu")


class Ticks:
    """A clock that moves on by one second each time it is read: so many seconds, so many blocks."""

    def __init__(self) -> None:
        self._numbers: Iterator[int] = count()

    def __call__(self) -> float:
        return float(next(self._numbers))


def clock_of(model: torch.nn.Module) -> ComputeClock:
    clock = ComputeClock(CPU, monotonic=Ticks())
    clock.attach(model)
    return clock


def test_every_block_is_timed_once_a_step(mesh: DeviceMesh) -> None:
    state = build_state(mesh)
    clock = clock_of(state.model)
    train_step(state)
    assert clock.take() == 2.0, "two blocks, one reading of the clock apart each; the root holds collectives"
    assert clock.take() == 0.0
    train_step(state)
    train_step(state)
    assert clock.take() == 4.0


def test_an_evaluation_is_no_part_of_a_step(mesh: DeviceMesh) -> None:
    state = build_state(mesh)
    clock = clock_of(state.model)
    state.model.eval()
    with torch.no_grad():
        state.model(torch.zeros(1, 2, dtype=torch.int64))
    state.model.train()
    with torch.no_grad():
        state.model(torch.zeros(1, 2, dtype=torch.int64))
    reshard(state.model)
    assert clock.take() == 0.0


def test_a_forward_that_raised_leaves_nothing_behind(mesh: DeviceMesh) -> None:
    state = build_state(mesh)
    clock = clock_of(state.model)
    with pytest.raises(IndexError):
        state.model(torch.full((1, 2), 99))
    clock.take()
    train_step(state)
    assert clock.take() == 2.0


def test_a_model_that_is_not_sharded_is_timed_by_its_blocks() -> None:
    model = OddModel(num_blocks=3)
    clock = clock_of(model)
    model(torch.zeros(1, 2, dtype=torch.int64))
    assert clock.take() == 3.0


def test_the_clock_keeps_no_model_alive() -> None:
    model = OddModel()
    clock = clock_of(model)
    model(torch.zeros(1, 2, dtype=torch.int64))
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
    assert clock.take() > 0


@pytest.mark.gpu
def test_device_times_come_without_waiting_for_the_device() -> None:
    device = torch.device("cuda")
    model = OddModel().to(device)
    clock = ComputeClock(device)
    clock.attach(model)
    taken = []
    for _ in range(20):
        model(torch.zeros(1, 2, dtype=torch.int64, device=device))
        taken.append(clock.take())
    torch.cuda.synchronize()
    assert clock.take() > 0.0
    assert all(0.0 <= seconds < 10.0 for seconds in taken)

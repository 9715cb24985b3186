"""Generations as the training thread takes them. Real: FSDP2 model, AdamW, side threads, files. Fake: the Keeper."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from storage.dcp_writer import local_parts
from storage.errors import KeeperUnreachable, StorageError
from tests.fakes.memory_keeper import MemoryKeeper
from tests.fakes.rank_processes import make_spec
from tests.fakes.small_training import ATTEMPT, RUN_ID, build_state, train_step
from tests.fakes.worker_settings import make_settings
from workers.contract import CauseKind, MemorySpec
from workers.failure_cause import classify
from workers.local_step import looks_at_no_tensor, step_locally
from workers.memory_saver import MemorySaver
from workers.names import named_parameters
from workers.snapshot import capture
from workers.staging import Stager
from workers.state import TrainingState

Bytes = dict[str, NDArray[np.uint8]]


def nothing() -> None:
    pass


class Bench:
    """One rank's state with its MemorySaver; `train` is a step of the loop, `end` its end."""

    def __init__(self, mesh: DeviceMesh, directory: Path) -> None:
        self.keeper = MemoryKeeper(directory)
        self.stager = Stager(self.keeper, RUN_ID, os.getpid())
        self.state: TrainingState | None = build_state(mesh)
        self.step = 0
        memory = MemorySpec(peer=None, key=bytes(32))
        spec = replace(make_spec(ATTEMPT, 0, 1, 1), memory=memory)
        settings = make_settings("nowhere", total_steps=100, memory_every=1)
        self.saver = MemorySaver(
            self.state, memory, settings=settings, spec=spec, stager=self.stager, check=nothing, grace_s=20.0
        )

    @property
    def living(self) -> TrainingState:
        assert self.state is not None
        return self.state

    def train(self) -> None:
        train_step(self.living)
        self.step += 1

    def prove(self) -> None:
        """All that was taken before the newest may go, and a buffer lies ready."""
        self.saver._writer.note_safe(self.step, ())
        self.keeper.wait_for(lambda: self.keeper.num_open <= 1)

    def take(self, *, ship: bool = False, wait_s: float | None = None) -> bool:
        return self.saver.take(self.step, ship=ship, wait_s=wait_s)

    def now(self) -> Bytes:
        """Bytes of everything that a Snapshot of this moment must hold."""
        parts = local_parts(capture(self.living, rank=0, world_size=1).tensors)
        return {name: part.contiguous().reshape(-1).view(torch.uint8).numpy().copy() for name, part in parts.items()}

    def sealed(self, step: int) -> None:
        self.keeper.wait_for(lambda: any(sealed.step == step for sealed in self.keeper.sealed))

    def close(self) -> None:
        self.keeper.set()
        self.saver.close()
        self.stager.close()


@pytest.fixture
def bench(mesh: DeviceMesh, tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(mesh, tmp_path)
    yield bench
    bench.close()


def assert_same(found: Bytes, expected: Bytes) -> None:
    assert found.keys() == {name for name, part in expected.items() if part.size}
    for name, part in found.items():
        assert np.array_equal(part, expected[name]), name


def test_a_generation_copied_beside_the_next_step_holds_the_bits_of_its_own(bench: Bench) -> None:
    for _ in range(5):
        bench.train()
        expected, plain = bench.now(), bench.living.progress.step
        assert bench.take()
        bench.train()  # forward, backward and the update that waits
        bench.sealed(plain)
        header, found = bench.keeper.read(plain)
        assert_same(found, expected)
        bench.prove()
        assert header.shared_state is not None
        assert header.shared_state["progress"]["step"] == plain  # type: ignore[index,call-overload]


def test_copied_beside_or_at_once_the_same_bytes_are_kept(bench: Bench) -> None:
    bench.train()
    expected = bench.now()
    assert bench.take(wait_s=20.0)
    _, at_once = bench.keeper.read(1)
    assert_same(at_once, expected)
    bench.saver.take(2, ship=False, wait_s=None)
    bench.saver.settle()
    bench.sealed(2)
    assert_same(bench.keeper.read(2)[1], at_once)


def test_the_update_waits_for_a_copy_that_has_begun(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.train()
    begun, may_copy, updated = threading.Event(), threading.Event(), threading.Event()
    fill = bench.stager.fill

    def slow_fill(*arguments: object) -> str:
        begun.set()
        assert may_copy.wait(20.0)
        assert not updated.is_set()
        return fill(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(bench.stager, "fill", slow_fill)
    expected = bench.now()
    bench.take()
    assert begun.wait(20.0)
    bench.living.optimizer.register_step_post_hook(lambda *_: updated.set())
    release = threading.Timer(0.05, may_copy.set)
    release.start()
    bench.train()
    release.join()
    assert updated.is_set()
    bench.sealed(1)
    assert_same(bench.keeper.read(1)[1], expected)
    assert bench.saver.stall_s > 0.0


def test_an_update_that_a_loop_makes_by_itself_waits_too(bench: Bench) -> None:
    bench.train()
    expected = bench.now()
    bench.take()
    for parameter in bench.living.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    bench.living.optimizer.step()  # a loop that calls it by itself
    bench.sealed(1)
    assert_same(bench.keeper.read(1)[1], expected)


def test_a_step_on_local_shards_waits_as_well_and_stays_one(bench: Bench) -> None:
    bench.train()
    expected = bench.now()
    bench.take()
    met: list[bool] = []

    @looks_at_no_tensor
    def spy(optimizer: torch.optim.Optimizer, *_: object) -> None:
        met.extend(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])

    bench.living.optimizer.register_step_post_hook(spy)
    for parameter in bench.living.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    step_locally(bench.living.optimizer)
    assert met, "no step was taken"
    assert not any(met), "the memory tier's hook made the optimizer step on sharded parameters"
    bench.sealed(1)
    assert_same(bench.keeper.read(1)[1], expected)


def test_buffers_random_state_and_trackers_that_change_at_once_are_those_of_the_step(bench: Bench) -> None:
    class Average:
        def __init__(self) -> None:
            self.value = torch.ones(5)

        def state_dict(self) -> dict[str, torch.Tensor]:
            return {"value": self.value}

        def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
            self.value = state_dict["value"]

    average = Average()
    bench.living.trackers["average"] = average
    bench.train()
    bench.keeper.set(is_held=True)  # no copy before everything has changed
    expected = bench.now()
    bench.take()
    average.value.fill_(2.0)
    bench.living.model.get_buffer("count").fill_(99)
    torch.rand(100)
    np.random.rand(100)
    bench.keeper.set()
    bench.saver.settle()
    bench.sealed(1)
    found = bench.keeper.read(1)[1]
    assert_same(found, expected)
    assert "tracker.average.value" in found


def halve(parameter: torch.nn.Parameter) -> None:
    parameter.mul_(0.5)


def halve_the_local_part(parameter: torch.nn.Parameter) -> None:
    assert isinstance(parameter, DTensor)
    parameter.to_local().mul_(0.5)


@pytest.mark.parametrize("change", [halve, halve_the_local_part])
def test_a_weight_changed_between_two_updates_keeps_the_snapshot_out_of_memory(
    bench: Bench, change: Callable[[torch.nn.Parameter], None]
) -> None:
    bench.train()
    bench.keeper.set(is_held=True)
    bench.take()
    with torch.no_grad():
        change(next(bench.living.model.parameters()))
    bench.keeper.set()
    bench.saver.settle()
    bench.train()
    bench.take(wait_s=20.0)
    assert [sealed.step for sealed in bench.keeper.sealed] == [2]
    assert bench.saver.num_left_out == 1


def test_no_buffer_before_the_next_update_leaves_the_step_out_and_training_does_not_wait(bench: Bench) -> None:
    bench.train()
    bench.take(wait_s=20.0)
    bench.keeper.wait_for(lambda: bench.keeper.num_open == 1)  # one lies ready
    bench.train()
    bench.take()
    bench.train()
    bench.sealed(2)
    bench.keeper.set(is_full=True)
    bench.keeper.wait_for(lambda: bench.keeper.num_open == 1)
    bench.take()
    bench.train()
    bench.sealed(3)
    for _ in range(3):
        bench.take()
        bench.train()
    assert [sealed.step for sealed in bench.keeper.sealed] == [1, 2, 3]
    bench.keeper.set()
    bench.saver._writer.note_safe(3, ())
    assert bench.take(wait_s=20.0)
    assert bench.saver.num_left_out == 3


def test_a_keeper_that_is_away_costs_generations_and_nothing_else(bench: Bench) -> None:
    bench.train()
    bench.take(wait_s=20.0)
    bench.keeper.set(is_away=True)
    for _ in range(4):
        bench.train()
        bench.take()
    bench.keeper.set()
    bench.train()
    assert bench.take(wait_s=20.0)
    assert bench.keeper.sealed[-1].step == bench.step
    assert bench.saver.num_left_out >= 3


def test_a_buffer_that_could_not_be_given_back_is_given_back_with_the_next_question(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, has_failed = bench.keeper.release, threading.Event()

    def fail_once(lease_ids: list[str]) -> None:
        if not has_failed.is_set():
            has_failed.set()
            raise KeeperUnreachable("release", "the test says so")
        release(lease_ids)

    monkeypatch.setattr(bench.keeper, "release", fail_once)
    for _ in range(3):  # as many generations as a rank may hold
        bench.train()
        assert bench.take(wait_s=20.0)
        assert has_failed.wait(20.0)
    assert [sealed.step for sealed in bench.keeper.sealed] == [1, 2, 3]


def test_a_fault_of_the_side_thread_ends_the_attempt_and_is_no_error_of_the_training_code(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> str:
        raise RuntimeError("unforeseen")

    bench.train()
    monkeypatch.setattr(bench.stager, "fill", fail)
    assert not bench.take(wait_s=20.0)
    with pytest.raises(StorageError, match="side thread of the memory Tier broke: RuntimeError: unforeseen") as caught:
        bench.take()
    assert classify(caught.value) is CauseKind.STORAGE


def test_a_save_for_the_store_is_the_same_copy_and_is_kept_too(bench: Bench) -> None:
    bench.train()
    bench.take(ship=True)
    bench.train()
    bench.sealed(1)
    assert [(sealed.step, sealed.ship, sealed.keep) for sealed in bench.keeper.sealed] == [(1, True, True)]
    assert bench.saver.take_left_out() == ()


def test_a_save_for_the_store_that_found_no_buffer_is_reported(bench: Bench) -> None:
    bench.train()
    bench.keeper.set(is_full=True)
    bench.take(ship=True)
    bench.saver.settle()
    bench.keeper.set()
    bench.train()
    bench.take(wait_s=20.0)
    assert bench.saver.take_left_out() == (1,)


def test_a_world_that_parts_waits_for_a_buffer_and_ships_nothing(bench: Bench) -> None:
    bench.train()
    bench.keeper.set(is_full=True)
    asked = len(bench.keeper.requests)

    def free_one() -> None:
        bench.keeper.wait_for(lambda: len(bench.keeper.requests) > asked + 2)
        bench.keeper.set()

    free = threading.Thread(target=free_one)
    free.start()
    assert bench.take(wait_s=30.0)
    free.join()
    assert [(sealed.ship, sealed.keep) for sealed in bench.keeper.sealed] == [(False, True)]


def test_no_call_of_the_keeper_comes_from_the_training_thread(bench: Bench) -> None:
    for _ in range(4):
        bench.train()
        bench.take()
    bench.train()
    bench.take(ship=True, wait_s=20.0)
    assert threading.current_thread().name not in bench.keeper.threads


def test_what_is_safe_and_what_is_given_up_reaches_the_keeper(bench: Bench) -> None:
    bench.train()
    bench.take(wait_s=20.0)
    bench.saver._writer.note_safe(1, (2,))
    bench.train()
    bench.take(wait_s=20.0)
    bench.train()
    bench.take(wait_s=20.0)
    assert bench.keeper.requests[-1].safe_step == 1
    assert bench.keeper.requests[-1].given_up == (2,)
    assert 2 not in bench.keeper.kept_steps


def test_a_close_lets_go_of_the_model_while_the_keeper_does_not_answer(mesh: DeviceMesh, tmp_path: Path) -> None:
    bench = Bench(mesh, tmp_path)
    bench.train()
    bench.keeper.set(is_held=True)
    bench.take()
    bench.keeper.wait_for(lambda: bench.keeper.requests)
    model = weakref.ref(bench.living.model)
    bench.saver.close()
    bench.state = None
    del bench.saver
    gc.collect()
    try:
        assert model() is None
    finally:
        bench.keeper.set()


def test_a_parameter_is_late_and_a_buffer_is_not(bench: Bench) -> None:
    bench.train()
    captured = capture(bench.living, rank=0, world_size=1)
    draft = bench.stager.draft_apart(captured, attempt=ATTEMPT, step=1, rank=0, world_size=1)
    living = local_parts(captured.tensors)
    late = {name for name, part in draft.parts.items() if part.data_ptr() == living[name].data_ptr()}
    names = {f"model.{name}" for name, _ in named_parameters(bench.living.model)}
    assert {name for name in late if living[name].numel()} == {
        name for name in captured.tensors if name in names or name.startswith("optim.")
    }

"""What a group tells of its gradient, its memory and its saves, and that steps leave nothing behind.

Real: processes, gloo, FSDP2, Keepers, the Session and its vector.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.fakes.rank_processes import Trio
from tests.fakes.small_training import OddModel
from tests.fakes.token_datasets import write_numbered_rows
from tests.fakes.worker_settings import make_settings
from workers.contract import StepReport
from workers.courier import _MAX_PER_CALL
from workers.groups import Groups
from workers.session import Session
from workers.settings import WorkerSettings

_FEW, _MANY = 100, 1000
_FLUSH_S = 30.0


@pytest.fixture(scope="module")
def trio() -> Iterator[Trio]:
    trio = Trio(2)
    try:
        yield trio
    finally:
        trio.close()


def settings_of(root: Path, *, total_steps: int, signals_every: int, leaves: int) -> WorkerSettings:
    url = str(root / "data")
    write_numbered_rows(url, 200, sequence_length=16, validation_rows=12)
    settings = make_settings(url, total_steps=total_steps, signals_every=signals_every)
    data = settings.data
    return replace(settings, data=data.model_copy(update={"global_batch": leaves * data.micro_batch}))


def train_with_one_sum_a_step(session: Session) -> None:
    """The built-in loop; fails unless each step begins exactly one sum on the control group, measured or not."""
    calls: list[int] = []
    start_sum = Groups.start_sum

    def counted(self: Groups, vector: torch.Tensor) -> torch.distributed.Work:
        calls.append(len(vector))
        return start_sum(self, vector)

    Groups.start_sum = counted  # type: ignore[method-assign]
    try:
        for step in session.steps():
            for leaf in step.leaves():
                step.backward(leaf, session.loss(leaf))
            step.apply()
            calls.clear()
            session.step_end(step)
            if len(calls) != 1:
                raise AssertionError(f"step {step.number} began {len(calls)} sums")
    finally:
        Groups.start_sum = start_sum  # type: ignore[method-assign]


def test_measured_steps_tell_the_same_at_any_world_size_in_the_one_sum(trio: Trio, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, total_steps=6, signals_every=2, leaves=3)  # two ranks need a surplus one
    pressed = replace(settings, signals=replace(settings.signals, host_share=1e-9))
    trio.make(pressed, tmp_path / "run", train_with_one_sum_a_step)
    told = {}
    for world_size in (1, 2):
        ended = trio.run(world_size)
        assert [one.outcome.cause for one in ended] == [None] * world_size
        assert [len(one.shares) for one in ended] == [1] + [0] * (world_size - 1)
        (share,) = ended[0].shares
        assert (share.step, share.is_measured) == (6, False)
        assert 0 < share.snapshot_bytes == share.extra_bytes < share.in_use_bytes
        told[world_size] = {report.step: report for report in ended[0].reports}
        pressed_steps = {step for step, report in told[world_size].items() if report.ranks_pressed == world_size}
        assert pressed_steps == {2, 4, 6}
        for step, report in told[world_size].items():
            if step in pressed_steps:
                assert report.grad_variance == pytest.approx(told[1][step].grad_variance, rel=1e-4)
                assert 0 < report.grad_variance < report.grad_norm**2
                assert 0 < report.pressed_share < 1
            else:
                assert (report.grad_variance, report.ranks_pressed, report.pressed_share) == (None, 0, None)


def train_and_count(session: Session) -> None:
    """Fails unless as many tensors are alive after many steps as after few, and no more reports than the courier brings
    in one call, whose newest it may still hold. One leaf a step."""
    session.build(make_model=OddModel)
    alive: dict[int, tuple[int, int]] = {}
    for step in session.steps():
        for leaf in step.leaves():
            logits = session.state.model(leaf.input_ids.remainder(7))
            loss = functional.cross_entropy(logits.flatten(0, 1), leaf.labels.remainder(7).flatten())
            step.backward(leaf, loss)
        step.apply()
        session.step_end(step)
        if step.number in (_FEW, _MANY):
            alive[step.number] = count_alive(session)
    (few_tensors, _), (many_tensors, num_reports) = alive[_FEW], alive[_MANY]
    if few_tensors != many_tensors or num_reports > _MAX_PER_CALL:
        raise AssertionError(f"tensors and reports alive, by step: {alive}")


def count_alive(session: Session) -> tuple[int, int]:
    """Tensors, and StepReports, once the test's own coordinator has let go of what it collected."""
    courier: Any = session._courier
    if not courier.flush(_FLUSH_S):
        raise AssertionError(f"news was not delivered within {_FLUSH_S:g} s")
    courier._coordinator.reports.clear()
    gc.collect()
    kinds = [type(one) for one in gc.get_objects()]
    return sum(issubclass(kind, torch.Tensor) for kind in kinds), sum(kind is StepReport for kind in kinds)


def test_a_thousand_steps_leave_no_more_behind_than_a_hundred(trio: Trio, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, total_steps=_MANY + 2, signals_every=10, leaves=1)
    trio.processes[0].make(settings, tmp_path / "run", train_and_count)
    assert trio.run(1)[0].outcome.cause is None

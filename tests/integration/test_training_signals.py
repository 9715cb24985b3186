"""What a group tells of its gradient and memory. Real: processes, gloo, FSDP2, Keepers, the Session and its vector."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.fakes.rank_processes import Trio
from tests.fakes.token_datasets import write_numbered_rows
from tests.fakes.worker_settings import make_settings
from workers.groups import Groups
from workers.session import Session


@pytest.fixture(scope="module")
def trio() -> Iterator[Trio]:
    trio = Trio()
    try:
        yield trio
    finally:
        trio.close()


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
    url = str(tmp_path / "data")
    write_numbered_rows(url, 200, sequence_length=16, validation_rows=12)
    settings = make_settings(url, total_steps=6, signals_every=2)
    pressed = replace(settings, signals=replace(settings.signals, host_share=1e-9))
    trio.make(pressed, tmp_path / "run", train_with_one_sum_a_step)
    told = {}
    for world_size in (1, 2, 3):
        ended = trio.run(world_size)
        assert [one.outcome.cause for one in ended] == [None] * world_size
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

"""A step on a CUDA device: the host waits for nothing in it but the arrival of the vector of the step before.

Real: a worker process, NCCL of one rank, FSDP2, the Session. torch itself raises where an operation makes the host
wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from storage.keys import Attempt, new_nonce
from tests.fakes.rank_processes import RankProcess, make_spec
from tests.fakes.small_training import OddModel
from tests.fakes.token_datasets import write_numbered_rows
from tests.fakes.worker_settings import make_settings
from workers.rendezvous import Rendezvous
from workers.session import Session
from workers.stream import Leaf
from workers.vector_reader import VectorReader

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

_QUIET = range(5, 25)  # the optimizer's state, streams and pinned memory are all there; no save is due
_STEPS = 1000
_LONG = 1 << 33  # clock cycles: seconds on any device


class SumOfOne:
    """A sum over one rank: over once the device has done what was queued before it."""

    def __init__(self) -> None:
        self._over = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._over.record()

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._over)


@contextmanager
def no_waiting(*, is_on: bool) -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error" if is_on else "default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def loss_of(session: Session, leaf: Leaf) -> torch.Tensor:
    logits = session.state.model(leaf.input_ids.remainder(7))
    return functional.cross_entropy(logits.float().flatten(0, 1), leaf.labels.remainder(7).flatten())


def train_without_waiting(session: Session) -> None:
    session.build(make_model=OddModel)
    for step in session.steps():
        with no_waiting(is_on=step.number in _QUIET):
            for leaf in step.leaves():
                step.backward(leaf, loss_of(session, leaf))
            step.apply()
            session.step_end(step)


def train_and_weigh(session: Session) -> None:
    """Fails unless as much is allocated after many steps as after few."""
    session.build(make_model=OddModel)
    weighed = {}
    for step in session.steps():
        for leaf in step.leaves():
            step.backward(leaf, loss_of(session, leaf))
        step.apply()
        session.step_end(step)
        del leaf
        if step.number in (_STEPS // 10, _STEPS):
            session.drain()
            torch.cuda.synchronize()
            weighed[step.number] = torch.cuda.memory_allocated()
    if len(set(weighed.values())) != 1:
        raise AssertionError(f"bytes allocated by step: {weighed}")


def run_alone(root: Path, train_loop: Callable[[Session], None], *, total_steps: int) -> None:
    url = str(root / "data")
    write_numbered_rows(url, 200, sequence_length=16, validation_rows=12)
    settings = make_settings(url, total_steps=total_steps, signals_every=2)
    process, rendezvous, attempt = RankProcess(0), Rendezvous("127.0.0.1"), Attempt(number=1, nonce=new_nonce())
    try:
        process.make(settings, root / "run", train_loop)
        process.call("start", make_spec(attempt, 0, 1, rendezvous.address()[1]))
        assert process.call("ended", attempt).outcome.cause is None
    finally:
        process.close()


def test_a_step_makes_the_host_wait_for_nothing(tmp_path: Path) -> None:
    run_alone(tmp_path, train_without_waiting, total_steps=_QUIET[-1] + 2)


def test_a_thousand_steps_allocate_no_more_than_a_hundred(tmp_path: Path) -> None:
    run_alone(tmp_path, train_and_weigh, total_steps=_STEPS + 2)


def test_reading_a_sum_does_not_wait_for_a_kernel_queued_after_it() -> None:
    reader = VectorReader(torch.device("cuda", 0))
    vector = reader.upload([1.5, 2.5])
    reading = reader.begin(vector, SumOfOne())
    torch.cuda._sleep(_LONG)  # type: ignore[no-untyped-call]
    behind = torch.cuda.Event()  # type: ignore[no-untyped-call]
    behind.record()
    assert reading.words() == [1.5, 2.5]
    assert not behind.query(), "the host has waited for the kernel"  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()

"""Generations that some rank left out: every Keeper of the World lets go of them, own and replicas. Real Keepers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.keeper import Keeper
from storage.keeper_protocol import BufferLease, LeaseRequest
from tests.fakes.memory_bench import FIRST, SECOND, WAIT_S, MemoryBench, arrays, ask, keep, steps


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[MemoryBench]:
    bench = MemoryBench(tmp_path)
    yield bench
    bench.close()


def ask_giving_up(keeper: Keeper, *, step: int, rank: int, given_up: tuple[int, ...]) -> BufferLease | None:
    return keeper.lease_buffer(
        LeaseRequest(
            run_id="run",
            attempt=FIRST,
            step=step,
            rank=rank,
            pid=os.getpid(),
            num_bytes=1000,
            is_generation=True,
            given_up=given_up,
        )
    )


def test_a_rank_full_of_steps_that_will_never_be_whole_gets_a_buffer_again(bench: MemoryBench) -> None:
    a, b = bench.keeper("a"), bench.keeper("b")
    peer = b.greet().address
    for step in (1, 2, 3):
        keep(a, arrays(step), step=step, peer=peer)
        assert a.wait_replicated(FIRST, 0, step, WAIT_S).replicated_step == step
    assert ask(a, 1000, step=4) is None
    assert ask_giving_up(a, step=4, rank=0, given_up=(2, 3)) is not None
    assert ask_giving_up(b, step=4, rank=1, given_up=(2, 3)) is not None
    assert steps(a, is_replica=False) == steps(b, is_replica=True) == [(1, 1)]


def test_steps_of_another_attempt_are_not_meant(bench: MemoryBench) -> None:
    a = bench.keeper("a")
    keep(a, arrays(1), step=2, peer=None)
    assert ask(a, 1000, attempt=SECOND, step=3) is not None
    request = LeaseRequest(
        run_id="run",
        attempt=SECOND,
        step=4,
        rank=0,
        pid=os.getpid(),
        num_bytes=1000,
        is_generation=True,
        given_up=(2,),
    )
    assert a.lease_buffer(request) is not None
    a.memory_report()  # waits until it is whole
    assert steps(a, is_replica=False) == [(1, 2)]

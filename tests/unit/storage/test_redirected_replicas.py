"""Replicas go where the driver says once their Keeper has died. Real Keepers and TCP in one process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.memory_bench import FIRST, WAIT_S, MemoryBench, arrays, keep, steps


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[MemoryBench]:
    bench = MemoryBench(tmp_path)
    yield bench
    bench.close()


def test_replicas_for_a_keeper_that_is_gone_go_where_it_is_told(bench: MemoryBench) -> None:
    a, b, c = bench.keeper("a"), bench.keeper("b"), bench.keeper("c")
    peer, other = b.greet().address, c.greet().address
    assert peer is not None
    assert other is not None
    b.close()
    keep(a, arrays(1), step=1, peer=peer)
    progress = a.wait_replicated(FIRST, 0, 1, WAIT_S)
    assert (progress.sealed_step, progress.replicated_step) == (1, -1)
    a.memory.redirect(peer, other)
    keep(a, arrays(2), step=2, peer=peer)
    assert a.wait_replicated(FIRST, 0, 2, WAIT_S).replicated_step == 2
    assert steps(c, is_replica=True) == [(1, 1), (1, 2)]


def test_the_successor_of_a_keeper_gets_what_a_later_world_sends_to_it(bench: MemoryBench) -> None:
    a, b, c = bench.keeper("a"), bench.keeper("b"), bench.keeper("c")
    gone, other = b.greet().address, c.greet().address
    assert gone is not None
    assert other is not None
    b.close()
    a.memory.redirect(gone, other)
    successor = bench.keeper("b")
    peer = successor.greet().address
    assert peer is not None
    assert peer != gone
    keep(a, arrays(1), step=1, peer=peer)
    assert a.wait_replicated(FIRST, 0, 1, WAIT_S).replicated_step == 1
    assert steps(successor, is_replica=True) == [(1, 1)]
    assert not steps(c, is_replica=True)


def test_a_rank_whose_buffers_are_full_of_what_has_no_replica_goes_on_with_its_new_peer(bench: MemoryBench) -> None:
    a, b, c = bench.keeper("a"), bench.keeper("b"), bench.keeper("c")
    peer, other = b.greet().address, c.greet().address
    assert peer is not None
    assert other is not None
    keep(a, arrays(1), step=1, peer=peer)
    assert a.wait_replicated(FIRST, 0, 1, WAIT_S).replicated_step == 1
    b.close()
    for step in (2, 3):
        keep(a, arrays(step), step=step, safe_step=1, peer=peer)
        assert a.wait_replicated(FIRST, 0, step, WAIT_S).replicated_step == 1
    assert keep(a, arrays(4), step=4, safe_step=1, peer=peer) is None, "there is a buffer: this proves nothing"
    a.memory.redirect(peer, other)
    until = time.monotonic() + WAIT_S
    while a.wait_replicated(FIRST, 0, 3, WAIT_S).replicated_step < 3:
        assert time.monotonic() < until
    assert steps(c, is_replica=True) == [(1, 3)]
    assert keep(a, arrays(4), step=4, safe_step=3, peer=peer) is not None

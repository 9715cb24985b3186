"""What is held in memory never keeps a Checkpoint from being saved. Real Keepers with little room."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.arena import Arena, NoRoom
from storage.config import CheckpointConfig
from storage.keeper import Keeper
from storage.keeper_protocol import BufferLease, LeaseRequest
from storage.keys import Attempt
from storage.memory_store import MemoryStore
from tests.fakes.memory_bench import FIRST, SECOND, WAIT_S, MemoryBench, arrays, keep, steps
from tests.fakes.recording_sink import RecordingSink

SIZE = 640 * 4096
ROOM = 4 << 20  # one Snapshot, and not two


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[MemoryBench]:
    bench = MemoryBench(tmp_path)
    yield bench
    bench.close()


def ask_to_ship(
    keeper: Keeper, step: int, *, attempt: Attempt = FIRST, rank: int = 0, num_bytes: int = SIZE
) -> BufferLease | None:
    return keeper.lease_buffer(
        LeaseRequest(run_id="run", attempt=attempt, step=step, rank=rank, pid=os.getpid(), num_bytes=num_bytes)
    )


def hold(keeper: Keeper, step: int, *, rank: int = 0, attempt: Attempt = FIRST) -> None:
    """A generation that nothing is done with any more."""
    assert keep(keeper, arrays(step), step=step, rank=rank, attempt=attempt) is not None
    keeper.wait_replicated(attempt, rank, step, WAIT_S)


def test_a_generation_gives_way_to_a_save_where_there_is_no_room_for_both(bench: MemoryBench) -> None:
    keeper = bench.keeper("a", budget_bytes=ROOM)
    hold(keeper, 1)
    assert ask_to_ship(keeper, 2) is not None
    assert steps(keeper, is_replica=False) == []
    assert "gave way to a save" in (keeper.status().memory_error or "")


def test_what_an_older_attempt_left_gives_way_to_the_saves_of_one_that_keeps_nothing(bench: MemoryBench) -> None:
    keeper = bench.keeper("a", budget_bytes=ROOM)
    hold(keeper, 1)
    assert ask_to_ship(keeper, 2, attempt=SECOND) is not None


def test_another_rank_without_any_buffer_is_not_refused_for_what_is_in_memory(bench: MemoryBench) -> None:
    keeper = bench.keeper("a", budget_bytes=ROOM)
    hold(keeper, 1)
    assert ask_to_ship(keeper, 1, rank=1) is not None


def test_what_has_a_replica_elsewhere_goes_first(bench: MemoryBench) -> None:
    keeper, peer = bench.keeper("a", budget_bytes=9 << 20), bench.keeper("b")
    assert keep(keeper, arrays(1), step=1, peer=None) is not None
    assert keep(peer, arrays(1), step=1, rank=1, peer=keeper.greet().address) is not None
    peer.wait_replicated(FIRST, 1, 1, WAIT_S)
    keeper.wait_replicated(FIRST, 0, 1, WAIT_S)
    assert ask_to_ship(keeper, 2, num_bytes=5 << 20) is not None
    assert steps(keeper, is_replica=False) == []
    assert steps(keeper, is_replica=True, rank=1) == [(1, 1)]


def test_nothing_gives_way_to_a_second_save_while_one_is_on_its_way(bench: MemoryBench) -> None:
    keeper = bench.keeper("a", budget_bytes=6 << 20)
    hold(keeper, 1)
    assert ask_to_ship(keeper, 2) is not None
    assert ask_to_ship(keeper, 3) is None
    assert steps(keeper, is_replica=False) == [(1, 1)]


def test_a_save_that_never_fits_is_refused_with_the_reason(bench: MemoryBench) -> None:
    keeper = bench.keeper("a", budget_bytes=ROOM)
    with pytest.raises(NoRoom, match="give the node more shared memory"):
        ask_to_ship(keeper, 1, num_bytes=2 * ROOM)


def test_memory_that_others_took_costs_generations_and_no_save(
    bench: MemoryBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = bench.keeper("a")
    hold(keeper, 1)

    def fallocate(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    assert keep(keeper, arrays(2), step=2) is None
    assert "No space left" in (keeper.status().memory_error or "")
    assert ask_to_ship(keeper, 2) is not None


def test_a_node_without_memory_to_give_has_no_room_for_generations(tmp_path: Path) -> None:
    arena = Arena(tmp_path / "arena", "run", 1 << 24, generation_budget_bytes=0)
    try:
        assert arena.generation_budget_bytes == 0
    finally:
        arena.close()


def test_what_a_killed_keeper_held_counts_as_free_for_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "arena"
    place.mkdir()
    left = place / "buffer-of-a-killed-keeper"
    left.write_bytes(bytes(1000))
    was_there: list[bool] = []

    def available() -> int:
        was_there.append(left.exists())
        return 4 << 20

    monkeypatch.setattr("storage.keeper.available_bytes", available)
    keeper = Keeper("run", "a", MemoryStore(), RecordingSink(), CheckpointConfig(), place, budget_bytes=1 << 26)
    try:
        assert was_there == [False]
        assert keeper.greet().budget_bytes == 2 << 20
    finally:
        keeper.close()

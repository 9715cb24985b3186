"""What ranks of a loop without a coordinator must decide alike. Real: two processes, gloo; saves are the test's own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from storage.errors import StorageError
from tests.unit.workers.test_loop_saves import Loop
from workers.unison import Ranks

WORLD_SIZE = 2
LIMIT_S = 60.0


Story = Callable[[Ranks], object]


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(WORLD_SIZE, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.fixture
def as_ranks(pool: ProcessPoolExecutor, tmp_path: Path) -> Callable[[Story], list[object]]:
    """What a story gives on each of two ranks."""

    def tell(story: Story) -> list[object]:
        started = [pool.submit(_live, story, f"file://{tmp_path / 'meet'}", rank) for rank in range(WORLD_SIZE)]
        return [future.result(2 * LIMIT_S) for future in started]

    return tell


def _live(story: Callable[[Ranks], object], meeting: str, rank: int) -> object:
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=WORLD_SIZE)
    try:
        return story(Ranks(LIMIT_S))
    finally:
        dist.barrier()
        dist.destroy_process_group()


def saves_fail_and_rank_0_sees_it_first(ranks: Ranks) -> object:
    """The step at which this rank ends: rank 0 sees each save's end one step before rank 1."""
    loop = Loop(1, ranks=ranks, max_failed_saves=2)
    loop.held.failure = "gone"
    for step in range(1, 10):
        if step % 2 == (1 if ranks.rank == 0 else 0) and loop.held.step_under_way is not None:
            loop.held.end()
        try:
            loop.step(step)
        except StorageError as error:
            return step, "2 saves in a row failed" in str(error), loop.held.saved
    return None


def rank_1_is_told_in_the_last_step(ranks: Ranks) -> object:
    loop = Loop(50, ranks=ranks)
    loop.step(1)
    loop.step(2)
    return loop.saves.finish(3, None, told_to_stop=lambda: ranks.rank == 1), loop.held.saved


def rank_1_loses_touch_at_the_end_of_a_save(ranks: Ranks) -> object:
    loop = Loop(2, ranks=ranks)
    for step in (1, 2):
        loop.step(step)
    loop.held.failure = "no answer" if ranks.rank == 1 else None
    loop.step(2, stop=True)
    return loop.step(2), loop.held.saved, loop.saves.saved_step


def test_too_many_failed_saves_end_all_ranks_at_the_same_step(as_ranks: Callable[[Story], list[object]]) -> None:
    first, second = as_ranks(saves_fail_and_rank_0_sees_it_first)
    assert first == second
    assert first is not None
    assert first[1] is True  # type: ignore[index]


def test_a_rank_that_is_told_to_stop_in_the_last_step_stops_all(as_ranks: Callable[[Story], list[object]]) -> None:
    assert as_ranks(rank_1_is_told_in_the_last_step) == [(True, [3]), (True, [3])]


def test_no_rank_saves_alone_where_another_one_has_committed(as_ranks: Callable[[Story], list[object]]) -> None:
    assert as_ranks(rank_1_loses_touch_at_the_end_of_a_save) == 2 * [(True, [2], 2)]

"""Which steps are kept in memory, and which of them all ranks know to be whole: a World of cadences, step by step."""

from __future__ import annotations

from collections.abc import Callable, Container

import pytest

from storage.config import MemoryConfig
from workers.memory_cadence import MemoryCadence
from workers.step_vector import NUM_REPLICAS_TOLD

NUM_BUFFERS = 3
Vector = tuple[int, int, list[int], list[int]]


class Rank:
    """One rank with its three buffers: ``held`` are the steps it has a generation of."""

    def __init__(self, config: MemoryConfig, world_size: int, base_step: int, total_steps: int) -> None:
        self.cadence = MemoryCadence(config, base_step=base_step, total_steps=total_steps, world_size=world_size)
        self.held: list[int] = []
        self.taken: list[int] = []

    def take(self, step: int) -> None:
        gone = self.cadence.given_up
        self.held = [held for held in self.held if held >= self.cadence.safe_step and held not in gone]
        if len(self.held) < NUM_BUFFERS:
            self.held.append(step)
            self.taken.append(step)


class World:
    """``replica_s``: how many steps after its Snapshot a rank's replica is there. Steps take ``step_s``."""

    def __init__(
        self,
        config: MemoryConfig,
        *,
        world_size: int = 3,
        base_step: int = 0,
        total_steps: int = 10_000,
        replica_after: Callable[[int, int], float] | None = None,
        stall_s: float = 0.001,
        step_s: float = 1.0,
        left_out: dict[int, Container[int]] | None = None,
    ) -> None:
        self.ranks = [Rank(config, world_size, base_step, total_steps) for _ in range(world_size)]
        self.replica_after, self.left_out = replica_after, left_out or {}
        self.stall_s, self.step_s = stall_s, step_s
        self.step = base_step
        self.waiting: list[Vector] = []
        self.due: list[int] = []

    def run(self, num_steps: int, *, ordered: frozenset[int] = frozenset()) -> None:
        for _ in range(num_steps):
            self.step += 1
            self._end_step(self.step, is_ordered=self.step in ordered)

    def _end_step(self, step: int, *, is_ordered: bool) -> None:
        told = {rank.cadence.told(step) for rank in self.ranks}
        assert len(told) == 1, "the ranks speak of different steps"
        whole, without = [0] * NUM_REPLICAS_TOLD, [0] * NUM_REPLICAS_TOLD
        for number, rank in enumerate(self.ranks):
            for index, due in enumerate(rank.cadence.told(step)):
                whole[index] += due in rank.held and self._is_whole(number, due)
                without[index] += due not in rank.taken
        vector = (step, self.ranks[0].cadence.bind(step, self.step_s), whole, without)
        before, self.waiting = self.waiting, [vector]
        self._learn(before)
        reached = {rank.cadence.reach(step, is_ordered=is_ordered) for rank in self.ranks}
        assert len(reached) == 1, "a step is due on some ranks alone"
        if not reached.pop():
            return
        self.due.append(step)
        before, self.waiting = self.waiting, []
        self._learn(before)
        for number, rank in enumerate(self.ranks):
            if step not in self.left_out.get(number, ()):
                rank.take(step)
        if len(self.due) > 1 and step in self.ranks[0].taken:
            self.ranks[0].cadence.note_stall(self.stall_s)

    def _learn(self, vectors: list[Vector]) -> None:
        for vector in vectors:
            for rank in self.ranks:
                rank.cadence.learn(*vector)
        safe = {rank.cadence.safe_step for rank in self.ranks}
        assert len(safe) == 1, "the ranks hold different steps for safe"
        for rank in self.ranks:
            assert rank.cadence.safe_step in (-1, *rank.held), "a rank has dropped what is said to be safe"
        if self.safe_step >= 0:
            late = [number for number in range(len(self.ranks)) if not self._is_whole(number, self.safe_step)]
            assert not late, f"step {self.safe_step} is said to be safe, and ranks {late} have no replica of it"

    def _is_whole(self, number: int, due: int) -> bool:
        after = 0.5 if self.replica_after is None else self.replica_after(number, due)
        return due + after <= self.step

    @property
    def safe_step(self) -> int:
        return self.ranks[0].cadence.safe_step


def every(steps: int | None, max_slowdown: float = 0.01) -> MemoryConfig:
    return MemoryConfig(mode="on", every_steps=steps, max_slowdown=max_slowdown)


@pytest.mark.parametrize("base_step", [0, 17])
def test_every_step_is_every_step_from_the_first_of_an_attempt_on(base_step: int) -> None:
    world = World(every(1), base_step=base_step)
    world.run(20)
    assert world.due == list(range(base_step + 1, base_step + 21))
    assert all(rank.taken == world.due for rank in world.ranks)
    assert world.safe_step == base_step + 19


def test_a_fixed_cadence_begins_with_the_first_step() -> None:
    world = World(every(4), base_step=10)
    world.run(20)
    assert world.due == [11, 15, 19, 23, 27]
    assert world.safe_step == 27


def test_nothing_is_due_after_the_last_step() -> None:
    world = World(every(1), base_step=8, total_steps=9)
    world.run(1)
    assert world.due == [9]


def test_the_cadence_follows_what_a_snapshot_costs() -> None:
    world = World(every(None), stall_s=0.05, step_s=1.0)  # five steps' worth of a hundredth
    world.run(60)
    assert world.due[:2] == [1, 3]
    gaps = {b - a for a, b in zip(world.due[2:], world.due[3:], strict=False)}
    assert gaps == {5}


def test_a_cheap_snapshot_is_taken_at_every_step() -> None:
    world = World(every(None), stall_s=0.009, step_s=1.0)
    world.run(30)
    assert world.due[-20:] == list(range(11, 31))


def test_the_tier_goes_on_where_rank_0_left_out_the_snapshots_that_were_to_be_measured() -> None:
    world = World(every(None), left_out={0: (3, 11)}, stall_s=0.009)
    world.run(60)
    assert world.due[:4] == [1, 3, 11, 19]
    assert world.due[-20:] == list(range(41, 61))


def test_a_save_for_the_store_counts_as_one_in_memory() -> None:
    world = World(every(10))
    world.run(8, ordered=frozenset({6}))
    assert world.due == [1, 6]
    assert world.safe_step == 6


@pytest.mark.parametrize("after", [1.2, 1.9, 2.5, 4.4])
def test_replicas_that_take_longer_than_a_step_make_the_cadence_slower_and_never_stop_it(after: float) -> None:
    world = World(every(1), replica_after=lambda rank, _: after if rank == 1 else 0.3)
    world.run(200)
    assert world.step - world.safe_step <= 3 * (after + 1) + 2
    late = [due for due in world.due if due > 100]
    assert len(late) >= 100 / (after + 2)
    assert all(due in rank.taken for due in late for rank in world.ranks), "a step was due that found no buffer"


@pytest.mark.parametrize("every_steps", [1, 2, 3, 5])
@pytest.mark.parametrize("first_s", [0.5, 1.5, 3.0, 4.5])
def test_what_an_older_vector_settles_meanwhile_is_not_taken_for_another_step(every_steps: int, first_s: float) -> None:
    """Vectors of two steps are under way at a time: the older one may prove a step that the newer one speaks of too."""
    world = World(every(every_steps), replica_after=lambda _, step: first_s if step < 20 else 9.5)
    world.run(60)  # `World` looks at each step whether what is said to be safe is so
    assert world.safe_step > 20


def test_what_two_vectors_say_of_a_step_left_out_gives_up_that_step_alone() -> None:
    cadence = MemoryCadence(every(100), base_step=0, total_steps=1000, world_size=2)
    for step in (3, 5):
        cadence.reach(step, is_ordered=True)
    assert cadence.told(6) == cadence.told(7) == (3, 5)
    cadence.learn(6, 0, (1, 0, 0), (1, 0, 0))
    cadence.learn(7, 0, (1, 1, 0), (1, 0, 0))
    assert cadence.given_up == (3,)


def test_a_step_that_one_rank_left_out_never_becomes_safe_and_the_next_one_does() -> None:
    world = World(every(1), left_out={2: (10,)})
    safe = []
    for _ in range(20):
        world.run(1)
        safe.append(world.safe_step)
    assert 10 not in safe
    assert safe[-1] >= 17


def test_a_peer_that_is_away_for_a_while_slows_the_cadence_down_and_its_return_speeds_it_up() -> None:
    away = range(20, 60)
    world = World(every(1), replica_after=lambda _, step: 60.5 - step if step in away else 0.5)
    world.run(60)
    assert world.safe_step < 20
    assert len([due for due in world.due if due > 30]) < 15
    world.run(60)
    assert world.safe_step == 119
    assert world.due[-5:] == list(range(116, 121))


def test_a_rank_that_left_out_more_than_the_others_have_buffers_for_stops_nobody_for_good() -> None:
    world = World(every(1), left_out={1: range(10, 30), 2: range(20, 40, 2)})
    world.run(30)
    assert world.safe_step == 9
    world.run(30)
    assert world.safe_step == 59
    assert world.ranks[0].cadence.given_up == ()

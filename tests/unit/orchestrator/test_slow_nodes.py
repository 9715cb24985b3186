"""A slow node is named soon and nothing else ever is: synthetic times with the noise of real machines."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

import pytest

from orchestrator.config import WorldConfig
from orchestrator.decisions import Keep, Leave
from orchestrator.scaling_policy import WorkerView
from orchestrator.slow_nodes import NodeRecovered, NodeSlow, SlowNodes, decide_exclusion

NAMED_WITHIN = 20
STEPS = 500


def times(
    seed: int, world: int, *, sigma: float, drag: float = 0.0, bursts: float = 0.0, slow: Sequence[int] = ()
) -> Iterator[tuple[list[float], list[float]]]:
    """Endless steps, normal and with the ranks ``slow`` twice as slow. ``sigma``: scatter of the logarithm; ``drag``:
    how much of a disturbance is still there a step later; ``bursts``: share of steps that something else holds up."""
    rng = random.Random(seed)
    states = [0.0] * world
    while True:
        states = [drag * state + math.sqrt(1 - drag * drag) * rng.gauss(0, 1) for state in states]
        hold_ups = [rng.uniform(2, 10) if rng.random() < bursts else 1.0 for _ in range(world)]
        normal = [math.exp(sigma * state) * held for state, held in zip(states, hold_ups, strict=True)]
        yield normal, [seconds * (2.0 if rank in slow else 1.0) for rank, seconds in enumerate(normal)]


def nodes(world: int, per_node: int = 1) -> list[str]:
    return [f"n{rank // per_node}" for rank in range(world)]


NOISE = [
    {"sigma": 0.1},
    {"sigma": 0.1, "drag": 0.7},
    {"sigma": 0.15, "bursts": 0.1},
]


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("world", [2, 4])
def test_no_node_is_named_in_500_steps_of_noise(world: int, noise: dict[str, float]) -> None:
    for seed in range(6):
        slow_nodes = SlowNodes(1.5)
        slow_nodes.begin(nodes(world))
        series = times(seed, world, **noise)
        for step in range(STEPS):
            assert not slow_nodes.add(next(series)[0], 3.0), (seed, step)


@pytest.mark.slow
@pytest.mark.parametrize("noise", [*NOISE, {"sigma": 0.4}, {"sigma": 0.3, "bursts": 0.05}])
def test_no_node_is_named_over_many_seeds(noise: dict[str, float]) -> None:
    named = 0
    for seed in range(200):
        slow_nodes = SlowNodes(1.5)
        slow_nodes.begin(nodes(4))
        series = times(1000 + seed, 4, **noise)
        named += any(bool(slow_nodes.add(next(series)[0], 3.0)) for _ in range(STEPS))
    assert named <= 2, "at most one run of 500 steps in a hundred"


@pytest.mark.parametrize("noise", NOISE[:2])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("slow_from", [0, 120])
def test_a_node_twice_as_slow_is_named_within_20_steps(world: int, noise: dict[str, float], slow_from: int) -> None:
    for seed in range(5):
        slow_nodes = SlowNodes(1.5)
        slow_nodes.begin(nodes(world))
        series = times(seed, world, slow=[1], **noise)
        for _ in range(slow_from):
            assert not slow_nodes.add(next(series)[0], 3.0)
        changes = [change for _ in range(NAMED_WITHIN) for change in slow_nodes.add(next(series)[1], 3.0)]
        assert [change.node_id for change in changes] == ["n1"], seed
        assert isinstance(changes[0], NodeSlow)
        assert 1.5 <= changes[0].ratio < 3.0
        assert list(slow_nodes.slow) == ["n1"]


def test_a_node_that_is_fast_again_is_said_once() -> None:
    slow_nodes = SlowNodes(1.5)
    slow_nodes.begin(nodes(3))
    series = times(3, 3, sigma=0.1, slow=[2])
    changes = [c for _ in range(100) for c in slow_nodes.add(next(series)[1], 3.0)]
    changes += [c for _ in range(100) for c in slow_nodes.add(next(series)[0], 3.0)]
    assert [type(change) for change in changes] == [NodeSlow, NodeRecovered]
    assert slow_nodes.slow == {}


def test_a_node_is_as_slow_as_the_slowest_of_its_ranks_and_its_own_ranks_are_no_measure() -> None:
    slow_nodes = SlowNodes(1.5)
    slow_nodes.begin(nodes(4, per_node=2))
    series = times(1, 4, sigma=0.05, slow=[2])
    changes = [c for _ in range(NAMED_WITHIN) for c in slow_nodes.add(next(series)[1], 3.0)]
    assert [change.node_id for change in changes] == ["n1"]


def test_a_new_world_begins_anew_and_one_node_alone_is_never_slow() -> None:
    slow_nodes = SlowNodes(1.5)
    slow_nodes.begin(nodes(2))
    series = times(1, 2, sigma=0.05, slow=[1])
    for _ in range(50):
        slow_nodes.add(next(series)[1], 3.0)
    assert slow_nodes.slow
    slow_nodes.begin(["n1", "n1"])
    assert not any(slow_nodes.add(next(series)[1], 3.0) for _ in range(100))
    assert slow_nodes.slow == {}


def test_steps_that_were_not_measured_and_reports_of_another_world_are_left_out() -> None:
    slow_nodes = SlowNodes(1.5)
    slow_nodes.begin(nodes(2))
    for _ in range(100):
        assert slow_nodes.add((), 1.0) == ()
        assert slow_nodes.add((0.0, 9.0), 1.0) == ()
        assert slow_nodes.add((1.0, 9.0, 1.0), 1.0) == ()


def test_milliseconds_of_a_long_step_are_not_worth_a_word() -> None:
    slow_nodes = SlowNodes(1.5)
    slow_nodes.begin(nodes(2))
    assert not any(slow_nodes.add((0.001, 0.003), 1.0) for _ in range(100))


def test_a_ratio_that_is_no_slowness_is_refused() -> None:
    with pytest.raises(ValueError, match="above 1"):
        SlowNodes(1.0)


def workers(*places: str, spare: Sequence[str] = ()) -> list[WorkerView]:
    made = [
        WorkerView(worker_id=f"w{i}", node_id=n, is_ready=True, is_draining=False, is_member=True)
        for i, n in enumerate(places)
    ]
    return made + [
        WorkerView(worker_id=f"s{i}", node_id=n, is_ready=True, is_draining=False, is_member=False)
        for i, n in enumerate(spare)
    ]


FACTS = {"num_leaves": 12, "steps_left": 1000, "step_s": 1.0, "regroup_s": 20.0}


def test_the_world_parts_from_a_slow_node_where_that_pays() -> None:
    config = WorldConfig(min_workers=2, max_workers=4)
    decision, node_id = decide_exclusion({"c": 3.0, "b": 1.6}, workers("a", "b", "c", "d"), config, **FACTS)
    assert isinstance(decision, Leave)
    assert (decision.cause, node_id) == ("slow-node", "c")
    assert "556 s" in decision.reason, "4 rounds instead of 3 that take three times as long"


@pytest.mark.parametrize(
    ("ratio", "min_workers", "facts"),
    [
        (3.0, 4, {}),  # too few would stay
        (3.0, 2, {"steps_left": 30}),  # parting takes longer than what is left to gain
        (1.3, 2, {"num_leaves": 4}),  # 2 rounds instead of 1
    ],
)
def test_the_world_keeps_a_slow_node_that_it_needs(ratio: float, min_workers: int, facts: dict[str, int]) -> None:
    config = WorldConfig(min_workers=min_workers, max_workers=4)
    decision, _ = decide_exclusion({"c": ratio}, workers("a", "b", "c", "d"), config, **{**FACTS, **facts})
    assert isinstance(decision, Keep)


def test_a_spare_takes_the_place_of_a_slow_node() -> None:
    config = WorldConfig(min_workers=4, max_workers=4)
    places = workers("a", "b", "c", "d", spare=["e"])
    decision, _ = decide_exclusion({"c": 2.0}, places, config, **FACTS)
    assert isinstance(decision, Leave)


def test_a_slow_node_outside_the_world_is_nobodys_business() -> None:
    decision, node_id = decide_exclusion({"z": 2.0}, workers("a", "b"), WorldConfig(max_workers=2), **FACTS)
    assert isinstance(decision, Keep)
    assert not node_id

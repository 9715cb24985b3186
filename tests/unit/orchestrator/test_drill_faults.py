"""The faults that a drill draws: the same for a seed, spread over the steps, and possible. Pure."""

from __future__ import annotations

from collections import Counter

import pytest

from orchestrator.chaos import ChaosVerb, check_targets, parse_chaos
from orchestrator.drill_faults import NUM_FAULTS, draw_faults
from orchestrator.errors import ConfigError

KILLS = (ChaosVerb.KILL_WORKER, ChaosVerb.KILL_NODE, ChaosVerb.KILL_DRIVER)


def drawn(seed: int, *, num_faults: int = NUM_FAULTS, num_steps: int = 80, num_workers: int = 4) -> str:
    actions = draw_faults(num_steps=num_steps, num_workers=num_workers, num_faults=num_faults, seed=seed)
    return ",".join(map(str, actions))


def test_a_seed_gives_the_same_faults_again_and_seeds_differ() -> None:
    assert drawn(3) == drawn(3)
    assert len({drawn(seed) for seed in range(10)}) > 5


@pytest.mark.parametrize("seed", range(20))
def test_a_drill_has_three_kills_a_hang_a_drain_a_shrink_and_a_growth(seed: int) -> None:
    actions = parse_chaos(drawn(seed))
    verbs = Counter(action.verb for action in actions)
    assert sum(verbs[kill] for kill in KILLS) == 3
    assert (verbs[ChaosVerb.STOP_WORKER], verbs[ChaosVerb.DRAIN_NODE]) == (1, 1)
    assert [action.workers for action in actions if action.verb is ChaosVerb.SCALE] == [2, 4]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("num_faults", "num_steps", "num_workers"), [(1, 6, 1), (6, 80, 4), (3, 16, 2), (20, 200, 8)])
def test_every_schedule_can_come_true(seed: int, num_faults: int, num_steps: int, num_workers: int) -> None:
    text = drawn(seed, num_faults=num_faults, num_steps=num_steps, num_workers=num_workers)
    actions = parse_chaos(text)
    check_targets(actions, num_workers)
    assert all(1 < action.step < num_steps for action in actions), text
    assert [action.verb for action in actions].index(ChaosVerb.KILL_DRIVER) == len(actions) - 1, "processes live on"
    gone = sum(action.verb in (ChaosVerb.KILL_NODE, ChaosVerb.DRAIN_NODE) for action in actions)
    assert gone == sum(action.verb is ChaosVerb.ADD_NODE for action in actions)


def test_faults_for_which_there_are_too_few_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="6 faults need 29 steps at least, there are 20"):
        drawn(0, num_steps=20)
    assert drawn(0, num_steps=29)


def test_one_worker_is_never_asked_to_become_fewer() -> None:
    assert "scale" not in "".join(drawn(seed, num_workers=1) for seed in range(20))


@pytest.mark.parametrize("num_faults", [1, 6])
def test_before_the_last_fault_and_after_it_there_are_steps(num_faults: int) -> None:
    last = parse_chaos(drawn(0, num_faults=num_faults))[-1]
    assert (last.verb, 20 < last.step < 70) == (ChaosVerb.KILL_DRIVER, True)

"""What holds back a save that a policy asks for, and for how long."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from orchestrator.save_facts import Opinion, SaveFacts, SaveTimes
from orchestrator.weighing import weigh
from tests.fakes.save_facts import save_facts, save_times


class Always:
    """A policy that always wants one."""

    name = "always"

    def opinion(self, facts: SaveFacts) -> Opinion:
        return Opinion(policy=self.name, due_at_s=facts.now_s, why="says so")


class Pressing:
    """A policy that wants one that waits for no interval, but was the last to ask."""

    name = "pressing"

    def opinion(self, facts: SaveFacts) -> Opinion:
        return Opinion(policy=self.name, due_at_s=facts.now_s, why="says so", is_pressing=True)


class Early:
    """A policy that has wanted one for long."""

    name = "early"

    def opinion(self, facts: SaveFacts) -> Opinion:  # noqa: ARG002 - the Protocol has it
        return Opinion(policy=self.name, due_at_s=0.0, why="says so")


def test_a_pressing_policy_is_heard_before_one_that_asked_earlier_and_must_wait() -> None:
    facts = save_facts(40.0, last_save_at_s=35.0)
    assert weigh(facts, [Early()], min_interval_s=30.0).held_back is not None
    weighed = weigh(facts, [Early(), Pressing()], min_interval_s=30.0)
    assert weighed.wish is not None
    assert weighed.wish.policy == "pressing"


def held_back(now_s: float, *, unsettled: int, saves: Sequence[SaveTimes] = ()) -> str | None:
    facts = save_facts(now_s, unsettled=unsettled, last_save_at_s=0.0, saves=tuple(saves))
    weighed = weigh(facts, [Always()], min_interval_s=0.0)
    assert (weighed.wish is None) == (weighed.held_back is not None)
    return weighed.held_back


def test_two_saves_under_way_hold_back_a_third_and_one_does_not() -> None:
    assert held_back(10.0, unsettled=1) is None
    assert held_back(10.0, unsettled=2) == "2 saves are still under way, the newest for 10 s"


@pytest.mark.parametrize(
    ("saves", "patience_s"), [((), 60.0), ((save_times(write_s=2.0),), 60.0), ((save_times(write_s=100.0),), 400.0)]
)
def test_saves_that_never_end_do_not_hold_back_others_for_good(saves: tuple[SaveTimes, ...], patience_s: float) -> None:
    assert held_back(patience_s - 1.0, unsettled=2, saves=saves) is not None
    assert held_back(patience_s, unsettled=2, saves=saves) is None

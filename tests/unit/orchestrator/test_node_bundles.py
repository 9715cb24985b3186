"""Places for workers on one node: groups are added whole and given back whole."""

from __future__ import annotations

from typing import Any

from orchestrator.node_bundles import NodeBundles


class FakePlacement:
    def __init__(self, count: int) -> None:
        self.count = count

    def actor_options(self, index: int) -> dict[str, Any]:
        return {"index": index, "of": self.count}


def bundles_of(count: int) -> NodeBundles:
    return NodeBundles(FakePlacement, count)  # type: ignore[arg-type]


def test_a_node_that_is_to_hold_more_gets_another_group() -> None:
    bundles = bundles_of(2)
    taken = [bundles.take(), bundles.take()]
    assert (bundles.num, bundles.num_free) == (2, 0)
    bundles.grow(1)
    third = bundles.take()
    assert (bundles.num, bundles.num_free) == (3, 0)
    assert [bundle.actor_options() for bundle in (*taken, third)] == [
        {"index": 0, "of": 2},
        {"index": 1, "of": 2},
        {"index": 0, "of": 1},
    ]


def test_only_groups_that_nobody_is_in_are_given_back_and_no_more_than_may_go() -> None:
    bundles = bundles_of(2)
    bundles.grow(1)
    bundles.grow(1)
    first = bundles.take()
    assert bundles.trim(0) == []
    assert [placement.count for placement in bundles.trim(1)] == [1]
    assert (bundles.num, bundles.num_free) == (3, 2)
    assert [placement.count for placement in bundles.trim(9)] == [1], "a worker is in the other one"
    bundles.give_back(first)
    assert bundles.trim(1) == [], "half of a group cannot go"
    assert [placement.count for placement in bundles.trim(2)] == [2]
    assert (bundles.num, bundles.num_free, bundles.placements) == (0, 0, [])

"""When a node that was judged lost may be used again."""

from __future__ import annotations

from orchestrator.lost_nodes import AWAY_S, LONGEST_AWAY_S, LostNodes


def test_a_node_that_ray_still_lists_after_its_time_away_comes_back_once() -> None:
    nodes = LostNodes()
    nodes.lose("a", 100.0)
    assert nodes.away == {"a"}
    assert nodes.take_back(100.0 + AWAY_S - 0.1, {"a"}) == ()
    assert nodes.take_back(100.0 + AWAY_S, {"a", "b"}) == ("a",)
    assert nodes.away == frozenset()
    assert nodes.take_back(100.0 + 2 * AWAY_S, {"a"}) == ()


def test_a_node_that_ray_does_not_list_never_comes_back() -> None:
    nodes = LostNodes()
    nodes.lose("a", 0.0)
    assert nodes.take_back(1e9, {"b"}) == ()
    assert nodes.away == {"a"}


def test_a_node_that_is_lost_again_stays_away_longer_up_to_a_limit() -> None:
    nodes, now = LostNodes(), 0.0
    lengths = []
    for _ in range(8):
        nodes.lose("a", now)
        began = now
        while not nodes.take_back(now, {"a"}):
            now += AWAY_S / 2
        lengths.append(now - began)
    assert lengths[:3] == [AWAY_S, 2 * AWAY_S, 4 * AWAY_S]
    assert lengths[-1] == LONGEST_AWAY_S

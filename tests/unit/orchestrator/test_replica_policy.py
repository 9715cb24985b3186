"""Where replicas go: in another failure domain first, then evenly. Pure."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from orchestrator.replica_policy import assign_peers


def test_nodes_without_labels_make_a_ring() -> None:
    nodes = dict.fromkeys("abcd")
    assert assign_peers(nodes, nodes) == {"a": "b", "b": "c", "c": "d", "d": "a"}


def test_one_node_alone_has_no_peer() -> None:
    assert assign_peers({"a": "zone-1"}, ["a"]) == {"a": None}


def test_two_zones_hold_each_other_s_replicas_evenly() -> None:
    zones = {"a": "z1", "b": "z1", "c": "z2", "d": "z2"}
    peers = assign_peers(zones, zones)
    assert all(peer is not None and zones[node] != zones[peer] for node, peer in peers.items())
    assert sorted(peer or "" for peer in peers.values()) == ["a", "b", "c", "d"]


def test_another_zone_counts_for_more_than_an_even_load() -> None:
    zones = {"a": "z1", "b": "z1", "c": "z1", "d": "z2"}
    peers = assign_peers(zones, zones)
    assert [peers[node] for node in "abc"] == ["d", "d", "d"]
    assert peers["d"] in {"a", "b", "c"}


def test_a_node_that_is_leaving_gets_a_peer_and_is_none() -> None:
    nodes = dict.fromkeys("abc")
    peers = assign_peers(nodes, nodes, leaving={"b"})
    assert peers == {"a": "c", "b": "a", "c": "a"}


def test_a_node_without_ranks_may_take_replicas_and_needs_no_peer() -> None:
    assert assign_peers(dict.fromkeys("ab"), ["a"]) == {"a": "b"}


def test_nodes_that_do_not_say_where_they_are_are_not_taken_for_apart() -> None:
    assert assign_peers({"a": "z1", "b": None, "c": "z2"}, ["a"]) == {"a": "c"}


@pytest.mark.parametrize("seed", range(100))
def test_any_cluster_keeps_the_rules(seed: int) -> None:
    draw = random.Random(seed)
    domains = {f"n{index}": draw.choice([None, "x", "y", "z"]) for index in range(draw.randint(1, 9))}
    members = draw.sample(sorted(domains), draw.randint(1, len(domains)))
    leaving = {node for node in domains if draw.random() < 0.2}
    peers = assign_peers(domains, members, leaving=leaving)
    assert set(peers) == set(members)
    for node, peer in peers.items():
        others = set(domains) - leaving - {node}
        assert peer in others if others else peer is None
        apart = {
            o for o in others if domains[o] is not None and domains[node] is not None and domains[o] != domains[node]
        }
        assert not apart or peer in apart
    if len(set(domains.values())) == 1 and not leaving:
        assert max(Counter(peer for peer in peers.values() if peer).values(), default=0) <= 1

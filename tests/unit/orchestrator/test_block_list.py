"""Nodes on which workers fail again and again are not used any more; nobody is left without a node for that."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.block_list import BlockList, NodeFailure
from orchestrator.config import FailureConfig

CONFIG = FailureConfig(max_node_failures=3, node_failures_window_s=3600.0)
SPARE = {"a": True, "b": True}


def test_a_node_that_fails_often_enough_within_the_window_is_blocked_for_good() -> None:
    ledger = BlockList(CONFIG)
    for at_s in (0.0, 3000.0, 3700.0):  # the first one is too old by then
        ledger.note("a", at_s, NodeFailure.WORKER_LOST)
    assert ledger.review(3700.0, SPARE) == {}
    ledger.note("a", 3710.0, NodeFailure.HANG)
    (reason,) = ledger.review(3710.0, SPARE).values()
    assert reason == "3 worker failures within 3600 s (1 hang, 2 worker-lost)"
    assert ledger.review(3710.0, SPARE) == {}, "said once"
    assert ledger.review(99_999.0, SPARE) == {}
    assert list(ledger.blocked) == ["a"]


def test_a_node_that_the_run_cannot_do_without_stays_until_it_can() -> None:
    ledger = BlockList(CONFIG)
    for at_s in range(3):
        ledger.note("a", float(at_s), NodeFailure.NOT_STARTED)
    assert ledger.review(3.0, {"a": False}) == {}
    assert ledger.review(3.0, {"b": True}) == {}, "a node that is gone needs no blocking"
    assert list(ledger.review(4.0, SPARE)) == ["a"]


def test_two_bad_nodes_are_not_blocked_in_one_breath() -> None:
    ledger = BlockList(CONFIG)
    for node in ("a", "b"):
        for _ in range(3):
            ledger.note(node, 0.0, NodeFailure.HANG)
    assert list(ledger.review(0.0, SPARE)) == ["a"]
    assert ledger.review(0.0, {"b": False}) == {}, "its capacity is reckoned without the first"
    assert list(ledger.review(0.0, SPARE)) == ["b"]


def test_no_limit_blocks_nothing() -> None:
    ledger = BlockList(CONFIG.model_copy(update={"max_node_failures": None}))
    for _ in range(9):
        ledger.note("a", 0.0, NodeFailure.HANG)
    assert ledger.review(0.0, SPARE) == {}


def test_a_new_driver_knows_the_nodes_that_earlier_ones_blocked() -> None:
    entries = [{"blocked": {"a": "why"}}, {"number": 3}, {"blocked": {"a": "why", "b": "too"}}, {"blocked": "?"}]
    known = BlockList.from_entries(entries)
    assert known == {"a": "why", "b": "too"}
    assert BlockList(CONFIG, known).blocked == known


def test_a_node_that_an_earlier_driver_lifted_is_not_blocked_again() -> None:
    entries = [{"blocked": {"a": "why", "b": "too"}}, {"blocked": {"b": "too"}}, {"number": 3}]
    assert BlockList.from_entries(entries) == {"b": "too"}
    assert BlockList.from_entries([*entries, {"blocked": {}}]) == {}


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 500), st.sampled_from(NodeFailure)), max_size=60),
    st.integers(1, 5),
)
def test_a_node_is_blocked_exactly_when_its_failures_crowd_together(
    failures: list[tuple[str, float, NodeFailure]], limit: int
) -> None:
    config = FailureConfig(max_node_failures=limit, node_failures_window_s=600.0)
    ledger = BlockList(config)
    now_s, seen = 0.0, {node: list[float]() for node in "abc"}
    expected: set[str] = set()
    for node, gap_s, kind in failures:
        now_s += gap_s
        seen[node] = [*seen[node], now_s]
        ledger.note(node, now_s, kind)
        ledger.review(now_s, dict.fromkeys("abc", True))
        if sum(now_s - at_s <= 600.0 for at_s in seen[node]) >= limit:
            expected.add(node)
        assert set(ledger.blocked) == expected

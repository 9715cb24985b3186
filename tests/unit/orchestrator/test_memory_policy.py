"""What of the memory Tier fits: replicas, own Snapshots alone, or nothing, and the words for it. Pure."""

from __future__ import annotations

import pytest

from orchestrator.memory_policy import GENERATIONS, MemoryFacts, decide_memory
from storage.config import MemoryConfig

GIB = 1 << 30
AUTO = MemoryConfig(mode="auto")


def facts(
    *,
    state_bytes: int | None = 4 * GIB,
    ranks: dict[str, int] | None = None,
    budget: int | dict[str, int] = 100 * GIB,
    peers: dict[str, str | None] | None = None,
) -> MemoryFacts:
    ranks = {"a": 1, "b": 1} if ranks is None else ranks
    return MemoryFacts(
        state_bytes=state_bytes,
        ranks=ranks,
        budgets=dict.fromkeys(ranks, budget) if isinstance(budget, int) else budget,
        peers={"a": "b", "b": "a"} if peers is None else peers,
    )


def test_what_fits_is_replicated_and_the_sizes_are_said() -> None:
    choice = decide_memory(AUTO, facts())
    assert (choice.mode, choice.fits, choice.have_bytes) == ("replicated", True, 100 * GIB)
    assert choice.need_bytes is not None
    assert 2 * GENERATIONS * 2 * GIB < choice.need_bytes < 1.05 * 2 * GENERATIONS * 2 * GIB
    assert choice.reason == "needs 12.19 GiB of 100.00 GiB on the node where it is tightest"


def test_without_room_for_replicas_own_snapshots_stay() -> None:
    choice = decide_memory(AUTO, facts(budget=8 * GIB))
    assert (choice.mode, choice.fits) == ("own-only", False)
    assert choice.reason.startswith("no replicas: Snapshots and replicas need 12.")
    assert "may give 8.00 GiB: checkpoint.memory.max_host_memory is 0.5" in choice.reason


def test_without_room_for_own_snapshots_the_tier_is_off() -> None:
    choice = decide_memory(AUTO, facts(budget=5 * GIB))
    assert (choice.mode, choice.fits) == ("off", False)
    assert choice.have_bytes == 5 * GIB


def test_the_node_where_it_is_tightest_decides() -> None:
    choice = decide_memory(AUTO, facts(ranks={"a": 3, "b": 1}, budget={"a": 13 * GIB, "b": 13 * GIB}))
    # Both hold four ranks' three generations: own and replicas.
    assert (choice.mode, choice.fits) == ("replicated", True)
    tight = decide_memory(AUTO, facts(ranks={"a": 3, "b": 1}, budget={"a": 13 * GIB, "b": 11 * GIB}))
    assert (tight.mode, tight.have_bytes) == ("own-only", 11 * GIB)


def test_a_node_that_takes_replicas_only_is_reckoned_too() -> None:
    given = facts(ranks={"a": 1}, budget={"a": 100 * GIB, "spare": GIB}, peers={"a": "spare"})
    assert decide_memory(AUTO, given).mode == "own-only"


@pytest.mark.parametrize(
    ("config", "given", "words"),
    [
        (MemoryConfig(mode="auto", replicate=False), facts(), "checkpoint.memory.replicate is false"),
        (AUTO, facts(ranks={"a": 2}, peers={"a": None}), "there is no other node for replicas"),
    ],
)
def test_where_there_are_no_replicas_own_snapshots_are_what_was_asked_for(
    config: MemoryConfig, given: MemoryFacts, words: str
) -> None:
    choice = decide_memory(config, given)
    assert (choice.mode, choice.fits) == ("own-only", True)
    assert choice.reason.startswith(f"{words}; needs ")


def test_a_state_of_unknown_size_is_taken_to_fit() -> None:
    choice = decide_memory(AUTO, facts(state_bytes=None, budget=1))
    assert (choice.mode, choice.fits, choice.need_bytes) == ("replicated", True, None)
    assert "not known" in choice.reason


def test_a_keeper_without_memory_turns_the_tier_off() -> None:
    choice = decide_memory(AUTO, facts(budget={"a": GIB, "b": 0}))
    assert (choice.mode, choice.fits) == ("off", False)
    assert "node b has no memory to give" in choice.reason


def test_off_is_off() -> None:
    assert decide_memory(MemoryConfig(mode="off"), facts()).mode == "off"

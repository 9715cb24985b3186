"""Who is in the World and when it parts: pure values."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.config import WorldConfig
from orchestrator.decisions import Keep, Leave
from orchestrator.scaling_policy import (
    GrowthFacts,
    WorkerView,
    choose_members,
    choose_surplus,
    decide_leave,
    growth_gain_s,
    nodes_that_stay,
    nodes_to_admit,
    refuse_size,
    wait_reason,
    workers_that_fit,
)

CONFIG = WorldConfig(min_workers=1, max_workers=3, join_window_s=5.0)
PAYS = GrowthFacts(steps_left=500, step_s=1.0, regroup_s=5.0, num_leaves=12, ready_for_s=0.0, is_someone_starting=False)


def view(
    name: str, *, ready: bool = True, draining: bool = False, member: bool = False, node: str | None = None
) -> WorkerView:
    return WorkerView(
        worker_id=name, node_id=node or f"n-{name}", is_ready=ready, is_draining=draining, is_member=member
    )


def test_members_keep_their_place_and_the_maximum_is_kept() -> None:
    workers = [view("a"), view("b", member=True), view("c", member=True), view("d")]
    assert [w.worker_id for w in choose_members(workers, CONFIG)] == ["b", "c", "a"]


def test_unready_and_draining_workers_are_left_out() -> None:
    workers = [view("a", ready=False), view("b", draining=True), view("c")]
    assert [w.worker_id for w in choose_members(workers, CONFIG)] == ["c"]


def test_a_world_that_shrinks_gives_a_whole_node_back() -> None:
    workers = [view("a", member=True, node="1"), *(view(name, member=True, node="2") for name in "bc")]
    chosen = choose_members(workers, CONFIG.model_copy(update={"max_workers": 2}))
    assert [w.worker_id for w in chosen] == ["b", "c"]


def test_a_warm_spare_takes_a_lost_members_place_at_equal_size() -> None:
    workers = [view("a", member=True), view("b", member=True), view("spare")]  # the third member is gone
    assert len(choose_members(workers, CONFIG)) == CONFIG.max_workers


def test_nodes_that_a_smaller_world_gives_back_do_not_stay_and_those_of_spares_do() -> None:
    """Before the World has begun: who was a member of the last one says nothing."""
    workers = [view(name, member=True) for name in "abcd"]
    assert nodes_that_stay(workers, ["a", "b"], 2) == {"n-a", "n-b"}
    assert nodes_that_stay(workers, ["a", "b"], 3) == {"n-a", "n-b", "n-c"}
    assert nodes_that_stay([*workers[:2], view("c", draining=True), view("d", ready=False)], ["a"], 3) == {
        "n-a",
        "n-b",
        "n-d",
    }


def test_a_notice_for_a_member_parts_the_world_at_once_though_others_are_starting() -> None:
    workers = [view("a", member=True, draining=True), view("b", member=True), view("c", ready=False)]
    decision = decide_leave(workers, CONFIG, replace(PAYS, steps_left=1, is_someone_starting=True))
    assert isinstance(decision, Leave)
    assert decision.cause == "preemption"
    assert {w.worker_id for w in choose_members([*workers, view("d")], CONFIG)} == {"b", "d"}, (
        "who is ready comes along"
    )


def test_joins_within_the_window_are_taken_together() -> None:
    workers = [view("a", member=True), view("b"), view("c", ready=False)]
    starting = replace(PAYS, is_someone_starting=True)
    assert isinstance(decide_leave(workers, CONFIG, replace(starting, ready_for_s=4.9)), Keep)
    assert isinstance(decide_leave(workers, CONFIG, replace(starting, ready_for_s=5.0)), Leave)
    assert isinstance(decide_leave(workers, CONFIG, PAYS), Leave)


def test_nobody_is_waited_for_once_the_world_is_full() -> None:
    workers = [view("a", member=True), view("b", member=True), view("c"), view("spare", ready=False)]
    assert isinstance(decide_leave(workers, CONFIG, replace(PAYS, is_someone_starting=True)), Leave)


def test_a_join_that_costs_more_than_it_gains_waits_as_a_spare_and_says_why() -> None:
    workers = [view("a", member=True), view("b")]
    few = replace(PAYS, steps_left=11)  # nine of them at half the time: 4.5 s for 5 s
    decision = decide_leave(workers, CONFIG, few)
    assert isinstance(decision, Keep)
    assert "would save 4.5 s in the steps left, a regroup costs 5.0 s" in decision.reason
    assert isinstance(decide_leave(workers, CONFIG, replace(few, steps_left=13)), Leave)
    always = CONFIG.model_copy(update={"join_gain_ratio": 0.0})
    assert isinstance(decide_leave(workers, always, few), Leave)
    assert isinstance(decide_leave(workers, always, replace(few, steps_left=2)), Keep), "no step would be left for it"
    assert isinstance(decide_leave(workers, CONFIG, replace(few, is_asked_for=True)), Leave), "a person wants it"


def test_workers_that_make_no_step_faster_do_not_join() -> None:
    workers = [view("a", member=True), view("b", member=True), view("c")]
    decision = decide_leave(workers, CONFIG, replace(PAYS, num_leaves=4))
    assert isinstance(decision, Keep)
    assert "4 leaves a step take 3 workers as many rounds as 2" in decision.reason


def test_growth_waits_until_the_time_of_a_step_is_known() -> None:
    workers = [view("a", member=True), view("b")]
    assert decide_leave(workers, CONFIG, replace(PAYS, step_s=None)) == Keep()


def test_a_full_world_does_not_part_for_a_spare() -> None:
    workers = [view(name, member=True) for name in "abc"] + [view("d")]
    assert decide_leave(workers, CONFIG, PAYS) == Keep()


def test_a_world_larger_than_wanted_parts() -> None:
    workers = [view(name, member=True) for name in "abcd"]
    decision = decide_leave(workers, CONFIG, replace(PAYS, steps_left=1))
    assert decision == Leave(cause="scale", reason="3 workers are wanted, 4 train")


@pytest.mark.parametrize(
    ("old", "new", "leaves", "share"), [(1, 2, 8, 0.5), (2, 3, 4, 0.0), (3, 4, 8, 1 / 3), (2, 4, 4, 0.5), (4, 2, 8, -1)]
)
def test_the_gain_follows_the_rounds_of_leaves(old: int, new: int, leaves: int, share: float) -> None:
    gain = growth_gain_s(steps_left=102, step_s=2.0, num_leaves=leaves, old=old, new=new)
    assert gain == pytest.approx(200 * share)


def test_surplus_workers_are_never_members_and_starting_ones_go_first() -> None:
    workers = [view("a", member=True, node="1"), view("d", node="1"), view("c", node="2"), view("b", ready=False)]
    assert choose_surplus(workers, 4) == ()
    assert choose_surplus(workers, 3) == ("b",)
    assert choose_surplus(workers, 2) == ("b", "c"), "the node without a member is the one to give back"
    assert choose_surplus(workers, 0) == ("b", "c", "d")


def test_nodes_are_taken_as_they_are_needed() -> None:
    assert nodes_to_admit([("a", 4), ("b", 4), ("c", 4)], 6) == {"a": 4, "b": 2}
    assert nodes_to_admit([("a", 0), ("b", 4)], 1) == {"b": 1}
    assert nodes_to_admit([("a", 4)], 0) == {}
    assert nodes_to_admit([("a", 4)], -3) == {}


def test_node_capacity_follows_the_scarcest_resource_and_the_cap() -> None:
    gpu = WorldConfig(resources_per_worker={"CPU": 4, "GPU": 1}, max_workers=8)
    assert workers_that_fit({"CPU": 64.0, "GPU": 8.0}, gpu) == 8
    assert workers_that_fit({"CPU": 10.0, "GPU": 8.0}, gpu) == 2
    assert workers_that_fit({"CPU": 10.0}, gpu) == 0
    capped = WorldConfig(resources_per_worker={"CPU": 1}, max_workers=8, workers_per_node=1)
    assert workers_that_fit({"CPU": 10.0}, capped) == 1


def test_a_size_that_cannot_be_is_refused_with_the_reason() -> None:
    config = WorldConfig(min_workers=2, max_workers=3)
    assert refuse_size(2, config, 8) is None
    assert refuse_size(8, config, 8) is None, "above max_workers: a person may raise it"
    assert "fewer than world.min_workers (2)" in (refuse_size(1, config, 8) or "")
    assert "8 leaves" in (refuse_size(9, config, 8) or "")


def test_the_wait_says_for_what() -> None:
    config = WorldConfig(min_workers=3, max_workers=3, resources_per_worker={"GPU": 1})
    wait = wait_reason(1, 0, config)
    assert (wait.have, wait.need) == (1, 3)
    assert "2 more worker(s), each 1 GPU" in wait.missing
    assert "blocked" not in wait.missing
    assert "2 node(s) are there but blocked" in wait_reason(1, 0, config, 2).missing


# -- whatever comes and goes --------------------------------------------------------------------------------------

WORKERS = st.lists(
    st.builds(
        WorkerView,
        worker_id=st.integers(0, 999).map(lambda n: f"w{n:03d}"),
        node_id=st.sampled_from(["n1", "n2", "n3", "n4"]),
        is_ready=st.booleans(),
        is_draining=st.booleans(),
        is_member=st.booleans(),
    ),
    max_size=12,
    unique_by=lambda worker: worker.worker_id,
)


@given(workers=WORKERS, wanted=st.integers(1, 8), spares=st.integers(0, 3))
def test_after_any_change_the_next_world_is_as_large_as_it_can_be_and_no_larger(
    workers: list[WorkerView], wanted: int, spares: int
) -> None:
    config = WorldConfig(max_workers=wanted, spares=spares)
    chosen = choose_members(workers, config)
    usable = [w for w in workers if w.is_ready and not w.is_draining]
    assert len(chosen) == min(wanted, len(usable))
    assert set(chosen) <= set(usable)
    staying = sum(w.is_member for w in usable)
    assert sum(w.is_member for w in chosen) == min(wanted, staying), "a member is never dropped for a newcomer"
    gone = choose_surplus(workers, wanted + spares)
    assert not {w.worker_id for w in workers if w.is_member or w.is_draining} & set(gone)
    left = [w for w in workers if not w.is_draining and w.worker_id not in gone]
    free = [w for w in left if not w.is_member]
    assert not free or len(left) <= wanted + spares


@given(workers=WORKERS, steps_left=st.integers(0, 200), ready_for_s=st.floats(0, 10), starting=st.booleans())
def test_whatever_is_there_a_world_parts_only_for_a_change_that_it_then_makes(
    workers: list[WorkerView], steps_left: int, ready_for_s: float, starting: bool
) -> None:
    facts = replace(PAYS, steps_left=steps_left, ready_for_s=ready_for_s, is_someone_starting=starting)
    members = {w for w in workers if w.is_member and w.is_ready}
    decision = decide_leave([w for w in workers if w.is_ready or not w.is_member], CONFIG, facts)
    if isinstance(decision, Leave):
        assert set(choose_members(workers, CONFIG)) != members
    if any(w.is_draining for w in members):
        assert isinstance(decision, Leave), "a notice never waits"

"""Who is in the World and when it parts: pure values."""

from __future__ import annotations

from orchestrator.config import WorldConfig
from orchestrator.decisions import Keep, Leave
from orchestrator.scaling_policy import WorkerView, choose_members, decide_leave, wait_reason, workers_that_fit

CONFIG = WorldConfig(min_workers=1, max_workers=3)


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


def test_a_notice_for_a_member_parts_the_world_at_once() -> None:
    workers = [view("a", member=True, draining=True), view("b", member=True)]
    decision = decide_leave(workers, CONFIG, steps_left=1, is_someone_starting=True)
    assert isinstance(decision, Leave)
    assert decision.cause == "preemption"


def test_growth_waits_for_workers_that_are_still_starting_and_for_enough_steps() -> None:
    workers = [view("a", member=True), view("b")]
    assert isinstance(decide_leave(workers, CONFIG, steps_left=50, is_someone_starting=False), Leave)
    assert isinstance(decide_leave(workers, CONFIG, steps_left=50, is_someone_starting=True), Keep)
    assert isinstance(decide_leave(workers, CONFIG, steps_left=2, is_someone_starting=False), Keep)


def test_a_full_world_does_not_part_for_a_spare() -> None:
    workers = [view(name, member=True) for name in "abc"] + [view("d")]
    assert isinstance(decide_leave(workers, CONFIG, steps_left=50, is_someone_starting=False), Keep)


def test_node_capacity_follows_the_scarcest_resource_and_the_cap() -> None:
    gpu = WorldConfig(resources_per_worker={"CPU": 4, "GPU": 1}, max_workers=8)
    assert workers_that_fit({"CPU": 64.0, "GPU": 8.0}, gpu) == 8
    assert workers_that_fit({"CPU": 10.0, "GPU": 8.0}, gpu) == 2
    assert workers_that_fit({"CPU": 10.0}, gpu) == 0
    capped = WorldConfig(resources_per_worker={"CPU": 1}, max_workers=8, workers_per_node=1)
    assert workers_that_fit({"CPU": 10.0}, capped) == 1


def test_the_wait_says_for_what() -> None:
    wait = wait_reason(1, 0, WorldConfig(min_workers=3, max_workers=3, resources_per_worker={"GPU": 1}))
    assert (wait.have, wait.need) == (1, 3)
    assert "2 more worker(s), each 1 GPU" in wait.missing

"""What a preemption notice changes in when Checkpoints are saved, in exact figures on a fake clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.notice_policy import NoticePolicy, why_in_the_way
from orchestrator.save_config import DeadlineConfig, SavePolicyConfig
from orchestrator.save_desk import SaveDesk
from orchestrator.save_facts import ClusterFacts, Notice, Opinion, SaveFacts
from orchestrator.save_times import SaveCost
from orchestrator.weighing import weigh
from storage.config import CheckpointConfig
from tests.fakes.save_facts import cluster, save_facts, save_times
from workers.contract import BoundOrder, OrderKind, StepReport

CONFIG = DeadlineConfig(margin_s=2.0)


def noticed(now_s: float = 100.0, **fields: Any) -> SaveFacts:
    """Told at 100 of a deadline at 200; a save takes 10 s, three steps of 1 s until it begins; nothing was saved."""
    known: dict[str, Any] = {"step_s": 1.0, "saves": (save_times(write_s=10.0, stall_s=0.1),)}
    return save_facts(now_s, **(known | {"noticed_at_s": 100.0, "deadline_at_s": 200.0} | fields))


def opinion(facts: SaveFacts) -> Opinion:
    return NoticePolicy(CONFIG).opinion(facts)


def test_what_was_trained_until_a_notice_is_saved_at_once_where_there_is_time_for_two_saves() -> None:
    said = opinion(noticed())
    assert (said.due_at_s, said.is_pressing) == (100.0, True)
    assert said.why == "preemption notice, 100 s left: there is time for a save before the last one"


@pytest.mark.parametrize(("left_s", "is_asked"), [(28.0, True), (27.9, False), (-1.0, True)])
def test_the_last_save_must_have_its_time_beside_it(left_s: float, is_asked: bool) -> None:
    """Twice three steps and ten seconds, and two of margin. A deadline that is past holds nothing back for good."""
    facts = noticed(200.0 - left_s)
    assert (opinion(facts).due_at_s is not None) is is_asked
    assert (why_in_the_way(facts, CONFIG) is None) is is_asked


@pytest.mark.parametrize(
    "covering",
    [
        {"durable_at_s": 101.0},
        {"durable_at_s": 99.95},  # a save costs more than that work
        {"last_save_at_s": 101.0, "unsettled": 1},
    ],
)
def test_one_save_since_the_notice_is_enough(covering: dict[str, Any]) -> None:
    assert opinion(noticed(110.0, **covering)).due_at_s is None


def test_one_that_came_to_nothing_is_asked_for_again() -> None:
    assert opinion(noticed(110.0, last_save_at_s=101.0, unsettled=0)).due_at_s is not None


@pytest.mark.parametrize("fields", [{"noticed_at_s": None, "deadline_at_s": None}, {"deadline_at_s": None}])
def test_without_a_notice_or_its_deadline_it_asks_for_nothing(fields: dict[str, Any]) -> None:
    assert opinion(noticed(**fields)).due_at_s is None


def test_before_a_save_was_measured_the_size_of_the_state_tells_what_two_take() -> None:
    """2 s and 60 GB at 50 MB/s, of four nodes: 302 s a save, of which there is no time for two."""
    large = cluster(num_nodes=4, state_bytes=60_000_000_000)
    assert opinion(noticed(saves=(), cluster=large, deadline_at_s=600.0)).due_at_s is None
    assert opinion(noticed(saves=(), cluster=large, deadline_at_s=800.0)).due_at_s is not None
    shared = replace(large, num_ranks=32)  # eight on each node write beside each other, as the driver reckons too
    assert opinion(noticed(saves=(), cluster=shared, deadline_at_s=190.0)).due_at_s is not None
    assert opinion(noticed(saves=(), cluster=shared, deadline_at_s=180.0)).due_at_s is None
    unknown = replace(large, state_bytes=None)
    assert opinion(noticed(saves=(), cluster=unknown, deadline_at_s=130.0)).due_at_s is not None


class Pressing:
    name = "pressing"

    def opinion(self, facts: SaveFacts) -> Opinion:
        return Opinion(policy=self.name, due_at_s=facts.now_s, why="says so", is_pressing=True)


def test_no_save_is_ordered_that_the_last_one_would_have_to_wait_for() -> None:
    facts = noticed(180.0)
    assert weigh(facts, [Pressing()], min_interval_s=0.0).wish is not None
    weighed = weigh(facts, [Pressing()], min_interval_s=0.0, deadline=CONFIG)
    assert weighed.wish is None
    assert weighed.held_back == (
        "preemption notice: the last save begins in 5 s at the latest, and would wait for another one"
    )


def report(step: int) -> StepReport:
    return StepReport(
        step=step,
        loss=1.0,
        grad_norm=1.0,
        lr=0.1,
        tokens=1,
        position=step,
        sample_chain="0" * 32,
        step_s=1.0,
        finished_at_s=1e9 + step,
    )


def told(*left_s: float | None) -> ClusterFacts:
    notices = tuple(Notice(node_id=f"n{number}", deadline_in_s=one_s) for number, one_s in enumerate(left_s))
    return ClusterFacts(num_nodes=2, notices=notices)


def test_at_the_desk_a_notice_brings_one_save_and_then_keeps_others_from_the_last_one() -> None:
    desk = SaveDesk(SavePolicyConfig(), CheckpointConfig(), total_steps=10_000)
    desk.begin_attempt(0, 0.0)
    desk.take_steps([report(step) for step in range(1, 21)], 20.0)
    assert desk.consult(20.0) is None
    desk.tell_cluster(told(90.0, 60.0), 20.0)
    wish = desk.consult(20.0)
    assert wish is not None
    assert wish.reason == "deadline: preemption notice, 60 s left: there is time for a save before the last one"
    desk.bound(BoundOrder(number=1, kind=OrderKind.SNAPSHOT, step=23), 20.0)
    desk.take_steps([report(step) for step in range(21, 24)], 23.0)
    cost = SaveCost(stall_s=0.1, encode_s=1.0, upload_s=1.0, commit_s=0.1, stored_bytes=1, raw_bytes=1)
    desk.committed(23, cost, 26.0)
    desk.tell_cluster(told(30.0), 50.0)  # as it is told again each minute
    desk.take_steps([report(step) for step in range(24, 51)], 50.0)
    assert desk.consult(50.0) is None
    desk.begin_attempt(50, 60.0)
    desk.take_steps([report(51)], 61.0)
    assert desk.facts(61.0).noticed_at_s is None, "it was of another World"


def test_at_the_desk_one_notice_without_a_deadline_makes_the_earliest_unknown() -> None:
    desk = SaveDesk(SavePolicyConfig(), CheckpointConfig(), total_steps=10_000)
    desk.tell_cluster(told(90.0, None), 20.0)
    assert (desk.facts(20.0).noticed_at_s, desk.facts(20.0).deadline_at_s) == (20.0, None)
    desk.tell_cluster(told(), 30.0)
    assert (desk.facts(30.0).noticed_at_s, desk.facts(30.0).deadline_at_s) == (None, None)

"""From rank 0's words to the events of saves and what `raysume explain` reads in them: one chain, no ray, no torch."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.committer import Committer
from orchestrator.coordinator import Coordinator
from orchestrator.explain import explain
from orchestrator.patient_store import PatientStore
from orchestrator.recorder import Recorder
from orchestrator.save_config import HazardConfig, SavePolicyConfig
from storage.config import CheckpointConfig
from storage.keys import Attempt
from storage.memory_store import MemoryStore
from tests.fakes.step_reports import step_report
from workers.contract import BoundOrder, ExchangeRequest, Order, OrderKind

ATTEMPT = Attempt(number=3, nonce="0000aaaa")


class Scene:
    """A coordinator on a fake clock, whose Signals become event lines as the driver writes them."""

    def __init__(self, policy: SavePolicyConfig) -> None:
        self.now_s = 0.0
        self.events: list[dict[str, Any]] = [{"event": "run_started", "run_id": "run", "steps": 1000, "is_new": True}]
        store = PatientStore(MemoryStore(), limit_s=60.0, pause=lambda _: None)
        config = CheckpointConfig()
        committer = Committer(
            run_id="run", store=store, config=config, metadata={}, now_utc=lambda: "", monotonic=lambda: self.now_s
        )
        self.coordinator = Coordinator(
            committer=committer,
            store=store,
            config=config,
            policy=policy,
            total_steps=1000,
            monotonic=lambda: self.now_s,
        )
        self.recorder = Recorder(self, start_unix_s=0.0)
        fields = {"restored_step": 0, "restored_from": "none", "cause": "start"}
        self.recorder.attempt_started(ATTEMPT, 2, **fields)
        self.coordinator.begin_attempt(ATTEMPT, world_size=2, base_step=0)

    def emit(
        self, event: str, *, attempt: int | None = None, step: int | None = None, rank: int | None = None, **fields: Any
    ) -> None:
        line = {"event": event, "t_s": self.now_s, "attempt": attempt, "step": step, "rank": rank}
        self.events.append(line | fields)

    def train(self, first: int, last: int, **news: Any) -> Order | None:
        """A second a step."""
        order = None
        for step in range(first, last + 1):
            self.now_s = float(step)
            reports = (step_report(step, step_s=1.0, finished_at_s=float(step)),)
            order = self.coordinator.exchange(ExchangeRequest(attempt=ATTEMPT, reports=reports, **news)).order
            news = {}
        self.recorder.record(self.coordinator.drain_signals())
        return order


def test_who_asked_for_a_save_and_what_the_others_said_is_read_back_from_the_events() -> None:
    scene = Scene(SavePolicyConfig(policies=("hazard", "memory-pressure"), max_at_risk_s=40.0))
    order = scene.train(1, 30)
    assert order is not None
    bound = BoundOrder(number=order.number, kind=OrderKind.SNAPSHOT, step=33)
    scene.train(31, 35, bound=(bound,))
    scene.coordinator.close()
    (answer,) = explain(scene.events, 33).answers
    assert answer.save is not None
    assert (answer.save.policy, answer.save.reason, answer.save.outcome) == ("bounds", order.reason, "under-way")
    weighing = answer.weighing
    assert weighing is not None
    assert (weighing.step, weighing.wish_policy, weighing.wish_reason) == (30, "bounds", order.reason)
    assert (weighing.landed_step, weighing.held_back) == (33, None)
    due = {thought.policy: (thought.due_in_s, thought.is_pressing) for thought in weighing.thoughts}
    assert due["hazard"] == (690.0, False)
    assert due["memory-pressure"] == (None, False)
    assert due["bounds"][0] is not None
    assert due["bounds"][0] <= 0.0


@pytest.mark.parametrize("is_left_out", [True, False])
def test_a_save_that_came_to_nothing_is_made_good_and_does_not_count_as_one_under_way(is_left_out: bool) -> None:
    hazard = HazardConfig(first_interval_s=40.0)
    scene = Scene(SavePolicyConfig(policies=("hazard",), hazard=hazard, max_at_risk_s=None, min_interval_s=30.0))
    order = scene.train(1, 40)
    assert order is not None
    bound = BoundOrder(number=order.number, kind=OrderKind.SNAPSHOT, step=43)
    assert scene.train(41, 50, bound=(bound,), skipped=(43,) if is_left_out else ()) == order
    if not is_left_out:
        scene.coordinator.report_failed(ATTEMPT, 43, 1, "its Keeper is gone")
    assert scene.train(51, 70) == order
    again = scene.train(71, 71)  # the least interval after the one that was lost; else a whole one, at 81
    scene.coordinator.close()
    assert again is not None
    assert again.number > order.number
    assert again.reason.startswith("hazard: 71 s without a commit, ")
    (answer,) = explain(scene.events, 43).answers
    assert answer.save is not None
    assert answer.save.outcome == ("skipped" if is_left_out else "failed")

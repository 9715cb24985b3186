"""What is said about slow nodes, and how long the World keeps clear of them."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.config import FailureConfig, RunConfig, RunSettings, WorldConfig
from orchestrator.decisions import Keep, Leave
from orchestrator.pace import Pace
from orchestrator.scaling_policy import WorkerView
from orchestrator.signals import StepFinished
from orchestrator.slow_node_watch import SlowNodeWatch
from storage.keys import Attempt
from workers.config import DataConfig, ModelConfig
from workers.contract import Member, StepReport, World

NODES = ("a", "b", "c")
SLOW, FAST = (0.3, 0.3, 0.9), (0.3, 0.3, 0.3)


class Bench:
    """A watch over a World of three nodes, its events, and a clock that only the test moves."""

    def __init__(self, min_workers: int = 1, **failure: Any) -> None:
        self.world = WorldConfig(min_workers=min_workers, max_workers=3)
        config = RunConfig(
            run=RunSettings(name="x", url="/nowhere", steps=1000),
            world=self.world,
            model=ModelConfig(config={"model_type": "llama"}),
            data=DataConfig(url="/nowhere", sequence_length=4, global_batch=12, micro_batch=1),
            failure=FailureConfig(**failure),
        )
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.now_s = 0.0
        self.pace = Pace()
        self.watch = SlowNodeWatch(config, self, self.pace, monotonic=lambda: self.now_s)
        self._number = 0
        self.begin()

    def emit(self, event: str, **fields: Any) -> None:
        self.events.append((event, fields))

    def begin(self) -> None:
        self._number += 1
        self.attempt = Attempt(number=self._number, nonce="00000000")
        members = tuple(Member(rank=r, worker_id=f"w{r}", node_id=node) for r, node in enumerate(NODES))
        self.watch.begin(World(attempt=self.attempt, members=members))

    def train(self, compute_s: tuple[float, ...], steps: int = 40, attempt: Attempt | None = None) -> None:
        for step in range(1, steps + 1):
            report = StepReport(
                step=step, loss=1.0, grad_norm=1.0, lr=0.1, tokens=0, position=0, sample_chain="", step_s=1.0,
                finished_at_s=float(step), compute_s=compute_s,
            )  # fmt: skip
            signal = StepFinished(attempt=attempt or self.attempt, report=report)
            self.pace.on_signal(signal)
            self.watch.on_signal(signal)

    def consider(self) -> Keep | Leave:
        views = [
            WorkerView(worker_id=f"w{r}", node_id=node, is_ready=True, is_draining=False, is_member=True)
            for r, node in enumerate(NODES)
        ]
        return self.watch.consider(views, self.world, steps_left=900)


def test_a_slow_node_and_its_recovery_are_events_with_figures() -> None:
    bench = Bench()
    bench.train(SLOW)
    bench.train(FAST)
    (slow, told), (recovered, _) = bench.events
    assert (slow, recovered) == ("node_slow", "node_recovered")
    assert told["node"] == "c"
    assert told["ratio"] == pytest.approx(3.0)
    assert (told["compute_s"], told["others_s"]) == (0.9, 0.3)
    assert told["steps"] >= 12


def test_late_reports_of_an_older_world_say_nothing() -> None:
    bench = Bench()
    older = bench.attempt
    bench.begin()
    bench.train(SLOW, attempt=older)
    assert bench.events == []


def test_by_default_the_world_keeps_a_slow_node() -> None:
    bench = Bench()
    bench.train(SLOW)
    assert isinstance(bench.consider(), Keep)
    assert bench.watch.resting == frozenset()


def test_an_excluded_node_rests_for_as_long_as_configured() -> None:
    bench = Bench(slow_node="exclude", slow_node_rest_s=600.0)
    bench.train(SLOW)
    decision = bench.consider()
    assert isinstance(decision, Leave)
    assert decision.cause == "slow-node"
    assert bench.watch.resting == {"c"}
    bench.now_s = 599.0
    assert bench.watch.resting == {"c"}
    bench.now_s = 600.0
    assert bench.watch.resting == frozenset()


def test_a_resting_node_is_woken_where_too_few_others_are_left() -> None:
    bench = Bench(slow_node="exclude")
    bench.train(SLOW)
    bench.consider()
    bench.watch.wake()
    assert bench.watch.resting == frozenset()


def test_why_a_slow_node_stays_is_said_once() -> None:
    bench = Bench(min_workers=3, slow_node="exclude")
    bench.train(SLOW)
    for _ in range(5):
        assert isinstance(bench.consider(), Keep)
    assert [event for event, _ in bench.events] == ["node_slow", "decision"]
    assert "2 workers would be left" in bench.events[1][1]["reason"]

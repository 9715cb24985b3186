"""The World's size as wanted now, over drivers, and what is said of a World that does not grow."""

from __future__ import annotations

from typing import Any

from orchestrator.config import RunConfig, RunSettings, WorldConfig
from orchestrator.decisions import Keep, Leave
from orchestrator.journal import JournalEntry
from orchestrator.pace import Pace
from orchestrator.scaling_policy import WorkerView
from orchestrator.sizing import SCALE, Sizing
from workers.config import DataConfig, ModelConfig


class SlowPace(Pace):
    """A second a step, ten for a change."""

    step_s = 1.0
    regroup_s = 10.0


class Scene:
    def __init__(self, entries: tuple[JournalEntry, ...] = (), **world: Any) -> None:
        config = RunConfig(
            run=RunSettings(name="r", url="memory://r", steps=100),
            world=WorldConfig(**{"min_workers": 1, "max_workers": 2, **world}),
            model=ModelConfig(),
            data=DataConfig(url="memory://d", sequence_length=8, global_batch=8),
        )
        self.now = 0.0
        self.said: list[dict[str, Any]] = []
        self.sizing = Sizing(config, self, entries, pace=SlowPace(), monotonic=lambda: self.now)

    def emit(self, event: str, **fields: Any) -> None:
        self.said.append({"event": event, **fields})

    def consider(self, *workers: WorkerView, steps_left: int = 100, starting: bool = False, may: bool = True) -> Any:
        return self.sizing.consider(workers, steps_left=steps_left, is_someone_starting=starting, may_change=may)


def worker(name: str, *, member: bool = False, ready: bool = True, draining: bool = False) -> WorkerView:
    return WorkerView(worker_id=name, node_id=name, is_ready=ready, is_draining=draining, is_member=member)


def entry(kind: str, **fields: Any) -> JournalEntry:
    return JournalEntry(sequence=1, kind=kind, time_utc="", fields=fields)


A, B, C = worker("a", member=True), worker("b"), worker("c", ready=False)


def test_spares_are_kept_beside_a_full_world() -> None:
    scene = Scene(spares=2)
    assert scene.sizing.num_workers == 4
    scene.sizing.want(3)
    assert (scene.sizing.world.max_workers, scene.sizing.num_workers) == (3, 5)


def test_a_ready_worker_waits_a_window_for_others_from_when_it_became_ready() -> None:
    scene = Scene(max_workers=3, join_window_s=5.0)
    scene.now = 100.0
    assert isinstance(scene.consider(A, C, starting=True), Keep)
    scene.now = 200.0
    assert isinstance(scene.consider(A, B, C, starting=True), Keep)
    scene.now = 204.0
    assert isinstance(scene.consider(A, B, C, starting=True), Keep)
    scene.now = 205.0
    assert isinstance(scene.consider(A, B, C, starting=True), Leave)


def test_why_a_worker_waits_as_a_spare_is_said_once() -> None:
    scene = Scene()
    for steps_left in (15, 14, 13):
        assert isinstance(scene.consider(A, B, steps_left=steps_left), Keep)
    (said,) = scene.said
    assert (said["event"], said["decision"]) == ("decision", "keep")
    assert "a regroup costs 10.0 s" in said["reason"]


def test_while_the_store_is_away_only_a_notice_parts_the_world() -> None:
    scene = Scene(max_workers=2)
    assert isinstance(scene.consider(A, B, may=False), Keep)
    scene.sizing.want(1)
    both = (A, worker("b", member=True))
    assert isinstance(scene.consider(*both, may=False), Keep)
    assert isinstance(scene.consider(*both), Leave)
    assert isinstance(scene.consider(worker("a", member=True, draining=True), B, may=False), Leave)


def test_what_a_person_wants_is_not_reckoned_up_until_it_is_reached() -> None:
    scene = Scene(accept_joins=False)
    scene.sizing.want(2)
    decision = scene.consider(A, B, steps_left=5)
    assert isinstance(decision, Leave)
    assert decision.cause == "scale"
    scene.sizing.reached()
    assert isinstance(scene.consider(A, B, steps_left=50), Keep)


def test_the_next_driver_keeps_what_was_asked_for_until_the_configuration_changes() -> None:
    asked = entry(SCALE, workers=5, configured=2)
    newer = entry("attempt", number=3)
    assert Scene((asked, newer)).sizing.world.max_workers == 5
    assert Scene((entry(SCALE, workers=7, configured=2), asked)).sizing.world.max_workers == 5
    assert Scene((asked,), max_workers=3).sizing.world.max_workers == 3, "set by hand since"
    assert Scene((entry(SCALE, workers=1, configured=2),), min_workers=2).sizing.world.max_workers == 2
    assert Scene((entry(SCALE, workers="x", configured=2),)).sizing.world.max_workers == 2
    assert Scene().sizing.as_entry(5) == {"workers": 5, "configured": 2}

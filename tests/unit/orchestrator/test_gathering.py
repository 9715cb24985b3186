"""Which nodes are taken, given back and left alone, and what a run that waits says. Nodes and actors are on paper."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.block_list import BlockList, NodeFailure
from orchestrator.config import FailureConfig, RunConfig, RunSettings, WorldConfig
from orchestrator.decisions import Stop
from orchestrator.exit_codes import ExitCode
from orchestrator.gathering import Gathering
from orchestrator.recorder import Recorder
from orchestrator.sizing import Sizing
from orchestrator.slow_node_watch import SlowNodeWatch
from tests.fakes.worker_groups import PaperCluster
from workers.config import DataConfig, ModelConfig


class Scene:
    def __init__(self, patch: pytest.MonkeyPatch, nodes: dict[str, float], **world: Any) -> None:
        self.cluster = PaperCluster(patch, nodes)
        self.config = RunConfig(
            run=RunSettings(name="r", url="memory://r", steps=100),
            world=WorldConfig(**{"min_workers": 1, "max_workers": 2, "start_grace_s": 0.0, "max_wait_s": 0.2, **world}),
            model=ModelConfig(),
            data=DataConfig(url="memory://d", sequence_length=8, global_batch=8),
            failure=FailureConfig(poll_s=0.01),
        )
        self.events: list[dict[str, Any]] = []
        self.recorder = Recorder(self, start_unix_s=0.0)
        self.sizing = Sizing(self.config, self.recorder)
        self.stop: Stop | None = None
        self.gathering = Gathering(
            config=self.config,
            sizing=self.sizing,
            slow_nodes=SlowNodeWatch(self.config, self.recorder, self.sizing.pace),
            block_list=BlockList(self.config.failure),
            group=self.cluster.group,
            watcher=self.cluster,  # type: ignore[arg-type]
            recorder=self.recorder,
            take_signals=lambda: None,
            asked_to_stop=lambda: self.stop,
        )

    def emit(self, event: str, **fields: Any) -> None:
        self.events.append({"event": event, **fields})

    def named(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == name]

    def settle(self) -> None:
        for _ in range(4):
            self.gathering.tick()

    def train(self) -> list[str]:
        """Form a World and let it make a step; returns its members' nodes."""
        members = self.gathering.members(wait_for_more=False)
        assert not isinstance(members, Stop)
        self.cluster.train_on(*(member.worker_id for member in members))
        self.recorder.steps_this_attempt = 1
        return sorted(member.node_id for member in members)


def test_only_as_many_nodes_are_taken_as_workers_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, {"a": 1.0, "b": 4.0, "c": 1.0}, max_workers=2)
    scene.settle()
    assert scene.cluster.workers() == ["a", "b"]
    assert scene.cluster.held == {"a": 1, "b": 1}


def test_spares_are_started_beside_the_world_and_replaced_when_used(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, {"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0}, max_workers=2, spares=1)
    scene.settle()
    assert scene.cluster.workers() == ["a", "b", "c"]
    assert scene.train() == ["a", "b"]
    scene.gathering.lose_node("a")
    assert scene.train() == ["b", "c"], "at equal size, at once"
    scene.settle()
    assert scene.cluster.workers() == ["b", "c", "d"], "and another spare"


def test_growing_takes_further_nodes_and_room_on_those_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, {"a": 4.0}, max_workers=2)
    scene.settle()
    scene.sizing.want(3)
    scene.settle()
    assert scene.cluster.workers() == ["a", "a", "a"]
    scene.cluster.nodes["b"] = 1.0
    scene.sizing.want(5)
    scene.settle()
    assert scene.cluster.workers() == ["a", "a", "a", "a", "b"]
    assert scene.cluster.held == {"a": 4, "b": 1}


def test_shrinking_gives_the_nodes_back_once_the_smaller_world_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, {"a": 1.0, "b": 1.0, "c": 2.0}, max_workers=4)
    scene.settle()
    assert scene.train() == ["a", "b", "c", "c"]
    scene.sizing.want(2)
    scene.settle()
    assert len(scene.cluster.workers()) == 4, "nobody takes a member out of a World"
    scene.recorder.steps_this_attempt = 0
    assert scene.train() == ["c", "c"]
    scene.recorder.steps_this_attempt = 0
    scene.settle()
    assert scene.cluster.held == {"a": 1, "b": 1, "c": 2}, "the new World may be reading from them"
    scene.recorder.steps_this_attempt = 1
    scene.settle()
    assert scene.cluster.workers() == ["c", "c"]
    assert scene.cluster.held == {"a": 0, "b": 0, "c": 2}
    assert scene.cluster.group.known_nodes() == {"c"}
    scene.sizing.want(3)
    scene.settle()
    assert len(scene.cluster.workers()) == 3


def test_the_size_of_the_state_is_told_by_the_members_that_are_still_there(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, {"a": 1.0, "b": 1.0})
    scene.train()
    group = scene.cluster.group
    members = [view.worker_id for view in group.views(frozenset())]
    assert group.state_bytes(members) is None
    for worker_id in members:
        worker = group.worker(worker_id)
        assert worker.facts is not None
        worker.facts = replace(worker.facts, state_bytes=7)
    scene.gathering.lose_node("a")
    assert group.state_bytes(members) == 7


def test_a_draining_node_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, {"a": 1.0, "b": 1.0, "c": 1.0}, max_workers=2)
    scene.settle()
    scene.train()
    scene.cluster.drained.add("a")
    scene.settle()
    assert scene.cluster.workers() == ["a", "b", "c"]
    assert scene.train() == ["b", "c"]


def test_a_node_that_cannot_be_taken_in_is_tried_last(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, {"a": 1.0, "b": 1.0}, max_workers=1)
    scene.cluster.unreachable.add("a")
    scene.settle()
    assert scene.cluster.workers() == ["b"]


def test_a_node_on_which_workers_do_not_start_is_blocked_and_another_one_used(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, {"a": 1.0, "b": 1.0, "c": 1.0}, max_workers=2)
    scene.cluster.failing["a"] = 99
    for _ in range(3):
        scene.settle()
    assert scene.cluster.workers() == ["b", "c"]
    (blocked,) = scene.named("node_blocked")
    assert (blocked["node"], blocked["reason"]) == ("a", "3 worker failures within 3600 s (3 not-started)")
    assert scene.gathering.blocked == {"a": blocked["reason"]}
    assert scene.cluster.held["a"] == 0
    assert scene.train() == ["b", "c"]


def test_a_node_that_keeps_failing_under_members_is_blocked_unless_the_run_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch, {"a": 1.0, "b": 1.0}, min_workers=2, max_workers=2)
    scene.settle()
    for _ in range(5):
        scene.gathering.note_failures([("a", NodeFailure.WORKER_LOST)])
    assert scene.gathering.blocked == {}
    scene.cluster.nodes["c"] = 1.0
    scene.gathering.note_failures([("a", NodeFailure.HANG)])
    assert list(scene.gathering.blocked) == ["a"]
    assert scene.train() == ["b", "c"]


def test_failures_on_nodes_with_a_notice_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, {"a": 1.0, "b": 1.0, "c": 1.0})
    scene.settle()
    scene.cluster.drained.add("a")
    for _ in range(5):
        scene.gathering.note_failures([("a", NodeFailure.WORKER_LOST), ("gone", NodeFailure.WORKER_LOST)])
    assert scene.gathering.blocked == {}


def test_a_run_below_its_minimum_says_for_what_it_waits_and_goes_on_when_a_node_joins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch, {"a": 1.0}, min_workers=2, max_workers=2)
    stop = scene.gathering.members(wait_for_more=False)
    assert isinstance(stop, Stop)
    assert stop.exit_code is ExitCode.BELOW_MINIMUM
    (waiting,) = scene.named("waiting")
    assert (waiting["have"], waiting["need"]) == (1, 2)
    assert waiting["missing"] == "1 more worker(s), each 1 CPU (1 ready)"
    scene.cluster.nodes["b"] = 1.0
    assert scene.train() == ["a", "b"]


def test_a_run_that_has_only_blocked_nodes_left_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, {"a": 1.0, "b": 1.0})
    scene.settle()
    for _ in range(3):
        scene.gathering.note_failures([("a", NodeFailure.WORKER_LOST)])
    del scene.cluster.nodes["b"]
    stop = scene.gathering.members(wait_for_more=False)
    assert isinstance(stop, Stop)
    assert "1 node(s) are there but blocked" in stop.reason


def test_a_stop_waits_for_another_world_only_while_work_is_in_memory_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, {"a": 1.0, "b": 1.0}, min_workers=2)
    scene.settle()
    scene.stop = Stop(exit_code=ExitCode.STOPPED, reason="stopped on request")
    assert scene.gathering.members(wait_for_more=False) == scene.stop
    members = scene.gathering.members(wait_for_more=False, is_unsaved=True)
    assert not isinstance(members, Stop)
    assert len(members) == 2
    scene.stop = Stop(exit_code=ExitCode.REFUSED, reason="another driver")
    assert scene.gathering.members(wait_for_more=False, is_unsaved=True) == scene.stop
    scene.gathering.lose_node("b")
    scene.stop = Stop(exit_code=ExitCode.STOPPED, reason="stopped on request")
    assert scene.gathering.members(wait_for_more=False, is_unsaved=True) == scene.stop, "there is no other World"


def test_once_every_node_has_a_notice_and_the_last_save_is_over_nobody_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch, {"a": 1.0, "b": 1.0, "head": 0.0}, max_wait_s=3600.0)
    scene.train()
    scene.cluster.drained |= {"a", "b"}
    looks: list[float] = []

    def is_save_over(waited_s: float) -> bool:
        looks.append(waited_s)
        return len(looks) == 3

    stop = scene.gathering.members(wait_for_more=False, is_save_over=is_save_over)
    assert isinstance(stop, Stop)
    assert stop.exit_code is ExitCode.BELOW_MINIMUM
    assert stop.reason.startswith("every node that could hold a worker has a preemption notice: 1 more worker(s)")
    assert len(looks) == 3, "the save was waited for"


def test_where_too_few_nodes_stay_what_is_in_memory_alone_is_saved_by_a_world_of_all_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch, {"a": 1.0, "b": 1.0, "c": 1.0}, max_workers=3, min_workers=2)
    assert scene.train() == ["a", "b", "c"]
    scene.cluster.drained |= {"a", "b"}
    members = scene.gathering.members(wait_for_more=False, is_unsaved=True)
    assert not isinstance(members, Stop), "two of the three that hold the state would be gone before others come"
    assert [member.node_id for member in members] == ["a", "b", "c"]
    assert scene.named("waiting") == [], "nobody is waited for"
    stop = scene.gathering.members(wait_for_more=False)
    assert isinstance(stop, Stop), "what is saved is not saved again"
    assert "(world.max_wait_s)" in stop.reason


def test_where_every_node_goes_what_is_in_memory_alone_is_saved_by_a_world_of_them_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch, {"a": 1.0, "b": 1.0}, max_wait_s=3600.0)
    assert scene.train() == ["a", "b"]
    scene.cluster.drained |= {"a", "b"}
    again = scene.gathering.members(wait_for_more=False, is_unsaved=True, is_save_over=lambda _: True)
    assert not isinstance(again, Stop), "steps that only memory holds go with the nodes"
    assert [member.node_id for member in again] == ["a", "b"]
    (told,) = [event["reason"] for event in scene.named("decision")]
    assert told.startswith("notices leave too few workers, and the last steps are in memory alone")
    stop = scene.gathering.members(wait_for_more=False, is_unsaved=True, is_save_over=lambda _: True)
    assert isinstance(stop, Stop), "it could not save, and could not a second time"
    scene.cluster.dead.add("b")
    fewer = scene.gathering.members(wait_for_more=False, is_unsaved=True, is_save_over=lambda _: True)
    assert not isinstance(fewer, Stop), "the others may"
    assert [member.node_id for member in fewer] == ["a"]


@pytest.mark.parametrize("was_in_last_world", [True, False])
def test_only_nodes_of_the_last_world_that_went_with_a_notice_say_that_nobody_comes(
    monkeypatch: pytest.MonkeyPatch, was_in_last_world: bool
) -> None:
    scene = Scene(monkeypatch, {"a": 1.0})
    scene.train()
    if not was_in_last_world:
        scene.cluster.nodes["b"] = 1.0
        scene.gathering.lose_node("a")
        assert scene.train() == ["b"]
    scene.cluster.drained.add("a")
    scene.cluster.dead |= scene.cluster.nodes.keys()
    stop = scene.gathering.members(wait_for_more=False, is_save_over=lambda _: True)
    assert isinstance(stop, Stop)
    beginning = "every node that could hold a worker" if was_in_last_world else "waited 0 s (world.max_wait_s)"
    assert stop.reason.startswith(beginning)


def test_a_node_without_a_notice_is_waited_for_although_all_others_go(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, {"a": 1.0})
    scene.train()
    scene.cluster.drained.add("a")
    scene.cluster.nodes["new"] = 1.0
    members = scene.gathering.members(wait_for_more=False, is_save_over=lambda _: True)
    assert not isinstance(members, Stop)
    assert [member.node_id for member in members] == ["new"]


def test_a_blocked_node_is_used_again_once_every_other_one_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one on which the workers that were to join ran out of memory, when there were enough others."""
    scene = Scene(monkeypatch, {"a": 1.0, "b": 1.0, "c": 1.0}, max_wait_s=5.0)
    scene.cluster.failing["c"] = 3
    scene.cluster.nodes |= {"a": 0.0}  # until the joiners have failed
    for _ in range(3):
        scene.settle()
    assert list(scene.gathering.blocked) == ["c"]
    scene.cluster.nodes |= {"a": 1.0}
    assert scene.train() == ["a", "b"]
    scene.cluster.drained |= {"a", "b"}
    members = scene.gathering.members(wait_for_more=False, is_save_over=lambda _: True)
    assert not isinstance(members, Stop), "other nodes would do"
    assert [member.node_id for member in members] == ["c"]
    ((told, node),) = [(event["reason"], event["node"]) for event in scene.named("decision")]
    why = "3 worker failures within 3600 s (3 not-started)"
    assert (node, told) == ("c", f"node c is used again, as every other one has a preemption notice: {why}")


def test_a_node_that_was_judged_lost_is_waited_for_while_ray_lists_it(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, {"a": 1.0, "b": 1.0})
    scene.train()
    scene.gathering.lose_node("b")
    scene.cluster.drained.add("a")
    stop = scene.gathering.members(wait_for_more=False, is_save_over=lambda _: True)
    assert isinstance(stop, Stop)
    assert "(world.max_wait_s)" in stop.reason
    scene.cluster.dead.add("b")
    stop = scene.gathering.members(wait_for_more=False, is_save_over=lambda _: True)
    assert isinstance(stop, Stop)
    assert stop.reason.startswith("every node that could hold a worker")


@pytest.mark.parametrize("drained", [{"a"}, set()])
def test_without_a_notice_for_every_node_a_run_below_its_minimum_waits_as_long_as_it_may(
    monkeypatch: pytest.MonkeyPatch, drained: set[str]
) -> None:
    scene = Scene(monkeypatch, {"a": 1.0, "b": 1.0}, min_workers=3, max_workers=3)
    scene.cluster.drained |= drained
    stop = scene.gathering.members(wait_for_more=False, is_save_over=lambda _: True)
    assert isinstance(stop, Stop)
    assert stop.reason.startswith("waited 0 s (world.max_wait_s)")


def test_fresh_processes_take_the_place_of_a_worlds_and_are_waited_for_as_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch, {"a": 1.0, "b": 1.0, "c": 1.0}, max_workers=2, spares=1, start_grace_s=60.0)
    scene.settle()
    assert scene.train() == ["a", "b"]
    scene.cluster.group.put_off_starts(60.0)
    scene.cluster.failing = {"a": 1, "b": 1}
    scene.gathering.replace_members("they came to nothing")
    assert scene.train() == ["a", "b"], "the spare alone is not enough"
    (event,) = scene.named("workers_replaced")
    assert (event["workers"], event["reason"]) == (["w001-a", "w002-b"], "they came to nothing")
    fresh = {view.worker_id for view in scene.cluster.group.views(frozenset()) if view.is_member}
    assert not fresh & set(event["workers"])
    for worker_id in fresh:
        scene.cluster.group.remove_worker(worker_id)
    scene.cluster.failing = {"a": 1, "b": 1}
    assert scene.train() == ["c"], "who lost members goes on at once, as ever"

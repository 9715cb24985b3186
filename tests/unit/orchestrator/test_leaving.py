"""When a World is told to leave, and by which Order, on a fake clock. Workers are on paper."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from orchestrator.config import FailureConfig, RunConfig, RunSettings, WorldConfig
from orchestrator.deadline_policy import SaveForecast
from orchestrator.decisions import Stop
from orchestrator.exit_codes import ExitCode
from orchestrator.heartbeats import Hang
from orchestrator.leaving import Leaving
from orchestrator.pace import Pace
from orchestrator.recorder import Recorder
from orchestrator.save_config import DeadlineConfig, SavePolicyConfig
from orchestrator.sizing import Sizing
from orchestrator.slow_node_watch import SlowNodeWatch
from orchestrator.states import State
from storage.keys import Attempt
from tests.fakes.worker_groups import PaperCluster
from workers.config import DataConfig, ModelConfig
from workers.contract import Heartbeat, Member, OrderKind, Phase, World

ATTEMPT = Attempt(number=1, nonce="abcd1234")
NOTICE_AT_S = 1_000_000.0
POLL_S, STEP_S = 0.25, 1.0


class SteadyPace(Pace):
    step_s = STEP_S
    regroup_s = 5.0


class Scene:
    """Two workers on two nodes that train in steps of a second; a save takes ``save_s``, four fifths of it upload."""

    def __init__(self, patch: pytest.MonkeyPatch, *, save_s: float = 3.0) -> None:
        self.cluster = PaperCluster(patch, {"a": 1.0, "b": 1.0})
        group = self.cluster.group
        for node in "ab":
            group.admit(node, 1)
        group.reconcile(2, frozenset())
        views = group.views(frozenset())
        group.set_members([view.worker_id for view in views])
        members = tuple(Member(rank=r, worker_id=v.worker_id, node_id=v.node_id) for r, v in enumerate(views))
        self.world = World(attempt=ATTEMPT, members=members)
        self.now_s = NOTICE_AT_S
        self.events: list[dict[str, Any]] = []
        self.orders: list[tuple[float, OrderKind, str]] = []
        self.moves: list[State] = []
        self.kind = OrderKind.LEAVE
        self.stop: Stop | None = None
        self.phase = Phase.TRAINING
        self.is_formed = True
        self.recorder = Recorder(self, start_unix_s=0.0)
        self.recorder.steps_this_attempt = 5
        config = RunConfig(
            run=RunSettings(name="r", url="memory://r", steps=1000),
            world=WorldConfig(max_workers=2),
            model=ModelConfig(),
            data=DataConfig(url="memory://d", sequence_length=8, global_batch=8),
            policy=SavePolicyConfig(deadline=DeadlineConfig(margin_s=2.0)),
            failure=FailureConfig(poll_s=POLL_S, leaving_s=30.0),
        )
        self.sizing = Sizing(config, self.recorder, pace=SteadyPace())
        forecast = SaveForecast(full_s=save_s, bounded_s=save_s * 0.7, is_measured=True)
        self.leaving = Leaving(
            world=self.world,
            group=group,
            coordinator=self,
            config=config,
            sizing=self.sizing,
            slow_nodes=SlowNodeWatch(config, self.recorder, self.sizing.pace),
            recorder=self.recorder,
            draining=lambda: self.cluster.view().draining(),
            notices=lambda: self.cluster.view().notices(),
            asked_to_stop=lambda: self.stop,
            is_store_away=lambda: False,
            part_kind=lambda: self.kind,
            forecast=lambda: forecast,
            move=self.moves.append,
            monotonic=lambda: self.now_s,
            wall_clock=lambda: self.now_s,
        )

    def submit_leave(self, reason: str, kind: OrderKind) -> int:
        self.orders.append((self.now_s - NOTICE_AT_S, kind, reason))
        return 1

    def emit(self, event: str, **fields: Any) -> None:
        self.events.append({"event": event, **fields})

    def notice(self, node: str, in_s: float | None) -> None:
        self.cluster.drained.add(node)
        self.cluster.deadlines[node] = 0.0 if in_s is None else NOTICE_AT_S + in_s

    def beats(self) -> dict[str, Heartbeat | None]:
        return {
            member.worker_id: Heartbeat(
                worker_id=member.worker_id, attempt=ATTEMPT, phase=self.phase, step=5, age_s=0.0
            )
            for member in self.world.members
        }

    def look(self) -> None:
        self.leaving.consider(self.beats(), is_formed=self.is_formed)

    def late(self, ended: Collection[str] = (), *, has_stepped: bool = True) -> tuple[Hang, ...]:
        return self.leaving.late(self.beats(), ended, has_stepped=has_stepped)

    def run_until_ordered(self, limit_s: float = 3600.0) -> tuple[float, OrderKind, str]:
        while not self.orders and self.now_s < NOTICE_AT_S + limit_s:
            self.look()
            self.now_s += POLL_S
        assert len(self.orders) == 1
        return self.orders[0]

    def decisions(self) -> list[str]:
        return [event["decision"] for event in self.events if event["event"] == "decision"]


def test_a_notice_of_ten_seconds_in_the_middle_of_a_step_leaves_room_for_the_save_and_for_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten, less three steps to the boundary, three for the save, two of margin and four looks of a quarter: one."""
    scene = Scene(monkeypatch)
    scene.notice("a", 10.0)
    at_s, kind, reason = scene.run_until_ordered()
    assert (at_s, kind) == (1.0, OrderKind.LEAVE)
    assert reason == (
        "preemption notice for node a: deadline in 9.0 s, a save takes 3.0 s, the next boundary that an order can meet "
        "is 3.0 s away, margin 2 s: leaving now"
    )
    assert scene.decisions() == ["keep", "leave"]
    assert "leaving at the latest in 2.0 s" in scene.events[0]["reason"]
    assert scene.leaving.leave is not None
    assert (scene.leaving.leave.cause, scene.leaving.deadline_at_s()) == ("preemption", NOTICE_AT_S + 10.0)
    assert scene.moves == [State.LEAVING]


def test_an_evaluation_under_way_is_no_reason_to_leave_earlier_or_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """An Order cuts it short, but must be given for that."""
    scene = Scene(monkeypatch)
    scene.phase = Phase.EVALUATING
    scene.notice("a", 10.0)
    assert scene.run_until_ordered()[:2] == (1.0, OrderKind.LEAVE)


@pytest.mark.parametrize("phase", [Phase.FORMING, Phase.LOADING, Phase.COMPILING])
def test_before_the_first_step_the_order_is_given_at_once_and_leaving_is_not_timed_yet(
    monkeypatch: pytest.MonkeyPatch, phase: Phase
) -> None:
    scene = Scene(monkeypatch)
    scene.phase, scene.is_formed = phase, phase is Phase.COMPILING
    scene.recorder.steps_this_attempt = 0
    scene.notice("a", 10.0)
    assert scene.run_until_ordered()[:2] == (0.0, OrderKind.LEAVE)
    scene.now_s += 100.0
    assert scene.late(has_stepped=False) == (), "it may still be loading"
    scene.leaving.note_first_step()
    scene.now_s += 30.0 + 3 * STEP_S
    assert scene.late() == (), "failure.leaving_s, from the step that the Order lands on"
    scene.now_s += 1.0
    ended = scene.world.members[0].worker_id
    (late,) = scene.late({ended})
    assert late.worker_id == scene.world.members[1].worker_id


def test_with_too_little_time_for_any_save_nothing_is_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, save_s=8.0)
    scene.notice("a", 5.0)
    at_s, kind, reason = scene.run_until_ordered()
    assert (at_s, kind) == (0.0, OrderKind.LEAVE_BOUNDED)
    assert reason.endswith("even that may come too late")


def test_the_bounded_form_is_ordered_where_only_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, save_s=8.0)
    scene.notice("a", 12.0)
    at_s, kind, reason = scene.run_until_ordered()
    assert (at_s, kind) == (0.0, OrderKind.LEAVE_BOUNDED)
    assert reason.endswith("its bounded form 5.6 s: leaving now in that form")


@pytest.mark.parametrize("in_s", [None, -1.0])
def test_an_unknown_deadline_and_one_that_is_past_are_left_at_once(
    monkeypatch: pytest.MonkeyPatch, in_s: float | None
) -> None:
    scene = Scene(monkeypatch)
    scene.notice("a", in_s)
    assert scene.run_until_ordered()[0] == 0.0


def test_the_earliest_deadline_counts_and_an_unknown_one_is_earliest(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.notice("a", 100.0)
    scene.look()
    scene.notice("b", 10.0)
    assert scene.run_until_ordered()[0] == 1.0
    other = Scene(monkeypatch)
    other.notice("a", 100.0)
    other.notice("b", None)
    assert other.run_until_ordered()[0] == 0.0


def test_what_memory_can_hand_over_is_handed_over_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.kind = OrderKind.PART
    scene.notice("a", 1000.0)
    assert scene.run_until_ordered()[:2] == (0.0, OrderKind.PART)


def test_memory_that_can_hand_over_later_is_used_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when every node was to go and another one has come."""
    scene = Scene(monkeypatch)
    scene.notice("a", 1000.0)
    scene.look()
    assert scene.orders == []
    scene.kind = OrderKind.PART
    scene.look()
    assert [order[1] for order in scene.orders] == [OrderKind.PART]


def test_ranks_that_wait_for_data_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.phase = Phase.WAITING_FOR_DATA
    scene.notice("a", 1000.0)
    assert scene.run_until_ordered()[0] == 0.0


def test_a_notice_for_a_node_outside_the_world_concerns_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.cluster.nodes["c"] = 1.0
    scene.notice("c", None)
    scene.look()
    assert scene.orders == []


def test_a_world_that_is_to_shrink_anyway_does_not_stay_for_a_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.notice("a", 1000.0)
    scene.sizing.want(1)
    assert scene.run_until_ordered()[0] == 0.0


def test_a_persons_stop_comes_first_and_is_ordered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.notice("a", 1000.0)
    scene.look()
    scene.stop = Stop(exit_code=ExitCode.STOPPED, reason="stopped on request")
    scene.look()
    scene.look()
    assert [(kind, reason) for _, kind, reason in scene.orders] == [(OrderKind.LEAVE, "stopped on request")]
    assert scene.leaving.stop == scene.stop


@pytest.mark.parametrize(
    ("in_s", "kind"), [(100.0, OrderKind.LEAVE), (9.0, OrderKind.LEAVE), (7.5, OrderKind.LEAVE_BOUNDED)]
)
def test_a_stop_of_a_driver_whose_nodes_go_saves_in_the_form_that_fits(
    monkeypatch: pytest.MonkeyPatch, in_s: float, kind: OrderKind
) -> None:
    scene = Scene(monkeypatch)
    scene.notice("a", in_s)
    scene.stop = Stop(exit_code=ExitCode.STOPPED, reason="stopped on request")
    assert scene.run_until_ordered() == (0.0, kind, "stopped on request")


@pytest.mark.parametrize("is_stop", [False, True])
def test_nobody_is_taken_for_hanging_while_data_is_awaited_unless_the_run_is_to_stop(
    monkeypatch: pytest.MonkeyPatch, is_stop: bool
) -> None:
    """That wait has a limit of its own, which may be half an hour: a person who stops the run does not wait for it."""
    scene = Scene(monkeypatch)
    if is_stop:
        scene.stop = Stop(exit_code=ExitCode.STOPPED, reason="stopped on request")
    else:
        scene.notice("a", None)
    scene.look()
    scene.phase = Phase.WAITING_FOR_DATA
    assert scene.late() == ()
    scene.now_s += 1000.0
    assert len(scene.late()) == (2 if is_stop else 0)
    scene.phase = Phase.TRAINING
    scene.now_s += 30.0
    assert len(scene.late()) == (2 if is_stop else 0)


def test_a_stop_that_comes_after_the_order_is_not_held_up_by_data_that_do_not_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch)
    scene.notice("a", None)
    scene.look()
    scene.phase = Phase.WAITING_FOR_DATA
    assert scene.late() == ()
    scene.now_s += 1000.0
    assert scene.late() == ()
    scene.stop = Stop(exit_code=ExitCode.STOPPED, reason="stopped on request")
    assert scene.late() == (), "from now on its time passes"
    scene.now_s += 34.0
    assert len(scene.late()) == 2


def test_the_time_for_leaving_does_not_pass_while_a_member_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.notice("a", None)
    scene.look()
    scene.now_s += 30.0

    for _ in range(5):
        scene.phase = Phase.CHECKPOINTING
        assert scene.late() == ()
        scene.now_s += 100.0
    scene.phase = Phase.LEAVING
    assert scene.late() == (), "it has saved until a moment ago"
    scene.now_s += 3 * STEP_S
    assert scene.late() == ()
    scene.now_s += 1.0
    assert len(scene.late()) == 2
    scene.phase = Phase.CHECKPOINTING
    first, second = (member.worker_id for member in scene.world.members)
    assert scene.late({first, second}) == (), "nobody is left"
    assert scene.late() == ()


def test_the_last_word_of_a_member_that_has_ended_keeps_no_other_from_being_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch)
    scene.notice("a", None)
    scene.look()
    ended, other = (member.worker_id for member in scene.world.members)
    beats = scene.beats()
    saving = Heartbeat(worker_id=ended, attempt=ATTEMPT, phase=Phase.CHECKPOINTING, step=5, age_s=0.0)
    scene.now_s += 30.0 + 3 * STEP_S + 1.0
    (late,) = scene.leaving.late(beats | {ended: saving}, {ended}, has_stepped=True)
    assert late.worker_id == other

"""One Attempt, watched: a World that breaks as it begins. Workers are on paper, Ray is not asked."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from orchestrator import attempt_run
from orchestrator.attempt_run import AttemptEnd, AttemptRun, Broken, Left
from orchestrator.config import RunConfig, RunSettings, WorldConfig
from orchestrator.deadline_policy import SaveForecast
from orchestrator.failure_policy import FaultKind
from orchestrator.fencing import Reckoning
from orchestrator.leaving import Leaving
from orchestrator.recorder import Recorder
from orchestrator.sizing import Sizing
from orchestrator.slow_node_watch import SlowNodeWatch
from orchestrator.states import State
from orchestrator.vital_signs import VitalSigns
from storage.keys import Attempt
from tests.fakes.worker_groups import PaperCluster
from workers.config import DataConfig, ModelConfig
from workers.contract import (
    AttemptSpec,
    CauseKind,
    FailureCause,
    Member,
    OrderKind,
    Outcome,
    OutcomeKind,
    World,
)


class _Coordinator:
    actor = None

    def submit_leave(self, reason: str, kind: OrderKind) -> int:
        raise AssertionError(f"nobody was to order {kind.name}: {reason}")


class Scene:
    """A World of one worker on node ``a``, and the run that watches it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.group = PaperCluster(patch, {"a": 1.0}).group
        self.group.admit("a", 1)
        self.group.reconcile(1, frozenset())
        (worker,) = self.group.views(frozenset())
        self.worker_id = worker.worker_id
        member = Member(rank=0, worker_id=self.worker_id, node_id="a")
        self.world = World(attempt=Attempt(number=3, nonce="abcd1234"), members=(member,))
        self.events: list[str] = []
        config = RunConfig(
            run=RunSettings(name="r", url="memory://r", steps=100),
            world=WorldConfig(),
            model=ModelConfig(),
            data=DataConfig(url="memory://d", sequence_length=8, global_batch=8),
        )
        recorder = Recorder(self, start_unix_s=0.0)
        sizing = Sizing(config, recorder)
        self.living = frozenset({"a", "b"})
        self.noticed: frozenset[str] = frozenset()
        self.moves: list[State] = []
        leaving = Leaving(
            world=self.world,
            group=self.group,
            coordinator=_Coordinator(),
            config=config,
            sizing=sizing,
            slow_nodes=SlowNodeWatch(config, recorder, sizing.pace),
            recorder=recorder,
            draining=frozenset,
            notices=dict,
            asked_to_stop=lambda: None,
            is_store_away=lambda: False,
            part_kind=lambda: OrderKind.LEAVE,
            forecast=lambda: SaveForecast(full_s=1.0, bounded_s=None, is_measured=False),
            move=lambda _: None,
        )
        self._run = AttemptRun(
            world=self.world,
            group=self.group,
            coordinator=_Coordinator(),  # type: ignore[arg-type]
            config=config,
            leaving=leaving,
            recorder=recorder,
            tick=lambda: None,
            noticed=lambda: self.noticed,
            living=lambda: self.living,
            move=self.moves.append,
        )

    def emit(self, event: str, **_: Any) -> None:
        self.events.append(event)

    def run(self) -> AttemptEnd:
        spec = AttemptSpec(
            run_id="r", world=self.world, rank=0, store_host="h", store_port=1, group_timeout_s=1.0, restore=None
        )
        try:
            return self._run.run({self.worker_id: spec})
        finally:
            self.group.lifelines.close()


def test_a_member_that_is_lost_while_the_world_is_prepared_breaks_it_and_not_the_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its node is let go by the books that are kept while the restore is planned."""
    scene = Scene(monkeypatch)
    scene.group.forget_node("a")
    scene.living = frozenset({"b"})
    end = scene.run()
    assert isinstance(end, Broken)
    assert (end.fault.kind, end.facts.lost_nodes) == (FaultKind.NODE_LOST, ("a",))
    assert scene.events == ["fault", "attempt_ended"]


@pytest.mark.parametrize(("owed_s", "events"), [(1.0, []), (6.0, ["worker_silent"])])
def test_a_member_that_owes_an_answer_is_named_before_it_counts_as_hung(
    monkeypatch: pytest.MonkeyPatch, owed_s: float, events: list[str]
) -> None:
    scene = Scene(monkeypatch)
    monkeypatch.setattr(VitalSigns, "ask", lambda *_: None)
    vitals = scene._run._signs._vitals[scene.worker_id]
    vitals.ref, vitals.answered_at = object(), time.monotonic() - owed_s
    scene._run._beat()
    scene.group.lifelines.close()
    assert (scene.events, scene._run._hangs) == (events, ())


def test_a_node_that_is_gone_although_its_notice_was_seen_was_reclaimed(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.group.forget_node("a")
    scene.living, scene.noticed = frozenset({"b"}), frozenset({"a"})
    end = scene.run()
    assert isinstance(end, Broken)
    assert (end.fault.kind, end.facts.lost_nodes) == (FaultKind.PREEMPTION, ("a",))


@pytest.mark.parametrize(
    ("error", "may_live"),
    [
        (ray.exceptions.ActorUnavailableError("m", None), True),
        (ray.exceptions.RayTaskError("wait_outcome", "no memory to answer with", MemoryError()), True),
        (ray.exceptions.ActorDiedError(), False),
    ],
)
def test_a_member_that_does_not_answer_as_it_should_is_killed_before_it_counts_as_gone(
    monkeypatch: pytest.MonkeyPatch, error: Exception, may_live: bool
) -> None:
    """Its process may live, and no new Attempt begins while an old training thread may be alive."""
    scene = Scene(monkeypatch)

    def get(_: object) -> None:
        raise error

    fake_ray = SimpleNamespace(exceptions=ray.exceptions, wait=lambda refs, **_: (refs, []), get=get)
    monkeypatch.setattr(attempt_run, "ray", fake_ray)
    monkeypatch.setattr(scene.group, "start_attempt", lambda *_: {object(): scene.worker_id})
    monkeypatch.setattr(scene.group, "ask_starved", lambda *_: None)
    monkeypatch.setattr(scene.group.lifelines.bell, "watch", lambda ref: ref)
    killed: list[frozenset[str]] = []

    def reckon(*, hung: frozenset[str], **_: Any) -> Reckoning:
        killed.append(hung)
        return Reckoning(survivors=frozenset(), lost_workers=(scene.worker_id,), lost_nodes=())

    monkeypatch.setattr(attempt_run, "reckon", reckon)
    end = scene.run()
    assert killed == [{scene.worker_id} if may_live else set()]
    assert isinstance(end, Broken)
    assert end.fault.kind is FaultKind.WORKER_LOST


@pytest.mark.parametrize(
    ("kind", "error_type", "is_replaced"),
    [
        (CauseKind.OUT_OF_MEMORY, "MemoryError", True),
        (CauseKind.USER, torch.AcceleratorError.__name__, True),
        (CauseKind.ACCELERATOR, "RuntimeError", True),
        (CauseKind.USER, "ValueError", False),
    ],
)
def test_a_process_that_its_error_has_spoiled_is_replaced_and_the_error_stays_the_cause(
    monkeypatch: pytest.MonkeyPatch, kind: CauseKind, error_type: str, is_replaced: bool
) -> None:
    scene = Scene(monkeypatch)
    cause = FailureCause(kind=kind, error_type=error_type, message="m", traceback="-", rank=0, step=8)
    failed = Outcome(
        attempt=scene.world.attempt,
        worker_id=scene.worker_id,
        rank=0,
        kind=OutcomeKind.FAILED,
        last_step=7,
        cause=cause,
    )
    fake_ray = SimpleNamespace(exceptions=ray.exceptions, wait=lambda refs, **_: (refs, []), get=lambda _: failed)
    monkeypatch.setattr(attempt_run, "ray", fake_ray)
    monkeypatch.setattr(scene.group, "start_attempt", lambda *_: {object(): scene.worker_id})
    monkeypatch.setattr(scene.group.lifelines.bell, "watch", lambda ref: ref)

    def reckon(*, hung: frozenset[str], **_: Any) -> Reckoning:
        return Reckoning(survivors=frozenset({scene.worker_id}) - hung, lost_workers=tuple(hung), lost_nodes=())

    monkeypatch.setattr(attempt_run, "reckon", reckon)
    end = scene.run()
    assert isinstance(end, Broken)
    assert (end.facts.lost_workers, end.fault.root) == ((scene.worker_id,) if is_replaced else (), cause)


def test_ranks_that_left_although_nobody_here_ordered_it_bring_the_controller_where_it_can_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch)
    left = Outcome(attempt=scene.world.attempt, worker_id=scene.worker_id, rank=0, kind=OutcomeKind.LEFT, last_step=7)
    fake_ray = SimpleNamespace(exceptions=ray.exceptions, wait=lambda refs, **_: (refs, []), get=lambda _: left)
    monkeypatch.setattr(attempt_run, "ray", fake_ray)
    monkeypatch.setattr(scene.group, "start_attempt", lambda *_: {object(): scene.worker_id})
    monkeypatch.setattr(scene.group.lifelines.bell, "watch", lambda ref: ref)
    end = scene.run()
    assert isinstance(end, Left)
    assert (end.step, end.stop, end.is_parted) == (7, None, False)
    assert scene.moves[-1] is State.LEAVING, "from there a new World is gathered"

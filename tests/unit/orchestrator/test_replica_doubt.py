"""What follows when ranks that should hold the same do not: no Commit, an end of the World, no trust in memory.

Coordinator, recorder, plan chooser and the watch over an Attempt are real, each with its scripted surroundings.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator import attempt_run
from orchestrator.attempt_run import Broken
from orchestrator.decisions import Regroup
from orchestrator.failure_policy import AttemptFacts, FaultKind, classify
from orchestrator.fencing import Reckoning
from orchestrator.recorder import Recorder
from orchestrator.replica_doubt import ReplicaDoubt
from orchestrator.signals import SaveFailed
from storage.keys import Attempt
from storage.replicas import DIGESTS, NAMES, Disagreement
from tests.fakes.real_coordinator import FIRST, WAIT_S, make, receipt
from tests.unit.orchestrator import test_aftermath, test_attempt_run, test_plan_chooser
from workers.contract import Member, World

ATTEMPT = Attempt(number=1, nonce=test_plan_chooser.NONCE)
ONE_IS_WRONG = Disagreement(ranks=(1,), among=(0, 1, 2), tensor="model.a", num_tensors=1)
NOBODY_KNOWS = Disagreement(ranks=(0, 1), among=(0, 1), tensor=None, num_tensors=0)


def refused(found: Disagreement = ONE_IS_WRONG, attempt: Attempt = ATTEMPT, step: int = 40) -> SaveFailed:
    return SaveFailed(attempt=attempt, step=step, reason="rank 1 differs", disagreement=found)


def world(size: int, attempt: Attempt = ATTEMPT) -> World:
    members = tuple(Member(rank=rank, worker_id=f"w{rank}", node_id=f"node-{rank}") for rank in range(size))
    return World(attempt=attempt, members=members)


def test_the_coordinator_refuses_the_commit_and_says_who_differs() -> None:
    coordinator, log, store = make()
    coordinator.begin_attempt(FIRST, world_size=3, base_step=0)
    for rank, digest in enumerate(("aaaaaaaa", "aaaaaaab", "aaaaaaaa")):
        names = {NAMES: {"whole": ["model.a"]}} if rank == 0 else {}
        state = {"rank": rank, DIGESTS: {"whole": digest}, **names}
        coordinator.deliver(receipt(store, FIRST, 10, rank, world_size=3).model_copy(update={"rank_state": state}))
    assert coordinator.wait_settled(10, WAIT_S)
    coordinator.close()
    assert log.commits() == []
    (failed,) = [signal for signal in coordinator.drain_signals() if isinstance(signal, SaveFailed)]
    assert failed.disagreement == ONE_IS_WRONG
    assert "what rank 1 holds differs from the 2 others, first in model.a" in failed.reason


def test_an_event_of_its_own_names_ranks_and_tensor() -> None:
    events: list[tuple[str, dict[str, Any]]] = []

    class Sink:
        def emit(self, event: str, **fields: Any) -> None:
            events.append((event, fields))

    Recorder(Sink(), start_unix_s=0.0).record([refused()])
    assert [event for event, _ in events] == ["save_failed", "replicas_disagree"]
    told = events[1][1]
    assert (told["step"], told["ranks"], told["among"], told["tensor"]) == (40, (1,), (0, 1, 2), "model.a")


def test_members_in_the_wrong_are_named_with_their_nodes_and_others_worlds_are_left_alone() -> None:
    doubt = ReplicaDoubt()
    assert doubt.of(world(3)) is None
    doubt.on_signal(SaveFailed(attempt=ATTEMPT, step=30, reason="disk full"))
    assert doubt.of(world(3)) is None
    doubt.on_signal(refused())
    found = doubt.of(world(3))
    assert found is not None
    assert found.workers == ("w1",)
    assert "step 40, first in model.a: rank 1 (worker w1, node node-1)" in found.detail
    assert doubt.of(world(3, Attempt(number=2, nonce=ATTEMPT.nonce))) is None


def test_where_nobody_can_tell_both_are_named_and_none_is_replaced() -> None:
    doubt = ReplicaDoubt()
    doubt.on_signal(refused(NOBODY_KNOWS))
    found = doubt.of(world(2))
    assert found is not None
    assert found.workers == ()
    assert "rank 0 (worker w0, node node-0); rank 1 (worker w1, node node-1)" in found.detail


def test_the_world_ends_and_the_process_in_the_wrong_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = test_attempt_run.Scene(monkeypatch)
    doubt = ReplicaDoubt()
    scene._run._doubt = doubt.of
    assert not scene._run._is_broken()
    wrong = Disagreement(ranks=(0,), among=(0, 1, 2), tensor="model.a", num_tensors=1)
    doubt.on_signal(refused(wrong, scene.world.attempt))
    assert scene._run._is_broken()
    asked: list[frozenset[str]] = []

    def reckon(*, hung: frozenset[str], **_: Any) -> Reckoning:
        asked.append(hung)
        return Reckoning(survivors=frozenset(), lost_workers=tuple(hung), lost_nodes=())

    monkeypatch.setattr(attempt_run, "reckon", reckon)
    end = scene._run._recover()
    scene.group.lifelines.close()
    assert isinstance(end, Broken)
    assert end.fault.kind is FaultKind.REPLICAS
    assert asked == [frozenset({scene.worker_id})]
    assert scene.worker_id in end.fault.detail


def test_it_is_the_cause_whatever_else_broke() -> None:
    facts = AttemptFacts(unlike_replicas="replicas disagree at step 4", lost_workers=("w1",), lost_nodes=("a",))
    assert (classify(facts).kind, classify(facts).detail) == (FaultKind.REPLICAS, "replicas disagree at step 4")


def test_what_is_newer_in_memory_is_not_gone_on_from() -> None:
    scene = test_plan_chooser.running()
    scene.recorder.record([refused()])
    assert scene.chosen_step(test_plan_chooser.broken(FaultKind.REPLICAS, lost=())) == (30, "store")
    assert ("memory_passed_over", "replicas disagreed") in [(event, told.get("reason")) for event, told in scene.events]


def test_memory_is_trusted_again_in_the_attempt_that_follows() -> None:
    scene = test_plan_chooser.running()
    scene.recorder.record([refused()])
    assert scene.chosen_step(test_plan_chooser.broken(FaultKind.REPLICAS, lost=()), number=2) == (30, "store")
    scene.begin(2, 30)
    scene.held.clear()
    test_plan_chooser.two_ranks(scene, 1, 41)
    test_plan_chooser.two_ranks(scene, 2, 35)
    assert scene.chosen_step(test_plan_chooser.broken(lost=()), number=3) == (35, "memory")


def test_a_last_save_that_is_refused_is_trained_again() -> None:
    scene = test_aftermath.Scene()
    doubt = ReplicaDoubt()
    scene.aftermath._unlike_replicas = doubt.of_ended
    removed: list[str] = []
    scene.aftermath._group = SimpleNamespace(views=lambda _: (), remove_worker=removed.append)  # type: ignore[assignment]
    assert test_aftermath.FINISHED.attempt is not None
    doubt.on_signal(refused(attempt=test_aftermath.FINISHED.attempt))
    decision = scene.aftermath.after(replace(test_aftermath.FINISHED, workers=("w0", "w1", "w2")), None)
    assert isinstance(decision, Regroup)
    assert (decision.cause, decision.reason) == ("replicas-disagree", "rank 1 differs")
    assert scene.journal[0]["counters"].infrastructure == 1
    assert removed == ["w1"], "the process in the wrong is replaced, as within a World"

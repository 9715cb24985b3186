"""What follows from how an Attempt ended where nodes go away: the last save, and what the next driver is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.aftermath import Aftermath
from orchestrator.attempt_run import Broken, Finished, Left
from orchestrator.config import FailureConfig, RunConfig, RunSettings
from orchestrator.decisions import Regroup, Stop
from orchestrator.exit_codes import ExitCode
from orchestrator.failure_history import FailureHistory
from orchestrator.failure_policy import AttemptFacts, Counters, Fault, FaultKind
from orchestrator.recorder import Recorder
from storage.keys import Attempt, StepKey
from workers.config import DataConfig, ModelConfig
from workers.contract import CauseKind, FailureCause

STEPS = 100
FINISHED = Finished(weights_digest="d", attempt=Attempt(number=2, nonce="abcd1234"), nodes=("a", "b"))
LEFT = Left(step=60, cause="preemption", reason="r", detected_at_s=0.0)
BELOW = Stop(exit_code=ExitCode.BELOW_MINIMUM, reason="nobody is there")


class Scene:
    """The parts around the aftermath on paper; ``missing``: ranks that owe their part of a save, by step."""

    def __init__(self, **failure: Any) -> None:
        self.missing: dict[int, tuple[int, ...]] = {}
        self.committed: set[int] = set()
        self.living_nodes = {"a", "b"}
        self.noticed: dict[str, float] = {}
        self.blocked: dict[str, str] = {}
        self.lost: list[str] = []
        self.replaced: list[str] = []
        self.quarantined: list[int] = []
        self.journal: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.looks = 0
        self.now_unix_s = 1000.0
        self.recorder = Recorder(self, start_unix_s=0.0, newest_step=64)
        self.recorder.steps_this_attempt = 10
        self.aftermath = Aftermath(
            config=RunConfig(
                run=RunSettings(name="r", url="memory://r", steps=STEPS),
                model=ModelConfig(),
                data=DataConfig(url="memory://d", sequence_length=8, global_batch=8),
                failure=FailureConfig(**failure),
            ),
            group=SimpleNamespace(views=lambda _: (), remove_worker=lambda _: None),  # type: ignore[arg-type]
            gathering=self,  # type: ignore[arg-type]
            coordinator=self,  # type: ignore[arg-type]
            journal=SimpleNamespace(counters=Counters, append_counters=self._append),  # type: ignore[arg-type]
            recorder=self.recorder,
            history=FailureHistory(),
            wall_clock=lambda: self.now_unix_s,
            store=SimpleNamespace(  # type: ignore[arg-type]
                wait_settled=self._await, take_signals=lambda: None, call=lambda _, ask: ask(), last_try=self._last_try
            ),
        )

    def emit(self, event: str, **fields: Any) -> None:
        self.events.append({"event": event, **fields})

    def _append(self, kind: str, counters: Counters, **values: Any) -> None:
        self.journal.append({"kind": kind, "counters": counters, **values})

    def _await(self, step: int | None, limit_s: float, is_in_vain: Callable[[], bool] = lambda: False) -> None:
        """Until the last of three looks."""
        del limit_s
        for self.looks in range(1, 4):
            if step not in self.missing or is_in_vain():
                return

    def _last_try(self, step: int, limit_s: float, stop: Stop) -> Stop:
        return replace(stop, reason=f"{stop.reason}; step {step} was given {limit_s:g} s")

    # -- coordinator and gathering

    def pending(self) -> dict[int, tuple[int, ...]]:
        return self.missing

    def has_committed(self, step: int) -> bool:
        return step in self.committed

    def wait_settled(self, step: int | None, timeout_s: float) -> bool:
        assert timeout_s == 0.0
        return step not in self.missing

    def quarantine(self, key: StepKey, object_key: str, reason: str, url: str | None) -> None:
        assert (object_key, reason, url) == ("manifests/x", "another loss", None)
        self.quarantined.append(key.step)

    def living(self) -> frozenset[str]:
        return frozenset(self.living_nodes)

    def notices(self) -> dict[str, float]:
        return self.noticed

    def lose_node(self, node_id: str) -> None:
        self.lost.append(node_id)

    def replace_members(self, reason: str) -> None:
        self.replaced.append(reason)

    def note_failures(self, failures: Any) -> None:
        assert list(failures) == []


@pytest.mark.parametrize(("noticed", "cause"), [({}, "node-lost"), ({"b": 7.0}, "preemption")])
def test_a_node_lost_before_its_part_of_the_last_save_was_stored_makes_the_world_train_the_last_steps_again(
    noticed: dict[str, float], cause: str
) -> None:
    scene = Scene()
    scene.missing, scene.living_nodes, scene.noticed = {STEPS: (1,)}, {"a"}, noticed
    decision = scene.aftermath.after(FINISHED, None)
    assert isinstance(decision, Regroup)
    assert (decision.cause, scene.lost, scene.looks) == (cause, ["b"], 1)
    fault = scene.events[0]
    assert (fault["event"], fault["cause"], fault["nodes"]) == ("fault", cause, ["b"])
    counters = scene.journal[0]["counters"]
    assert (counters.preemptions, counters.infrastructure) == ((1, 0) if noticed else (0, 1))


def test_a_lost_node_that_owes_nothing_to_the_last_save_does_not_matter() -> None:
    scene = Scene()
    scene.missing, scene.living_nodes = {STEPS: (0,)}, {"a"}
    decision = scene.aftermath.after(FINISHED, None)
    assert isinstance(decision, Stop)
    assert decision.exit_code is ExitCode.FINAL_SAVE_FAILED
    assert scene.looks == 3


def test_a_save_that_all_nodes_took_part_in_counts_although_one_is_gone_since() -> None:
    scene = Scene()
    scene.living_nodes, scene.committed = {"a"}, {STEPS}
    assert scene.aftermath.after(FINISHED, None) == Stop(exit_code=ExitCode.SUCCESS, reason=f"finished step {STEPS}")


def test_the_last_save_of_a_world_that_left_is_over_when_settled_or_when_its_node_is_gone() -> None:
    scene = Scene()
    assert not scene.aftermath.is_save_over(None, 1e9), "a driver without a World waits for one"
    scene.missing = {60: (1,)}
    assert not scene.aftermath.is_save_over(LEFT, 59.0)
    assert scene.aftermath.is_save_over(LEFT, 61.0), "checkpoint.leave_timeout_s"
    past = replace(LEFT, deadline_at_s=990.0)
    assert not scene.aftermath.is_save_over(past, 2.9)
    assert scene.aftermath.is_save_over(past, 3.1)
    scene.missing = {}
    assert scene.aftermath.is_save_over(LEFT, 0.0)


def test_a_last_save_has_until_its_node_goes_and_not_half_of_that_time() -> None:
    scene = Scene()
    scene.missing = {60: (1,)}
    left = replace(LEFT, deadline_at_s=1030.0)  # left at 1000
    for waited_s, is_over in ((20.0, False), (29.0, False), (32.9, False), (33.1, True)):
        scene.now_unix_s = 1000.0 + waited_s
        assert scene.aftermath.is_save_over(left, waited_s) is is_over, waited_s


@pytest.mark.parametrize(
    ("committed", "durable_step", "is_unsaved", "words"),
    [
        ({60}, 60, False, ["newest checkpoint: step 60", "steps 61 to 64 will be trained again"]),
        (
            set(),
            40,
            False,
            ["the last save, of step 60, was not committed", "newest checkpoint: step 40", "steps 41 to 64 will be"],
        ),
        (set(), 0, True, ["newest checkpoint: none", "memory holds steps up to 64", "keep them for 120 s"]),
    ],
)
def test_who_ends_for_want_of_nodes_says_what_there_is_to_go_on_from(
    committed: set[int], durable_step: int, is_unsaved: bool, words: list[str]
) -> None:
    scene = Scene()
    scene.committed = committed
    stop = scene.aftermath.last_word(BELOW, LEFT, durable_step=durable_step, is_unsaved=is_unsaved)
    assert stop.exit_code is ExitCode.BELOW_MINIMUM
    assert stop.reason.startswith("nobody is there; ")
    for word in words:
        assert word in stop.reason
    assert ("was not committed" in stop.reason) is (not committed)
    assert ("will be trained again" in stop.reason) is not is_unsaved
    assert stop.reason.endswith("the same command goes on from there")


def test_other_ends_have_their_own_words() -> None:
    stop = Stop(exit_code=ExitCode.STOPPED, reason="stopped on request")
    assert Scene().aftermath.last_word(stop, LEFT, durable_step=1, is_unsaved=True) == stop


@pytest.mark.parametrize(("deadline_at_s", "limit_s"), [(None, 60), (1007.0, 10)])
def test_a_persons_stop_between_two_worlds_waits_for_the_save_of_the_one_that_left(
    deadline_at_s: float | None, limit_s: float
) -> None:
    scene, stop = Scene(), Stop(exit_code=ExitCode.STOPPED, reason="stopped on request")
    left = replace(LEFT, deadline_at_s=deadline_at_s)
    reason = f"stopped on request; step 60 was given {limit_s} s"
    assert scene.aftermath.stopped_between(stop, left).reason == reason
    at_once = scene.aftermath.after(replace(left, stop=stop), None)
    assert at_once == replace(stop, reason=reason), "as for a World that left for the stop itself"


@pytest.mark.parametrize("end", [None, FINISHED, replace(LEFT, is_parted=True)])
def test_a_stop_between_two_worlds_waits_for_nothing_where_no_save_was_made_on_leaving(
    end: Finished | Left | None,
) -> None:
    stop = Stop(exit_code=ExitCode.STOPPED, reason="stopped on request")
    assert Scene().aftermath.stopped_between(stop, end) == stop


def test_who_was_taken_over_or_has_waited_already_waits_no_more() -> None:
    for code in (ExitCode.REFUSED, ExitCode.BELOW_MINIMUM):
        stop = Stop(exit_code=code, reason="r")
        assert Scene().aftermath.stopped_between(stop, LEFT) == stop


def test_the_save_of_the_preemption_that_is_one_too_many_is_waited_for() -> None:
    stop = Scene(max_preemptions=0).aftermath.after(LEFT, None)
    assert isinstance(stop, Stop)
    assert stop.exit_code is ExitCode.PREEMPTED
    assert stop.reason == "1 preemptions, failure.max_preemptions is 0; step 60 was given 60 s"


@pytest.mark.parametrize(("limit", "are_last"), [(-1, [False, False]), (0, [True]), (1, [False, True])])
def test_it_is_known_before_which_preemption_ends_the_run(limit: int, are_last: list[bool]) -> None:
    scene = Scene(max_preemptions=limit)
    for is_last in are_last:
        assert scene.aftermath.is_next_preemption_last is is_last
        assert isinstance(scene.aftermath.after(LEFT, None), Stop) is is_last


def unproven(step: int, error_type: str = "ProofFailed") -> Broken:
    key = StepKey(step=step, attempt=Attempt(number=1, nonce="abcd1234"))
    root = FailureCause(
        kind=CauseKind.CORRUPT_CHECKPOINT, error_type=error_type, message="another loss", traceback="", rank=0, step=1,
        corrupt_step=key, corrupt_key="manifests/x",
    )  # fmt: skip
    fault = Fault(kind=FaultKind.CORRUPT_CHECKPOINT, detail="rank 0: another loss", root=root)
    return Broken(fault=fault, facts=AttemptFacts(), detected_at_s=0.0)


def test_a_second_checkpoint_in_a_row_that_fails_its_proof_is_left_in_use_and_ends_the_run() -> None:
    scene = Scene()
    scene.recorder.steps_this_attempt = 0
    assert isinstance(scene.aftermath.after(unproven(40), None), Regroup)
    stop = scene.aftermath.after(unproven(30), None)
    assert isinstance(stop, Stop)
    assert stop.exit_code is ExitCode.CONFIG_ERROR
    for word in ("steps 40 and 30", "Step 30 stays in use", "--lift", "checkpoint.proof: false", "another loss"):
        assert word in stop.reason
    assert scene.quarantined == [40]


def test_once_steps_were_trained_from_a_checkpoint_that_was_proven_the_next_doubt_is_a_first_one_again() -> None:
    scene = Scene()
    scene.recorder.steps_this_attempt = 0
    assert isinstance(scene.aftermath.after(unproven(40), None), Regroup)
    scene.recorder.steps_this_attempt = 5
    assert isinstance(scene.aftermath.after(LEFT, None), Regroup)
    scene.recorder.steps_this_attempt = 0
    assert isinstance(scene.aftermath.after(unproven(50), None), Regroup)
    assert scene.quarantined == [40, 50]


def test_damaged_bytes_are_quarantined_one_after_the_other() -> None:
    scene = Scene()
    scene.recorder.steps_this_attempt = 0
    for step in (40, 30, 20):
        assert isinstance(scene.aftermath.after(unproven(step, "CorruptCheckpoint"), None), Regroup)
    assert scene.quarantined == [40, 30, 20]


def break_world(scene: Scene, kind: FaultKind, steps: int) -> Regroup | Stop:
    scene.recorder.steps_this_attempt = steps
    fault = Fault(kind=kind, detail="wait timeout")
    return scene.aftermath.after(Broken(fault=fault, facts=AttemptFacts(), detected_at_s=0.0), None)


def test_processes_whose_world_came_to_nothing_twice_are_not_tried_a_third_time() -> None:
    scene = Scene()
    for num_replaced in (0, 1, 1, 2):
        assert isinstance(break_world(scene, FaultKind.COLLECTIVE, 0), Regroup)
        assert len(scene.replaced) == num_replaced
    assert scene.replaced[0].endswith("although every member lives; last: wait timeout")
    assert scene.journal[-1]["counters"].fruitless == 4, "and the counts go on"


@pytest.mark.parametrize(("kind", "steps"), [(FaultKind.COLLECTIVE, 1), (FaultKind.WORKER_LOST, 0)])
def test_a_step_or_a_loss_in_between_clears_the_processes(kind: FaultKind, steps: int) -> None:
    scene = Scene()
    for one, finished in ((FaultKind.COLLECTIVE, 0), (kind, steps), (FaultKind.COLLECTIVE, 0)):
        assert isinstance(break_world(scene, one, finished), Regroup)
    scene.aftermath.after(LEFT, None)
    break_world(scene, FaultKind.COLLECTIVE, 0)
    assert scene.replaced == []


@pytest.mark.parametrize(
    ("failed_in", "pending", "looks"),
    [(12, {10, 15}, 3), (8, {10, 15}, 0), (10, {10}, 0), (11, {10}, 3), (None, {10, 15}, 3), (12, set(), 0)],
)
def test_who_ends_for_an_error_waits_for_a_save_alone_that_all_ranks_can_have_handed_over(
    failed_in: int | None, pending: set[int], looks: int
) -> None:
    scene = Scene(max_user_errors=0)
    scene.missing = dict.fromkeys(pending, (0,))
    root = None
    if failed_in is not None:
        root = FailureCause(
            kind=CauseKind.USER, error_type="ValueError", message="a bad row", traceback="", rank=1, step=failed_in
        )
    fault = Fault(kind=FaultKind.USER_ERROR, detail="a bad row", root=root)
    assert isinstance(scene.aftermath.after(Broken(fault=fault, facts=AttemptFacts(), detected_at_s=0.0), None), Stop)
    assert scene.looks == looks


def test_a_run_that_ends_replaces_nobody() -> None:
    scene = Scene(max_infrastructure=1)
    break_world(scene, FaultKind.COLLECTIVE, 0)
    assert isinstance(break_world(scene, FaultKind.COLLECTIVE, 0), Stop)
    assert scene.replaced == []


def test_the_journal_tells_which_nodes_are_blocked_also_once_none_is_any_more() -> None:
    scene = Scene()
    scene.aftermath.write_journal("attempt")
    assert "blocked" not in scene.journal[-1]
    for blocked in ({"a": "why"}, {}):
        scene.blocked = blocked
        scene.aftermath.write_journal("attempt")
        assert scene.journal[-1]["blocked"] == blocked

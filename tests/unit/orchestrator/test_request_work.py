"""What people ask for is carried out, and they hear how it went: scripted desk, recorder and coordinator."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.request_work import RequestWork
from orchestrator.requests import ReplyState, Request, WishKind
from orchestrator.signals import Committed, SaveBound, SaveFailed, SaveSkipped, StepFinished
from storage.keys import Attempt
from workers.contract import BoundOrder, OrderKind, StepReport

FIRST, SECOND = Attempt(number=1, nonce="aaaaaaaa"), Attempt(number=2, nonce="aaaaaaaa")
TOTAL = 100


class Scene:
    """Desk, size, recorder and coordinator in one; two workers train."""

    def __init__(self) -> None:
        self.newest_step, self.world_size, self.steps_this_attempt = 10, 2, 10
        self.incoming: list[Request] = []
        self.replies: dict[str, list[tuple[ReplyState, str, int | None]]] = {}
        self.events: list[dict[str, Any]] = []
        self.orders = 0
        self.wanted: list[int] = []
        self.kept: list[int] = []
        self.is_running = True
        self.is_stopped = self.is_reached = False
        self.num_asked = 0
        self.trouble: str | None = None
        self.work = RequestWork(
            desk=self,
            sizing=self,
            record=self,
            total_steps=TOTAL,
            may_order=lambda: self.is_running,
            submit_snapshot=self._submit,
            keep_size=self._keep,
            ask_cluster=self._ask,
            stop=self._stop,
        )

    def ask(self, nonce: str, wish: WishKind, workers: int | None = None) -> None:
        self.incoming.append(Request(nonce=nonce, driver="aaaaaaaa", wish=wish, workers=workers))
        self.work.tick()

    def step(self, step: int, attempt: Attempt = FIRST) -> None:
        self.newest_step = step
        self.steps_this_attempt += 1
        report = StepReport(
            step=step,
            loss=1.0,
            grad_norm=1.0,
            lr=0.1,
            tokens=step,
            position=step,
            sample_chain="",
            step_s=0.1,
            finished_at_s=0.0,
        )
        self.work.on_signal(StepFinished(attempt=attempt, report=report))
        self.work.tick()

    def bound(self, number: int, step: int, attempt: Attempt = FIRST) -> None:
        bound = BoundOrder(number=number, kind=OrderKind.SNAPSHOT, step=step)
        self.work.on_signal(SaveBound(attempt=attempt, bound=bound, reason="asked for"))

    def committed(self, step: int, attempt: Attempt = FIRST) -> None:
        self.work.on_signal(Committed(attempt=attempt, step=step, stored_bytes=1, stall_s=0.0, upload_s=0.0, loss=None))

    def last(self, nonce: str) -> tuple[ReplyState, str, int | None]:
        return self.replies[nonce][-1]

    # -- what the work sees -----------------------------------------------------------------------------------------

    def take(self) -> tuple[Request, ...]:
        taken, self.incoming = tuple(self.incoming), []
        return taken

    def answer(self, nonce: str, state: ReplyState, reason: str = "", step: int | None = None) -> None:
        self.replies.setdefault(nonce, []).append((state, reason, step))

    def refuse(self, wanted: int) -> str | None:
        return "too many" if wanted > 8 else None

    def want(self, wanted: int) -> None:
        self.wanted.append(wanted)

    def reached(self) -> None:
        self.is_reached = True

    def emit(self, event: str, **fields: Any) -> None:
        self.events.append({"event": event, **fields})

    def _submit(self, reason: str) -> int:
        assert reason
        self.orders += 1
        return self.orders

    def _keep(self, workers: int) -> str | None:
        self.kept.append(workers)
        return self.trouble

    def _ask(self) -> None:
        self.num_asked += 1

    def _stop(self) -> None:
        self.is_stopped = True


A, B = "0000000a", "0000000b"


def test_a_scale_is_journalled_asked_of_the_cluster_and_done_once_such_a_world_makes_a_step() -> None:
    scene = Scene()
    scene.ask(A, "scale", 3)
    assert (scene.kept, scene.wanted, scene.num_asked) == ([3], [3], 1)
    assert scene.last(A) == ("accepted", "3 workers are wanted, 2 train", None)
    scene.step(11)
    assert scene.last(A)[0] == "accepted"
    scene.world_size = 3
    assert scene.last(A)[0] == "accepted", "a World that is formed has shown nothing yet"
    scene.step(12, SECOND)
    assert scene.last(A) == ("done", "3 workers train", 12)
    assert scene.is_reached
    assert [event["event"] for event in scene.events] == ["request", "decision"]


def test_a_size_that_is_there_already_is_done_at_once() -> None:
    scene = Scene()
    scene.ask(A, "scale", 2)
    assert scene.last(A)[0] == "done"


@pytest.mark.parametrize(("workers", "trouble", "reason"), [(9, None, "too many"), (3, "the store is away", "away")])
def test_a_refused_scale_changes_nothing(workers: int, trouble: str | None, reason: str) -> None:
    scene = Scene()
    scene.trouble = trouble
    scene.ask(A, "scale", workers)
    state, why, _ = scene.last(A)
    assert state == "refused"
    assert reason in why
    assert (scene.wanted, scene.num_asked) == ([], 0)


def test_a_later_scale_takes_the_place_of_an_earlier_one() -> None:
    scene = Scene()
    scene.ask(A, "scale", 4)
    scene.ask(B, "scale", 3)
    assert scene.last(A) == ("refused", "a later request wants 3 workers", None)
    assert scene.wanted == [4, 3]


def test_a_save_is_ordered_bound_and_done_with_its_commit() -> None:
    scene = Scene()
    scene.ask(A, "save")
    assert scene.orders == 1
    scene.work.tick()
    assert scene.orders == 1
    scene.bound(1, 13)
    assert scene.last(A) == ("accepted", "being saved", 13)
    scene.committed(10)
    assert scene.last(A)[0] == "accepted", "that one was made before anyone asked"
    scene.committed(13)
    assert scene.last(A) == ("done", "step 13 is committed", 13)


def test_one_order_serves_all_who_ask_and_an_unbound_one_is_not_replaced() -> None:
    scene = Scene()
    scene.ask(A, "save")
    scene.ask(B, "save")
    assert scene.orders == 1
    scene.bound(1, 13)
    scene.work.tick()
    assert scene.orders == 2
    scene.committed(13)
    assert [scene.last(nonce)[0] for nonce in (A, B)] == ["done", "done"]


def test_while_a_world_leaves_no_order_undoes_its_leave() -> None:
    scene = Scene()
    scene.is_running = False
    scene.ask(A, "save")
    assert scene.orders == 0
    assert scene.last(A) == ("accepted", "no step is made now", None)
    scene.is_running = True
    scene.step(11, SECOND)
    assert scene.orders == 1


def test_a_save_of_an_attempt_that_is_over_is_ordered_again_of_the_next() -> None:
    scene = Scene()
    scene.step(11)
    scene.ask(A, "save")
    scene.bound(1, 14)
    scene.step(6, SECOND)  # it went back to step 5
    assert scene.orders == 2
    scene.bound(2, 8, SECOND)
    scene.committed(8, SECOND)
    assert scene.last(A) == ("done", "step 8 is committed", 8)


def test_a_save_that_fails_or_is_left_out_is_refused_with_the_reason() -> None:
    scene = Scene()
    scene.ask(A, "save")
    scene.bound(1, 13)
    scene.work.on_signal(SaveFailed(attempt=FIRST, step=12, reason="another one"))
    assert scene.last(A)[0] == "accepted"
    scene.work.on_signal(SaveFailed(attempt=FIRST, step=13, reason="disk full"))
    assert scene.last(A) == ("refused", "the save of step 13 failed: disk full", 13)
    scene.ask(B, "save")
    scene.bound(2, 15)
    scene.work.on_signal(SaveSkipped(attempt=FIRST, step=15))
    assert "left out" in scene.last(B)[1]


def test_an_order_that_took_the_place_of_the_one_asked_for_is_followed_in_its_stead() -> None:
    scene = Scene()
    scene.ask(A, "save")
    scene.bound(0, 11)
    assert scene.last(A) == ("accepted", "the next steps are saved", None), "the cadence is nobody's order"
    scene.bound(2, 13)
    assert scene.last(A) == ("accepted", "being saved", 13)
    scene.bound(3, 14)
    scene.work.on_signal(SaveFailed(attempt=FIRST, step=13, reason="disk full"))
    assert scene.last(A) == ("refused", "the save of step 13 failed: disk full", 13)
    scene.ask(B, "save")
    assert scene.orders == 2, "nothing is on its way"


def test_at_the_last_step_the_final_save_is_what_was_asked_for() -> None:
    scene = Scene()
    scene.newest_step = TOTAL
    scene.ask(A, "save")
    assert scene.orders == 0
    scene.committed(TOTAL)
    assert scene.last(A)[0] == "done"
    scene.ask(B, "save")
    assert scene.last(B) == ("done", "step 100 is committed", 100)


def test_a_stop_is_done_when_the_run_has_stopped() -> None:
    scene = Scene()
    scene.ask(A, "stop")
    assert scene.is_stopped
    assert scene.last(A)[0] == "accepted"
    scene.work.end("stopped on request", is_stop=True)
    assert scene.last(A) == ("done", "the run has ended: stopped on request", 10)


def test_whoever_still_waits_when_the_run_ends_hears_of_it() -> None:
    scene = Scene()
    scene.ask(A, "scale", 3)
    scene.incoming.append(Request(nonce=B, driver="aaaaaaaa", wish="save"))
    scene.work.end("finished step 100", is_stop=False)
    for nonce in (A, B):
        assert scene.last(nonce) == ("refused", "the run has ended: finished step 100", None)

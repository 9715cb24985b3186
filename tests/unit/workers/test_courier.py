"""Rank 0's side thread against a scripted coordinator."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from storage.keys import Attempt
from tests.fakes.coordinators import ScriptedCoordinator
from workers.contract import BoundOrder, EvalReport, ExchangeReply, ExchangeRequest, OrderKind, ShareReport, StepReport
from workers.courier import Courier
from workers.errors import AttemptAbandoned

ATTEMPT = Attempt(number=4, nonce="00c0ffee")


def report(step: int) -> StepReport:
    return StepReport(
        step=step,
        loss=1.0,
        grad_norm=1.0,
        lr=1e-3,
        tokens=step,
        position=step,
        sample_chain="0" * 32,
        step_s=0.1,
        finished_at_s=0.0,
    )


@contextmanager
def running(coordinator: object) -> Iterator[Courier]:
    courier = Courier(coordinator, ATTEMPT)  # type: ignore[arg-type]  # a test's own port
    courier.start()
    try:
        yield courier
    finally:
        courier.close(10.0)


def test_all_news_arrives_once_and_in_order() -> None:
    coordinator = ScriptedCoordinator(ATTEMPT)
    with running(coordinator) as courier:
        for step in range(1, 601):
            courier.report(report(step))
        courier.report_eval(EvalReport(step=5, loss=1.0, best=1.0, best_step=5))
        courier.report_bound(BoundOrder(number=0, kind=OrderKind.SNAPSHOT, step=7))
        courier.report_skipped(9)
        share = ShareReport(
            step=7,
            share=0.0,
            extra_bytes=0,
            snapshot_share=0.1,
            snapshot_bytes=10,
            in_use_bytes=100,
            is_measured=True,
        )
        courier.report_share(share)
        assert courier.flush(20.0)
    assert [one.step for one in coordinator.reports] == list(range(1, 601))
    assert [one.step for one in coordinator.evals] == [5]
    assert [one.step for one in coordinator.bound] == [7]
    assert coordinator.skipped == [9]
    assert coordinator.shares == [share]


def test_a_call_that_failed_is_made_again_with_the_same_news() -> None:
    coordinator = ScriptedCoordinator(ATTEMPT, num_failures=2)
    with running(coordinator) as courier:
        courier.report(report(1))
        assert courier.flush(20.0)
    assert [one.step for one in coordinator.reports] == [1]
    assert coordinator.num_calls >= 3


def test_orders_and_settled_steps_come_back_without_news_to_bring() -> None:
    coordinator = ScriptedCoordinator(ATTEMPT, order_after=1)
    with running(coordinator) as courier:
        courier.report(report(1))
        courier.report_bound(BoundOrder(number=0, kind=OrderKind.SNAPSHOT, step=7))
        calls = coordinator.num_calls
        assert coordinator.wait_for(lambda one: one.num_calls >= calls + 3)
        order = courier.newest_order()
        assert order is not None
        assert order.kind is OrderKind.LEAVE
        assert courier.take_settled() == {7}


def test_a_coordinator_that_serves_a_newer_attempt_ends_the_training_thread() -> None:
    coordinator = ScriptedCoordinator(ATTEMPT, is_current=False)
    with running(coordinator) as courier:
        courier.report(report(1))
        courier.flush(20.0)
        with pytest.raises(AttemptAbandoned, match="newer"):
            courier.newest_order()


def test_a_fault_of_the_coordinator_reaches_the_training_thread() -> None:
    class Broken:
        def exchange(self, request: ExchangeRequest) -> ExchangeReply:
            raise KeyError(request.attempt.label)

    with running(Broken()) as courier:
        courier.report(report(1))
        assert not courier.flush(20.0)
        with pytest.raises(RuntimeError, match="KeyError"):
            courier.newest_order()


def test_news_is_bounded_while_the_coordinator_does_not_answer() -> None:
    gate = threading.Event()
    heard: list[int] = []

    class Stuck:
        def exchange(self, request: ExchangeRequest) -> ExchangeReply:
            assert gate.wait(20.0)
            heard.extend(one.step for one in request.reports)
            return ExchangeReply(attempt=ATTEMPT, order=None, settled_steps=(), is_current=True)

    with running(Stuck()) as courier:
        for step in range(1, 10_001):
            courier.report(report(step))
        assert not courier.flush(0.0)
        gate.set()
        assert courier.flush(20.0)
    assert len(heard) < 5_000
    assert heard[-1] == 10_000


def test_a_courier_that_never_started_can_be_flushed_and_closed() -> None:
    courier = Courier(ScriptedCoordinator(ATTEMPT), ATTEMPT)
    assert courier.flush(20.0)
    courier.report(report(1))
    assert not courier.flush(20.0)
    courier.close(1.0)

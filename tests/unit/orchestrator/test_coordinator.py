"""The coordinator on a MemoryStore: Receipts in, one Commit out, old Attempts refused. No ray, no torch."""

from __future__ import annotations

import threading

import pytest

from orchestrator.save_config import SavePolicyConfig
from orchestrator.signals import Committed, SaveBound, SaveDelayed, SaveFailed, SaveSkipped, SaveWeighed, StepFinished
from storage.config import CheckpointConfig
from storage.errors import CommitRefused, ObjectMissing, StoreUnavailable
from storage.keys import MANIFESTS, StepKey, shard_key
from tests.fakes.away_store import AwayStore
from tests.fakes.real_coordinator import FIRST, SECOND, WAIT_S, Clock, commit_step, make, receipt, report
from workers.contract import BoundOrder, EvalReport, ExchangeRequest, OrderKind


def test_a_step_is_committed_when_the_last_rank_s_receipt_is_there_and_not_before() -> None:
    coordinator, log, store = make()
    coordinator.begin_attempt(FIRST, world_size=2, base_step=0)
    coordinator.exchange(ExchangeRequest(attempt=FIRST, reports=(report(10),)))
    coordinator.deliver(receipt(store, FIRST, 10, 1))
    assert log.commits() == []
    assert coordinator.pending() == {10: (0,)}
    coordinator.deliver(receipt(store, FIRST, 10, 0))
    assert coordinator.wait_settled(10, WAIT_S)
    commits = log.commits()
    assert [(c.step, c.loss, c.base_step) for c in commits] == [(10, 0.1, 0)]
    manifest = log.read_manifest(commits[0])
    assert [shard.rank for shard in manifest.shards] == [0, 1]
    assert manifest.ledger is not None
    assert manifest.ledger.position == 40
    coordinator.close()
    committed = [s for s in coordinator.drain_signals() if isinstance(s, Committed)]
    assert [(s.step, s.stored_bytes, s.stall_s) for s in committed] == [(10, 20, 0.2)]


def test_receipts_of_an_older_attempt_never_make_a_commit() -> None:
    coordinator, log, store = make()
    coordinator.begin_attempt(FIRST, world_size=2, base_step=0)
    coordinator.deliver(receipt(store, FIRST, 20, 0))
    coordinator.begin_attempt(SECOND, world_size=1, base_step=10)
    assert coordinator.deliver(receipt(store, FIRST, 20, 1))
    assert coordinator.deliver(receipt(store, SECOND, 20, 0, world_size=1))
    assert coordinator.wait_settled(20, WAIT_S)
    (commit,) = log.commits()
    manifest = log.read_manifest(commit)
    assert [shard.key for shard in manifest.shards] == [shard_key(StepKey(step=20, attempt=SECOND), 0)]


def test_an_older_attempt_s_rank_0_learns_that_it_is_over_and_attempts_only_rise() -> None:
    coordinator, _, _ = make()
    coordinator.begin_attempt(SECOND, world_size=2, base_step=0)
    assert not coordinator.exchange(ExchangeRequest(attempt=FIRST)).is_current
    with pytest.raises(CommitRefused, match="does not rise"):
        coordinator.begin_attempt(FIRST, world_size=2, base_step=0)


def test_a_failed_rank_settles_its_step_without_a_commit() -> None:
    coordinator, log, store = make(CheckpointConfig(), Clock())
    coordinator.begin_attempt(FIRST, world_size=2, base_step=0)
    coordinator.deliver(receipt(store, FIRST, 10, 0))
    coordinator.report_failed(FIRST, 10, 1, "disk full")
    assert coordinator.wait_settled(10, WAIT_S)
    assert log.commits() == []
    failures = [s for s in coordinator.drain_signals() if isinstance(s, SaveFailed)]
    assert [(s.reason, s.next_try_in_s) for s in failures] == [("rank 1: disk full", 30.0)]
    assert coordinator.exchange(ExchangeRequest(attempt=FIRST)).settled_steps == (10,)


def test_news_that_arrives_twice_counts_once_and_a_skipped_save_is_given_up() -> None:
    coordinator, _, _ = make()
    coordinator.begin_attempt(FIRST, world_size=2, base_step=0)
    bound = BoundOrder(number=0, kind=OrderKind.SNAPSHOT, step=10)
    request = ExchangeRequest(attempt=FIRST, reports=(report(1), report(2)), bound=(bound,))
    coordinator.exchange(request)
    coordinator.exchange(request)
    coordinator.exchange(ExchangeRequest(attempt=FIRST, skipped=(10,)))
    signals = coordinator.drain_signals()
    assert [s.report.step for s in signals if isinstance(s, StepFinished)] == [1, 2]
    assert [s.step for s in signals if isinstance(s, SaveSkipped)] == [10]
    assert coordinator.wait_settled(10, WAIT_S)


def test_a_leave_order_rises_above_earlier_ones_and_the_time_policy_orders_a_snapshot() -> None:
    clock = Clock()
    coordinator, _, _ = make(CheckpointConfig(every_s=60), clock)
    coordinator.begin_attempt(FIRST, world_size=2, base_step=0)
    assert coordinator.exchange(ExchangeRequest(attempt=FIRST, reports=(report(1),))).order is None
    clock.now = 61.0
    order = coordinator.exchange(ExchangeRequest(attempt=FIRST, reports=(report(2),))).order
    assert order is not None
    assert (order.kind, order.number, order.not_before_step) == (OrderKind.SNAPSHOT, 1, 3)
    assert coordinator.submit_leave("drain") == 2
    order = coordinator.exchange(ExchangeRequest(attempt=FIRST)).order
    assert order is not None
    assert order.kind is OrderKind.LEAVE


@pytest.mark.parametrize("kind", [OrderKind.LEAVE, OrderKind.PART])
def test_no_order_to_save_takes_the_place_of_one_to_leave(kind: OrderKind) -> None:
    clock = Clock()
    coordinator, _, _ = make(CheckpointConfig(every_steps=None, every_s=5.0), clock)
    coordinator.begin_attempt(FIRST, world_size=2, base_step=0)
    leave = coordinator.submit_leave("a node joins", kind)
    assert coordinator.submit_snapshot("asked for") == leave
    clock.now = 60.0  # the time policy wants a save, too
    order = coordinator.exchange(ExchangeRequest(attempt=FIRST, reports=(report(1),))).order
    assert order is not None
    assert (order.number, order.kind) == (leave, kind)
    coordinator.begin_attempt(SECOND, world_size=2, base_step=1)
    assert coordinator.submit_snapshot("asked for") > leave


def test_a_policy_s_reason_is_carried_into_the_order_the_bound_save_and_the_weighing() -> None:
    clock = Clock()
    policy = SavePolicyConfig(policies=("best-metric",), min_interval_s=0.0)
    coordinator, _, _ = make(CheckpointConfig(), clock, policy=policy)
    coordinator.begin_attempt(SECOND, world_size=2, base_step=0)
    clock.now = 5.0
    best = EvalReport(step=3, loss=2.0, best=2.0, best_step=3)
    reports = (report(1), report(2), report(3))
    older = coordinator.exchange(ExchangeRequest(attempt=FIRST, reports=reports, evals=(best,)))
    assert (older.is_current, older.order) == (False, None)
    assert coordinator.exchange(ExchangeRequest(attempt=SECOND)).order is None
    order = coordinator.exchange(ExchangeRequest(attempt=SECOND, reports=reports, evals=(best,))).order
    assert order is not None
    assert order.reason == "best-metric: step 3 has the best evaluation so far, no earlier best is saved"
    bound = BoundOrder(number=order.number, kind=OrderKind.SNAPSHOT, step=6)
    again = coordinator.exchange(ExchangeRequest(attempt=SECOND, bound=(bound,))).order
    assert again == order, "what is bound is not wished once more"
    signals = coordinator.drain_signals()
    assert [s.reason for s in signals if isinstance(s, SaveBound)] == [order.reason]
    wishes = [s.weighed.wish for s in signals if isinstance(s, SaveWeighed) and s.weighed.wish is not None]
    assert [wish.reason for wish in wishes] == [order.reason]


def test_a_base_in_memory_alone_is_no_commit_and_a_world_that_leaves_is_asked_for_no_save() -> None:
    clock = Clock()
    coordinator, _, _ = make(CheckpointConfig(), clock)
    coordinator.begin_attempt(FIRST, world_size=2, base_step=60, durable_step=40)
    coordinator.exchange(ExchangeRequest(attempt=FIRST, reports=(report(61),)))
    coordinator.submit_leave("a node joins")
    clock.now = 1e6
    coordinator.exchange(ExchangeRequest(attempt=FIRST, reports=(report(62),)))
    assert not [signal for signal in coordinator.drain_signals() if isinstance(signal, SaveWeighed)]
    coordinator.begin_attempt(SECOND, world_size=2, base_step=62, durable_step=40)
    coordinator.exchange(ExchangeRequest(attempt=SECOND, reports=(report(63),)))
    clock.now += 30.0
    order = coordinator.exchange(ExchangeRequest(attempt=SECOND)).order
    assert order is not None
    assert order.reason.startswith("hazard: no commit since step 40, ")


@pytest.mark.parametrize(("is_delayed", "words"), [(True, "no save measured yet"), (False, "no failure seen yet")])
def test_how_long_a_store_was_away_is_no_measure_of_a_save(is_delayed: bool, words: str) -> None:
    clock = Clock()
    coordinator, _, store = make(CheckpointConfig(), clock)
    coordinator.begin_attempt(FIRST, world_size=2, base_step=0)
    bound = BoundOrder(number=0, kind=OrderKind.SNAPSHOT, step=10)
    coordinator.exchange(ExchangeRequest(attempt=FIRST, reports=(report(10),), bound=(bound,)))
    if is_delayed:
        coordinator.report_delayed(FIRST, 10, 1, "503", 4.0)
    commit_step(coordinator, store, FIRST, 10)
    clock.now = 1000.0
    coordinator.exchange(ExchangeRequest(attempt=FIRST, reports=(report(11),)))
    (weighed,) = [s.weighed for s in coordinator.drain_signals() if isinstance(s, SaveWeighed)][-1:]
    assert words in {opinion.policy: opinion.why for opinion in weighed.opinions}["hazard"]


def test_only_keep_checkpoints_stay_and_the_plan_names_the_newest() -> None:
    coordinator, log, store = make(CheckpointConfig(every_steps=10, keep=3))
    coordinator.begin_attempt(FIRST, world_size=2, base_step=0)
    for step in (9, 10, 99, 100):
        commit_step(coordinator, store, FIRST, step)
    plan = coordinator.choose_plan(SECOND, None, False, None)  # waits behind the deletions
    assert plan is not None
    assert plan.step == 100
    assert [c.step for c in log.commits()] == [10, 99, 100]


def test_resume_from_a_step_that_was_never_committed_names_those_that_were() -> None:
    coordinator, _, store = make()
    coordinator.begin_attempt(FIRST, world_size=2, base_step=0)
    commit_step(coordinator, store, FIRST, 10)
    with pytest.raises(ObjectMissing, match="10"):
        coordinator.choose_plan(SECOND, 30, False, None)


def test_a_step_that_one_rank_skipped_is_given_up_when_that_rank_delivers_a_later_one() -> None:
    coordinator, log, store = make(CheckpointConfig())
    coordinator.begin_attempt(FIRST, world_size=2, base_step=0)
    coordinator.deliver(receipt(store, FIRST, 10, 0))
    coordinator.deliver(receipt(store, FIRST, 20, 0))
    assert coordinator.pending() == {10: (1,), 20: (1,)}
    coordinator.deliver(receipt(store, FIRST, 20, 1))
    assert coordinator.wait_settled(20, WAIT_S)
    assert coordinator.wait_settled(10, WAIT_S)
    assert [c.step for c in log.commits()] == [20]
    failed = [s for s in coordinator.drain_signals() if isinstance(s, SaveFailed)]
    assert [(s.step, s.reason) for s in failed] == [(10, "rank 1 found no free buffer for it")]
    coordinator.report_failed(FIRST, 30, 1, "superseded by step 40 while the store was away: StoreUnavailable: 503")
    failed += [s for s in coordinator.drain_signals() if isinstance(s, SaveFailed)]
    assert [s.next_try_in_s for s in failed] == [None, None], "a newer one takes their place"


def test_a_commit_outlasts_an_outage_that_a_plan_is_told_of_and_exchange_does_not_notice() -> None:
    memory = AwayStore(prefix=MANIFESTS)
    again = threading.Semaphore(0)
    coordinator, log, store = make(memory=memory, pause=lambda: again.acquire(timeout=WAIT_S))
    coordinator.begin_attempt(FIRST, world_size=2, base_step=0)
    memory.is_away = True
    for rank in range(2):
        coordinator.deliver(receipt(store, FIRST, 10, rank))
    with pytest.raises(StoreUnavailable, match=r"waiting behind a Commit.*connection refused"):
        coordinator.choose_plan(SECOND, None, False, None)
    assert coordinator.exchange(ExchangeRequest(attempt=FIRST, reports=(report(11),))).is_current
    delays = [s for s in coordinator.drain_signals() if isinstance(s, SaveDelayed)]
    assert [(s.step, s.rank) for s in delays] == [(10, None)]
    assert "connection refused" in delays[0].reason
    memory.is_away = False
    again.release()
    plan = coordinator.choose_plan(SECOND, None, False, None)  # behind the Commit: the plan has its step
    assert plan is not None
    assert plan.step == 10
    assert [commit.step for commit in log.commits()] == [10]


def test_what_a_keeper_says_of_its_trouble_is_passed_on_once_a_second_and_never_for_an_older_attempt() -> None:
    clock = Clock()
    coordinator, _, _ = make(clock=clock)
    coordinator.begin_attempt(SECOND, world_size=2, base_step=0)
    for now in (5.0, 5.5, 6.5):
        clock.now = now
        assert coordinator.report_delayed(SECOND, 10, 1, "503", now - 4.0)
    assert coordinator.report_delayed(FIRST, 10, 1, "503", 9.0)
    delays = [s for s in coordinator.drain_signals() if isinstance(s, SaveDelayed)]
    assert [(s.step, s.rank, s.failing_for_s) for s in delays] == [(10, 1, 1.0), (10, 1, 2.5)]


def test_a_commit_that_hangs_keeps_no_newer_snapshot_away_once_a_keeper_speaks_of_trouble() -> None:
    memory = AwayStore(prefix=MANIFESTS)
    hung = threading.Event()
    coordinator, _, store = make(memory=memory)
    memory.before_call = lambda: hung.wait(WAIT_S)
    coordinator.begin_attempt(FIRST, world_size=2, base_step=0)
    for rank in range(2):
        coordinator.deliver(receipt(store, FIRST, 10, rank))
    assert coordinator.exchange(ExchangeRequest(attempt=FIRST)).settled_steps == ()
    coordinator.report_delayed(FIRST, 20, 0, "no answer", 3.0)
    assert coordinator.exchange(ExchangeRequest(attempt=FIRST)).settled_steps == (10,)
    hung.set()
    assert coordinator.wait_settled(10, WAIT_S)


def test_the_store_is_asked_and_its_silence_is_an_error() -> None:
    memory = AwayStore()
    coordinator, _, _ = make(memory=memory)
    coordinator.check_store()
    memory.is_away = True
    with pytest.raises(StoreUnavailable, match="connection refused"):
        coordinator.check_store()


def test_a_coordinator_that_closes_waits_for_no_store() -> None:
    memory = AwayStore()
    again = threading.Semaphore(0)
    coordinator, log, store = make(memory=memory, pause=lambda: again.acquire(timeout=WAIT_S))
    coordinator.begin_attempt(FIRST, world_size=2, base_step=0)
    shards = [receipt(store, FIRST, 10, rank) for rank in range(2)]
    memory.is_away = True
    for shard in shards:
        coordinator.deliver(shard)
    again.release(3)
    coordinator.close()
    assert [s.step for s in coordinator.drain_signals() if isinstance(s, SaveFailed)] == [10]
    memory.is_away = False
    assert log.commits() == []


def test_commits_that_wait_for_the_store_keep_no_newer_snapshot_away_and_only_the_newest_are_kept() -> None:
    memory = AwayStore(prefix=MANIFESTS)
    again = threading.Semaphore(0)
    coordinator, log, store = make(memory=memory, pause=lambda: again.acquire(timeout=WAIT_S))
    coordinator.begin_attempt(FIRST, world_size=2, base_step=0)
    memory.is_away = True
    for step in (10, 20, 30, 40, 50):
        for rank in range(2):
            coordinator.deliver(receipt(store, FIRST, step, rank))
        if step == 10:
            assert memory.failed.wait(WAIT_S)
    assert set(coordinator.exchange(ExchangeRequest(attempt=FIRST)).settled_steps) == {10, 20, 30, 40, 50}
    memory.is_away = False
    again.release(2)
    assert coordinator.wait_settled(None, WAIT_S)
    assert [commit.step for commit in log.all_commits()] == [10, 40, 50]
    failed = [(s.step, s.reason.split(":")[0]) for s in coordinator.drain_signals() if isinstance(s, SaveFailed)]
    assert failed == [(20, "superseded by step 40"), (30, "superseded by step 50")]


def test_an_order_to_part_is_told_once_and_no_checkpoint_is_expected_of_it() -> None:
    coordinator, log, _ = make()
    coordinator.begin_attempt(FIRST, world_size=2, base_step=0)
    number = coordinator.submit_leave("a node joins", OrderKind.PART)
    order = coordinator.exchange(ExchangeRequest(attempt=FIRST, reports=(report(1),))).order
    assert order is not None
    assert (order.number, order.kind) == (number, OrderKind.PART)
    bound = BoundOrder(number=number, kind=OrderKind.PART, step=4)
    for _ in range(2):  # a call that failed may have arrived
        coordinator.exchange(ExchangeRequest(attempt=FIRST, bound=(bound,)))
    assert coordinator.pending() == {}
    assert coordinator.wait_settled(None, 0.0)
    said = [s for s in coordinator.drain_signals() if isinstance(s, SaveBound)]
    assert [(s.bound, s.reason) for s in said] == [(bound, "a node joins")]
    assert log.commits() == []
    coordinator.close()

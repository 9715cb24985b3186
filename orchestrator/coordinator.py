"""The coordinator: asks the save desk, issues Orders, merges Receipts and is the only writer of Commits.

A plain class; `coordinator_actor` makes it remote. It never asks a rank or a Keeper anything: all comes to it. Slow
work (merging, writing, sweeping) runs on one committer thread, so `exchange` and `deliver` answer at once. While the
store is away that thread goes on trying the Commit at hand; `choose_plan` says so instead of waiting behind it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import assert_never

from orchestrator.committer import CommittedStep, Committer
from orchestrator.committer_thread import CommitterThread
from orchestrator.order_book import OrderBook
from orchestrator.patient_store import PatientStore
from orchestrator.pending_saves import MAX_WHOLE, SUPERSEDED, PendingSaves
from orchestrator.save_config import SavePolicyConfig
from orchestrator.save_desk import SaveDesk, ThresholdMove
from orchestrator.save_facts import ClusterFacts, Weighed
from orchestrator.save_times import SaveCost
from orchestrator.signals import (
    Committed,
    Evaluated,
    Quarantined,
    SaveBound,
    SaveDelayed,
    SaveFailed,
    SaveShare,
    SaveSkipped,
    SaveSlow,
    SaveWeighed,
    Signal,
    StepFinished,
    ThresholdMoved,
)
from orchestrator.slow_saves import SlowSave, SlowSaves
from orchestrator.step_book import StepBook
from storage.config import CheckpointConfig
from storage.errors import CommitRefused, StorageError
from storage.keys import LEASES, Attempt, StepKey
from storage.manifest import Receipt
from storage.replicas import Disagreement, ReplicasDisagree
from storage.sources import RestorePlan
from workers.contract import BoundOrder, ExchangeReply, ExchangeRequest, OrderKind

__all__ = ["Coordinator"]

_log = logging.getLogger(__name__)
_CHECK_S = 10.0
_REPEAT_S = 1.0  # the same delay is passed on at most once in this time
_MAX_SIGNALS = 20_000  # the controller drains several times a second; past this the oldest step reports are dropped


class Coordinator:
    """One per driver. Thread-safe."""

    def __init__(
        self,
        *,
        committer: Committer,
        store: PatientStore,
        config: CheckpointConfig,
        policy: SavePolicyConfig,
        total_steps: int,
        monotonic: Callable[[], float],
    ) -> None:
        self._committer = committer
        self._store = store  # the one that the committer writes to
        self._monotonic = monotonic
        self._lock = threading.Condition()
        self._attempt: Attempt | None = None
        self._base_step = 0
        self._pending = PendingSaves()
        self._slow = SlowSaves()
        self._delays: dict[tuple[int, int | None], float] = {}
        self._signals: deque[Signal] = deque(maxlen=_MAX_SIGNALS)
        self._orders = OrderBook(total_steps)
        self._steps = StepBook()
        self._desk = SaveDesk(policy, config, total_steps=total_steps)
        self._thread = CommitterThread(committer, store, monotonic)

    # -- the controller's calls -------------------------------------------------------------------------------------

    def begin_attempt(
        self, attempt: Attempt, *, world_size: int, base_step: int, durable_step: int | None = None
    ) -> None:
        """Fence off every older Attempt: its Orders, reports and Receipts are refused from here on.

        ``durable_step``: of the newest Commit, where ``base_step`` is in memory alone and that is known.
        """
        with self._lock:
            if self._attempt is not None and attempt.number <= self._attempt.number:
                raise CommitRefused(f"attempt {attempt.label} does not rise above {self._attempt.label}")
            self._attempt = attempt
            self._base_step = base_step
            self._orders.begin(attempt)
            self._steps.begin(base_step)
            self._desk.begin_attempt(base_step, self._monotonic(), durable_step)
            self._pending.begin(world_size)
            self._thread.submit(self._sweep_dead, attempt)
            self._slow.forget_all()
            self._delays.clear()
            self._lock.notify_all()

    def _sweep_dead(self, attempt: Attempt) -> None:
        try:
            self._committer.sweep_dead(attempt)
        except StorageError as error:
            _log.warning("what earlier Attempts left stays for now: %s", error)

    def tell_cluster(self, facts: ClusterFacts) -> None:
        """What the driver knows of failures and nodes: at the start of an Attempt and when it changes."""
        with self._lock:
            self._desk.tell_cluster(facts, self._monotonic())

    def submit_leave(self, reason: str, kind: OrderKind = OrderKind.LEAVE) -> int:
        """Order all ranks to snapshot and leave as soon as they can; returns the Order's number.

        ``kind`` PART: the Snapshot stays in memory, and no Checkpoint of its step is to be expected.
        """
        with self._lock:
            return self._orders.issue(kind, reason, newest_step=self._steps.newest_step).number

    def submit_snapshot(self, reason: str) -> int:
        """Order a Snapshot on demand."""
        with self._lock:
            return self._orders.issue(OrderKind.SNAPSHOT, reason, newest_step=self._steps.newest_step).number

    def drain_signals(self) -> tuple[Signal, ...]:
        """Everything observed since the last call, in order."""
        with self._lock:
            if self._attempt is not None:
                for slow in self._slow.overdue(self._pending.missing(), self._monotonic()):
                    self._say_slow(self._attempt, slow)
            signals = tuple(self._signals)
            self._signals.clear()
            return signals

    def wait_settled(self, step: int | None, timeout_s: float) -> bool:
        """Wait until the save of ``step`` (None: every pending save) is committed or given up. False on time-out."""
        deadline = self._monotonic() + timeout_s
        with self._lock:
            while not self._pending.is_settled(step):
                left = deadline - self._monotonic()
                if left <= 0:
                    return False
                self._lock.wait(left)
            return True

    def has_committed(self, step: int) -> bool:
        """True when this driver's present Attempt committed ``step``."""
        with self._lock:
            return step in self._pending.committed

    def pending(self) -> dict[int, tuple[int, ...]]:
        """Steps under way and, for each, the ranks whose Receipt is missing."""
        with self._lock:
            return self._pending.missing()

    def choose_plan(
        self, attempt: Attempt, step: int | None, allow_partial: bool, url: str | None
    ) -> RestorePlan | None:
        """The one answer to where ``attempt`` goes on. Bad Checkpoints met on the way are quarantined and signalled.

        Raises StoreUnavailable while a Commit waits for the store, whose step the plan would miss: ask again.
        """
        plan, quarantined = self._thread.choose_plan(attempt, step, allow_partial, url)
        with self._lock:
            for key, object_key, reason in quarantined:
                self._signals.append(Quarantined(attempt=attempt, step=key.step, key=object_key, reason=reason))
        return plan

    def check_store(self) -> None:
        """Ask the store for a short listing. Raises StoreUnavailable."""
        self._store.list(LEASES, deadline_s=_CHECK_S)

    def quarantine(self, key: StepKey, object_key: str, reason: str, url: str | None = None) -> None:
        """Take a Checkpoint that a rank could not read out of use, for good. ``url``: it is another Run's."""
        self._committer.quarantine(key, object_key, reason, url)
        with self._lock:
            attempt = self._attempt or key.attempt
            self._signals.append(Quarantined(attempt=attempt, step=key.step, key=object_key, reason=reason))

    def close(self, timeout_s: float = 30.0) -> None:
        """Finish what the committer thread holds, but wait for no store."""
        self._thread.close(timeout_s)

    # -- rank 0's call ----------------------------------------------------------------------------------------------

    def exchange(self, request: ExchangeRequest) -> ExchangeReply:
        """Take rank 0's news, give the newest Order. An older Attempt learns that it is no longer current."""
        with self._lock:
            if self._attempt != request.attempt:
                return ExchangeReply(attempt=request.attempt, order=None, settled_steps=(), is_current=False)
            self._take_news(request)
            self._consult(request.attempt)
            settled = self._pending.settled_steps()
            if self._store.trouble is not None or self._delays:
                # Nothing of them is left in a Keeper: they must not keep newer Snapshots out of it for a whole outage.
                settled += self._pending.whole_steps
            return ExchangeReply(
                attempt=request.attempt, order=self._orders.newest, settled_steps=settled, is_current=True
            )

    def _take_news(self, request: ExchangeRequest) -> None:
        now = self._monotonic()
        self._desk.take_steps(request.reports, now)
        for report in request.reports:
            if self._steps.add(report):
                self._signals.append(StepFinished(attempt=request.attempt, report=report))
        for evaluation in request.evals:
            if self._steps.add_evaluation(evaluation):
                self._desk.take_evaluation(evaluation)
                self._signals.append(Evaluated(attempt=request.attempt, report=evaluation))
        for bound in request.bound:
            self._take_bound(request.attempt, bound, now)
        for step in request.skipped:
            self._pending.give_up(step)
            self._forget_times(step)
            self._desk.gave_up(step)
            self._signals.append(SaveSkipped(attempt=request.attempt, step=step))
        for share in request.shares:
            self._signals.append(SaveShare(attempt=request.attempt, report=share))
        self._steps.prune()

    def _take_bound(self, attempt: Attempt, bound: BoundOrder, now: float) -> None:
        if bound.kind is OrderKind.PART:  # no Receipt will come of it: its Snapshot stays in memory
            is_news = self._orders.is_first_word_of_parting(bound)
        else:
            is_news = self._pending.expect(bound.step)
            if is_news:
                self._desk.bound(bound, now)
                self._slow.begin(bound.step, now)
                for step in self._pending.crowded_out():
                    self._give_up(attempt, step, "Receipts of some ranks have not come, nor for several later saves")
        if is_news:
            self._signals.append(SaveBound(attempt=attempt, bound=bound, reason=self._orders.reason_of(bound)))

    def _consult(self, attempt: Attempt) -> None:
        wish = None if self._orders.is_leaving else self._desk.consult(self._monotonic())
        if wish is not None:
            self._orders.issue(OrderKind.SNAPSHOT, wish.reason, newest_step=self._steps.newest_step)
        self._pass_on(attempt)

    def _pass_on(self, attempt: Attempt) -> None:
        """What the save desk finds worth an event."""
        for news in self._desk.take_news():
            match news:
                case Weighed():
                    self._signals.append(SaveWeighed(attempt=attempt, weighed=news))
                case ThresholdMove():
                    self._signals.append(ThresholdMoved(attempt=attempt, move=news))
                case _:
                    assert_never(news)

    # -- the Keepers' calls -----------------------------------------------------------------------------------------

    def deliver(self, receipt: Receipt) -> bool:
        """Take a Receipt. True always means: do not send it again (taken, known, or refused for good)."""
        attempt = receipt.attempt.value()
        with self._lock:
            if attempt != self._attempt:
                where = f"rank {receipt.shard.rank}, step {receipt.step}"
                _log.warning("receipt of %s refused: attempt %s is over", where, attempt.label)
                return True
            is_whole = self._pending.add(receipt)
            for step in self._pending.overtaken_by(receipt):
                self._give_up(attempt, step, f"rank {receipt.shard.rank} found no free buffer for it")
            if is_whole:
                self._thread.submit(self._commit, attempt, self._base_step, receipt.step)
                self._bound_waiting(attempt)
        return True

    def _bound_waiting(self, attempt: Attempt) -> None:
        """Commits that wait for the store are bounded too: the newest are worth most. The oldest is being tried."""
        _, *waiting = self._pending.whole_steps
        for step in waiting[: -(MAX_WHOLE - 1)]:
            self._give_up(attempt, step, f"{SUPERSEDED} {waiting[-1]}: its Commit could not be written meanwhile")

    def deliver_many(self, receipts: tuple[Receipt, ...]) -> tuple[bool, ...]:
        """`deliver` for each of them: one call of a Keeper with several ranks."""
        return tuple(self.deliver(receipt) for receipt in receipts)

    def report_delayed(self, attempt: Attempt, step: int, rank: int, reason: str, failing_for_s: float) -> bool:
        """The store fails a Keeper, which keeps the Snapshot and tries again."""
        self._delay(attempt, step, rank, reason, failing_for_s)
        return True

    def _delay(self, attempt: Attempt, step: int, rank: int | None, reason: str, failing_for_s: float) -> None:
        now = self._monotonic()
        with self._lock:
            if attempt != self._attempt or now - self._delays.get((step, rank), -_REPEAT_S) < _REPEAT_S:
                return
            self._delays[step, rank] = now
            self._desk.delayed()
            self._slow.explain(step)
            self._signals.append(
                SaveDelayed(attempt=attempt, step=step, rank=rank, reason=reason, failing_for_s=failing_for_s)
            )

    def report_failed(self, attempt: Attempt, step: int, rank: int, reason: str) -> bool:
        """A Snapshot that will never be durable: its step is given up."""
        with self._lock:
            if attempt == self._attempt:
                self._give_up(attempt, step, f"rank {rank}: {reason}", is_failure=SUPERSEDED not in reason)
        return True

    def _give_up(
        self, attempt: Attempt, step: int, why: str, found: Disagreement | None = None, *, is_failure: bool = False
    ) -> None:
        if self._pending.give_up(step):
            _log.info("save of step %d given up: %s", step, why)  # the driver says it aloud
            self._forget_times(step)
            wait_s = self._desk.gave_up(step, failed_at_s=self._monotonic() if is_failure else None)
            failed = SaveFailed(attempt=attempt, step=step, reason=why, disagreement=found, next_try_in_s=wait_s)
            self._signals.append(failed)
        self._lock.notify_all()

    def _commit(self, attempt: Attempt, base_step: int, step: int) -> None:
        try:
            self._commit_whole(attempt, base_step, step)
        except Exception as error:  # noqa: BLE001 - outer edge of the committer thread: becomes a Signal
            _log.exception("commit of step %d failed", step)
            with self._lock:
                if attempt == self._attempt:
                    found = error.disagreement if isinstance(error, ReplicasDisagree) else None
                    self._give_up(attempt, step, f"{type(error).__name__}: {error}", found, is_failure=True)

    def _commit_whole(self, attempt: Attempt, base_step: int, step: int) -> None:
        with self._lock:
            merge = self._pending.whole(step)
            if attempt != self._attempt or merge is None:
                return
            words = self._steps.of(step)
        began_at = self._monotonic()
        with self._store.patience(lambda reason, for_s: self._delay(attempt, step, None, reason, for_s)):
            done: CommittedStep = self._committer.commit(merge, base_step=base_step, **words._asdict())
        now = self._monotonic()
        receipts = merge.receipts
        cost = SaveCost.of(receipts, commit_s=now - began_at, stored_bytes=done.stored_bytes, raw_bytes=done.raw_bytes)
        write_s = None
        with self._lock:
            if attempt == self._attempt:
                write_s = self._desk.committed(step, cost, now).write_s
                self._pass_on(attempt)
                slow = self._slow.committed(step, receipts, cost.commit_s, now)
                if slow is not None:
                    self._say_slow(attempt, slow)
                self._forget_times(step)
                self._pending.settle_committed(step)
                self._lock.notify_all()
            self._signals.append(
                Committed(
                    attempt=attempt,
                    step=step,
                    stored_bytes=cost.stored_bytes,
                    stall_s=cost.stall_s,
                    upload_s=cost.upload_s,
                    loss=words.loss,
                    encode_s=cost.encode_s,
                    commit_s=cost.commit_s,
                    write_s=write_s,
                    upload_retries=sum(receipt.retries for receipt in receipts),
                )
            )
        try:
            self._committer.retain()
        except StorageError as error:
            _log.warning("old Checkpoints stay for now: %s", error)

    def _say_slow(self, attempt: Attempt, slow: SlowSave) -> None:
        self._signals.append(
            SaveSlow(attempt=attempt, step=slow.step, seconds=slow.seconds, usual_s=slow.usual_s, cause=slow.cause)
        )

    def _forget_times(self, step: int) -> None:
        self._slow.forget(step)
        for key in [key for key in self._delays if key[0] == step]:
            del self._delays[key]

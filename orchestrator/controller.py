"""The controller: gathers workers, runs one Attempt after another, and carries Decisions out until the Run ends.

It decides nothing itself: failure_policy, scaling_policy and heartbeats judge, and states.LEGAL_MOVES says where it may
go. What it does to workers goes through the worker group; what it learns becomes events through the recorder.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from orchestrator.attempt_run import AttemptEnd, AttemptRun, Broken, Finished, Left
from orchestrator.config import RunConfig
from orchestrator.coordinator_client import CoordinatorClient
from orchestrator.decisions import Regroup, Stop, Wait
from orchestrator.exit_codes import ExitCode
from orchestrator.failure_policy import Counters, FaultKind, decide_after_fault, is_outage
from orchestrator.journal import Journal
from orchestrator.node_watcher import NodeWatcher
from orchestrator.recorder import Recorder
from orchestrator.resume import Resume
from orchestrator.scaling_policy import WorkerView, choose_members, wait_reason, workers_that_fit
from orchestrator.states import State, checked_move
from orchestrator.store_waits import StoreWaits
from orchestrator.store_watch import StoreUser
from orchestrator.worker_group import WorkerGroup
from storage.errors import LeaseHeld, StorageError, StoreUnavailable
from storage.keys import Attempt
from storage.sources import RestorePlan
from workers.contract import AttemptSpec, Member, World

__all__ = ["Controller", "RunEnd"]

_log = logging.getLogger(__name__)
IN_FLIGHT_SAVE_S = 3.0  # how long a save that can still become whole is waited for before a restore is planned
AFTER_OUTAGE_S = 45.0  # the same, where a Keeper tries again every half minute
LAST_WORD_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    exit_code: ExitCode
    reason: str
    weights_digest: str | None = None


class Controller:
    """Drives one Run from one driver process. `run` returns when the Run has ended for this driver."""

    def __init__(
        self,
        *,
        run_id: str,
        config: RunConfig,
        nonce: str,
        group: WorkerGroup,
        watcher: NodeWatcher,
        coordinator: CoordinatorClient,
        journal: Journal,
        recorder: Recorder,
        rendezvous: Callable[[], tuple[str, int]],
        resume: Resume,
        stop_requested: threading.Event,
        lease_lost: threading.Event,
        first_attempt_number: int,
    ) -> None:
        self._run_id = run_id
        self._config = config
        self._nonce = nonce
        self._group = group
        self._watcher = watcher
        self._coordinator = coordinator
        self._journal = journal
        self._recorder = recorder
        self._rendezvous = rendezvous
        self._resume = resume
        self._stop_requested = stop_requested
        self._lease_lost = lease_lost
        self._next_number = first_attempt_number
        self._state = State.GATHERING
        self._counters: Counters = journal.counters()
        self._dead_nodes: set[str] = set()
        self._store = StoreWaits(
            coordinator=coordinator,
            recorder=recorder,
            config=config.checkpoint,
            tick=self._tick,
            asked_to_stop=self._asked_to_stop,
        )

    def run(self) -> RunEnd:
        """Attempt after Attempt until a Stop."""
        cause = "start" if self._journal.last_attempt_number() == 0 else "driver-restart"
        is_first = True
        end: AttemptEnd | None = None
        while True:
            members = self._gather(wait_for_more=is_first)
            if isinstance(members, Stop):
                return self._end(members)
            is_first = False
            ended = self._attempt(members, cause, end)
            if isinstance(ended, Stop):
                return self._end(ended)
            end = ended
            decision = self._after(end)
            if isinstance(decision, Stop):
                digest = end.weights_digest if isinstance(end, Finished) else None
                return self._end(decision, digest)
            cause = decision.cause

    # -- gathering --------------------------------------------------------------------------------------------------

    def _gather(self, *, wait_for_more: bool) -> tuple[WorkerView, ...] | Stop:
        """Ready workers for a World; waits below the minimum, at the first start also a grace for the maximum."""
        self._move(State.GATHERING)
        world = self._config.world
        began = time.monotonic()
        said: Wait | None = None
        while True:
            self._tick()
            stop = self._asked_to_stop() or self._refused_to_start()
            if stop is not None:
                return stop
            views = self._group.views(self._draining())
            members = choose_members(views, world)
            waited = time.monotonic() - began
            if len(members) >= world.min_workers:
                is_full = len(members) >= world.max_workers
                settled = not self._group.is_someone_starting and waited >= world.start_grace_s
                if is_full or settled or not wait_for_more:
                    return members
            else:
                num_starting = sum(1 for view in views if not view.is_ready)
                wait = wait_reason(len(members), num_starting, world)
                said = self._say_waiting(wait, said, waited)
                if waited > world.max_wait_s:
                    text = f"waited {waited:.0f} s (world.max_wait_s) for {wait.missing}"
                    return Stop(exit_code=ExitCode.BELOW_MINIMUM, reason=text)
            time.sleep(min(0.1, self._config.failure.poll_s))

    def _refused_to_start(self) -> Stop | None:
        """Waiting for more workers is in vain when the code of each of them raises before it is warm."""
        refusal = self._group.refusal()
        if refusal is None:
            return None
        text = f"no worker can start; worker {refusal.worker_id} on node {refusal.node_id[:12]}: {refusal.reason}"
        return Stop(exit_code=ExitCode.CONFIG_ERROR, reason=text)

    def _say_waiting(self, wait: Wait, said: Wait | None, waited_s: float) -> Wait | None:
        """Say what is waited for, once for each change; workers that are just starting get their grace first."""
        is_overdue = not self._group.is_someone_starting or waited_s > self._config.world.start_grace_s
        if wait == said or not is_overdue:
            return said
        self._recorder.emit("waiting", have=wait.have, need=wait.need, missing=wait.missing)
        return wait

    def _tick(self) -> None:
        """Bring the books up to date: signals, dead nodes, new nodes, workers that became ready or failed to start."""
        self._store.take_signals()
        view = self._watcher.view()
        living = view.living()
        for node_id in self._group.known_nodes():
            if node_id not in living or node_id in self._dead_nodes:
                self._group.forget_node(node_id)
        for node_id, node in living.items():
            is_new = node_id not in self._group.known_nodes() and node_id not in self._dead_nodes
            count = workers_that_fit(node.resources, self._config.world)
            if is_new and count and node.drain_deadline_at_s is None:
                self._group.admit(node_id, min(count, self._config.world.max_workers))
        before = {view.worker_id for view in self._group.views(frozenset()) if view.is_ready}
        for lost in self._group.reconcile(self._config.world.max_workers, self._draining()):
            _log.warning("worker %s on node %s did not start: %s", lost.worker_id, lost.node_id[:12], lost.reason)
        for worker in self._group.views(frozenset()):
            if worker.is_ready and worker.worker_id not in before:
                facts = self._group.worker(worker.worker_id).facts
                pid = None if facts is None else facts.pid
                self._recorder.emit("worker_ready", worker=worker.worker_id, node_id=worker.node_id, pid=pid)
        for worker_id, seconds in self._group.starting_for_s().items():
            if seconds > self._config.failure.starting_s:
                _log.warning("worker %s did not start within failure.starting_s; it is replaced", worker_id)
                self._group.remove_worker(worker_id)

    def _draining(self) -> frozenset[str]:
        return self._watcher.view().draining()

    def _asked_to_stop(self) -> Stop | None:
        if self._lease_lost.is_set():
            return Stop(exit_code=ExitCode.REFUSED, reason="another driver has taken the run over")
        if self._stop_requested.is_set():
            return Stop(exit_code=ExitCode.STOPPED, reason="stopped on request")
        return self._store.verdict()

    # -- one attempt ------------------------------------------------------------------------------------------------

    def _attempt(self, members: tuple[WorkerView, ...], cause: str, before: AttemptEnd | None) -> AttemptEnd | Stop:
        """Form a World of ``members``, restore, train; returns how it ended."""
        attempt = Attempt(number=self._next_number, nonce=self._nonce)
        self._next_number += 1
        try:
            plan = self._choose_plan(attempt, before)
        except StoreUnavailable as error:
            return Stop(exit_code=ExitCode.STORAGE_OUTAGE, reason=f"resume: {error}")
        except StorageError as error:
            return Stop(exit_code=ExitCode.CONFIG_ERROR, reason=f"resume: {error}")
        if isinstance(plan, Stop):
            return plan
        world = World(
            attempt=attempt,
            members=tuple(
                Member(rank=rank, worker_id=view.worker_id, node_id=view.node_id) for rank, view in enumerate(members)
            ),
        )
        self._move(State.FORMING)
        restored_step = self._announce(world, cause, plan, before)
        if isinstance(restored_step, Stop):
            return restored_step
        self._store.begin_attempt(restored_step)
        self._coordinator.begin_attempt(attempt, world.size, restored_step)
        run = AttemptRun(
            world=world,
            group=self._group,
            coordinator=self._coordinator,
            config=self._config,
            recorder=self._recorder,
            tick=self._tick,
            draining=self._draining,
            living=lambda: frozenset(self._watcher.view().living()) - self._dead_nodes,
            asked_to_stop=self._asked_to_stop,
            is_store_away=lambda: self._store.is_away,
            move=self._move,
        )
        return run.run(self._specs(world, plan))

    def _choose_plan(self, attempt: Attempt, before: AttemptEnd | None) -> RestorePlan | Stop | None:
        """Where to go on. A save that every living rank already handed over is waited for first."""
        stop: Stop | None = None
        if isinstance(before, Left):
            stop = self._store.wait_settled(before.step, self._config.checkpoint.leave_timeout_s)
        elif isinstance(before, Broken) and not before.facts.lost_nodes and self._coordinator.pending():
            stop = self._store.wait_settled(None, AFTER_OUTAGE_S if self._store.is_away else IN_FLIGHT_SAVE_S)
        if stop is not None:
            return stop
        self._store.take_signals()
        if self._recorder.num_commits:
            # Only now: an Attempt that broke before its first Commit must not go on from elsewhere, or from nothing.
            self._resume = Resume(allow_partial=self._config.run.allow_partial)
        resume = self._resume
        plan = self._store.call(
            StoreUser.PLAN,
            lambda: self._coordinator.choose_plan(attempt, resume.step, resume.allow_partial, resume.url),
            outlasts_refusals=self._recorder.num_commits > 0,
        )
        return resume.narrowed(plan) if isinstance(plan, RestorePlan) else plan

    def _announce(self, world: World, cause: str, plan: RestorePlan | None, before: AttemptEnd | None) -> int | Stop:
        """Journal the Attempt and its plan before any rank loads; returns the step it resumes from."""
        restored_step = plan.step if plan is not None else 0
        lost_steps = self._recorder.lost_steps(restored_step)
        detected_s = self._recorder.since_start_s(before.detected_at_s) if isinstance(before, Broken | Left) else None
        # Before any rank loads: a number that is not in the Journal could be another driver's too.
        stop = self._write_journal(
            "attempt",
            number=world.attempt.number,
            nonce=world.attempt.nonce,
            cause=cause,
            world=[[member.worker_id, member.node_id] for member in world.members],
            restored_step=restored_step,
            restored_from=plan.source.stem if plan is not None else None,
            restored_levels=plan.levels if plan is not None else None,
            lost_steps=lost_steps,
        )
        if stop is not None:
            return stop
        self._recorder.attempt_started(
            world.attempt,
            world.size,
            cause=cause,
            restored_step=restored_step,
            restored_from=plan.tier if plan is not None else "none",
            restored_levels=plan.levels if plan is not None else None,
            fault_s=None,
            detected_s=detected_s,
            lost_steps=lost_steps,
            members=[member.worker_id for member in world.members],
        )
        _log.info("attempt %d: %d workers, from step %d (%s)", world.attempt.number, world.size, restored_step, cause)
        self._recorder.forget_beyond(restored_step)
        return restored_step

    def _write_journal(self, kind: str, **values: Any) -> Stop | None:
        write = partial(self._journal.append_counters, kind, self._counters, **values)
        try:
            return self._store.call(StoreUser.JOURNAL, write)
        except LeaseHeld as error:
            return Stop(exit_code=ExitCode.REFUSED, reason=str(error))

    def _specs(self, world: World, plan: RestorePlan | None) -> dict[str, AttemptSpec]:
        host, port = self._rendezvous()
        return {
            member.worker_id: AttemptSpec(
                run_id=self._run_id,
                world=world,
                rank=member.rank,
                store_host=host,
                store_port=port,
                group_timeout_s=self._config.failure.group_timeout_s,
                restore=plan,
                data_override=self._config.data.allow_changed,
            )
            for member in world.members
        }

    # -- after an attempt -------------------------------------------------------------------------------------------

    def _after(self, end: AttemptEnd) -> Regroup | Stop:
        match end:
            case Finished():
                return self._await_final_commit()
            case Left(stop=Stop() as stop):
                return self._store.last_try(end.step, self._config.checkpoint.leave_timeout_s, stop)
            case Left():
                return self._after_leaving(end)
            case Broken():
                return self._after_fault(end)

    def _await_final_commit(self) -> Stop:
        self._move(State.SAVING)
        total = self._config.run.steps
        stop = self._store.wait_settled(total, self._config.checkpoint.final_timeout_s)
        self._store.take_signals()
        if self._coordinator.has_committed(total):
            return Stop(exit_code=ExitCode.SUCCESS, reason=f"finished step {total}")
        if stop is not None:
            return stop
        reason = f"step {total} was trained but its final save was not committed; see the save_failed events"
        return Stop(exit_code=ExitCode.FINAL_SAVE_FAILED, reason=reason)

    def _after_leaving(self, end: Left) -> Regroup | Stop:
        if end.cause == FaultKind.PREEMPTION.value:
            self._counters = replace(self._counters, preemptions=self._counters.preemptions + 1)
            limit = self._config.failure.max_preemptions
            if 0 <= limit < self._counters.preemptions:
                reason = f"{self._counters.preemptions} preemptions, failure.max_preemptions is {limit}"
                return Stop(exit_code=ExitCode.PREEMPTED, reason=reason)
        return Regroup(cause=end.cause, reason=end.reason)

    def _after_fault(self, end: Broken) -> Regroup | Stop:
        for node_id in end.facts.lost_nodes:
            self._dead_nodes.add(node_id)
            self._group.forget_node(node_id)
        for worker_id in end.facts.lost_workers:
            self._group.remove_worker(worker_id)
        root = end.fault.root
        if root is not None and root.corrupt_step is not None:
            bad, key, why = root.corrupt_step, root.corrupt_key or "-", root.message
            url = self._resume.url if self._recorder.num_commits == 0 else None
            try:
                stop = self._store.call(StoreUser.PLAN, lambda: self._coordinator.quarantine(bad, key, why, url))
            except StorageError as error:
                reason = f"{end.fault.detail}; taking it out of use failed: {error}"
                return Stop(exit_code=ExitCode.STORAGE_OUTAGE, reason=reason)
            if stop is not None:
                return stop
        decision, self._counters = decide_after_fault(
            end.fault,
            self._counters,
            self._config.failure,
            steps_finished=self._recorder.steps_this_attempt,
            steps_kept=self._recorder.commits_this_attempt,
        )
        kind = type(decision).__name__.lower()
        stop = self._write_journal("decision", decision=kind, reason=decision.reason)
        if stop is not None:
            return stop
        self._recorder.emit("decision", decision=kind, reason=decision.reason)
        if is_outage(end.fault) and isinstance(decision, Regroup):
            return self._store.loading_failed(end.fault.detail) or decision
        return decision

    def _end(self, stop: Stop, weights_digest: str | None = None) -> RunEnd:
        self._store.take_signals()
        self._move(State.ENDED)
        if stop.exit_code is not ExitCode.REFUSED:
            end = {"exit_code": int(stop.exit_code), "reason": stop.reason}
            try:
                self._journal.append_counters("end", self._counters, deadline_s=LAST_WORD_S, **end)
            except StorageError as error:
                _log.warning("the end of this driver is not in the Journal: %s", error)
        return RunEnd(exit_code=stop.exit_code, reason=stop.reason, weights_digest=weights_digest)

    def _move(self, following: State) -> None:
        if following is not self._state:
            _log.debug("controller: %s -> %s", self._state.value, following.value)
        self._state = checked_move(self._state, following)

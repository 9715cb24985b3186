"""The controller: gathers workers, runs one Attempt after another, and carries Decisions out until the Run ends.

It decides nothing itself: failure_policy, scaling_policy and heartbeats judge, and states.LEGAL_MOVES says where it may
go. What it does to workers goes through the worker group; what it learns becomes events through the recorder.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.aftermath import Aftermath
from orchestrator.attempt_run import AttemptEnd, AttemptRun, Broken, Finished, Left
from orchestrator.config import RunConfig
from orchestrator.coordinator_client import CoordinatorClient
from orchestrator.decisions import Stop
from orchestrator.exit_codes import ExitCode
from orchestrator.gathering import Gathering
from orchestrator.journal import Journal
from orchestrator.node_watcher import NodeWatcher
from orchestrator.recorder import Recorder
from orchestrator.request_work import Desk, RequestWork
from orchestrator.resume import Resume
from orchestrator.scaling_policy import WorkerView
from orchestrator.sizing import SCALE, Sizing
from orchestrator.states import State, checked_move
from orchestrator.store_waits import StoreWaits
from orchestrator.store_watch import StoreUser
from orchestrator.worker_group import WorkerGroup
from storage.errors import StorageError, StoreUnavailable
from storage.keys import Attempt
from storage.sources import RestorePlan
from workers.contract import AttemptSpec, Member, World

__all__ = ["Controller", "RunEnd"]

_log = logging.getLogger(__name__)
IN_FLIGHT_SAVE_S = 3.0  # how long a save that can still become whole is waited for before a restore is planned
AFTER_OUTAGE_S = 45.0  # the same, where a Keeper tries again every half minute


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
        desk: Desk,
        ask_cluster: Callable[[int], None],
        stop_requested: threading.Event,
        lease_lost: threading.Event,
        first_attempt_number: int,
    ) -> None:
        self._run_id = run_id
        self._config = config
        self._nonce = nonce
        self._group = group
        self._coordinator = coordinator
        self._journal = journal
        self._recorder = recorder
        self._rendezvous = rendezvous
        self._resume = resume
        self._stop_requested = stop_requested
        self._lease_lost = lease_lost
        self._next_number = first_attempt_number
        self._state = State.GATHERING
        self._sizing = Sizing(config, recorder, journal.entries)
        recorder.listen(self._sizing.pace.on_signal)
        self._gathering = Gathering(
            config=config,
            sizing=self._sizing,
            group=group,
            watcher=watcher,
            recorder=recorder,
            take_signals=self._take_news,
            asked_to_stop=self._asked_to_stop,
        )
        self._store: StoreWaits = StoreWaits(
            coordinator=coordinator,
            recorder=recorder,
            config=config.checkpoint,
            tick=self._gathering.tick,
            asked_to_stop=self._asked_to_stop,
        )
        self._aftermath = Aftermath(
            config=config,
            group=group,
            gathering=self._gathering,
            coordinator=coordinator,
            journal=journal,
            recorder=recorder,
            store=self._store,
        )

        sizing, aftermath = self._sizing, self._aftermath
        self._requests = RequestWork(
            desk=desk,
            sizing=sizing,
            record=recorder,
            total_steps=config.run.steps,
            may_order=lambda: self._state is State.RUNNING,
            submit_snapshot=coordinator.submit_snapshot,
            keep_size=lambda workers: aftermath.write_once(SCALE, **sizing.as_entry(workers)),
            ask_cluster=lambda: ask_cluster(sizing.num_workers),
            stop=stop_requested.set,
        )
        recorder.listen(self._requests.on_signal)
        ask_cluster(sizing.num_workers)

    def run(self) -> RunEnd:
        """Attempt after Attempt until a Stop."""
        cause = "start" if self._journal.last_attempt_number() == 0 else "driver-restart"
        is_first = True
        end: AttemptEnd | None = None
        while True:
            self._move(State.GATHERING)
            members = self._gathering.members(wait_for_more=is_first)
            if isinstance(members, Stop):
                return self._end(members)
            is_first = False
            ended = self._attempt(members, cause, end)
            if isinstance(ended, Stop):
                return self._end(ended)
            end = ended
            if isinstance(end, Finished):
                self._move(State.SAVING)
            decision = self._aftermath.after(end, self._resume.url)
            if isinstance(decision, Stop):
                digest = end.weights_digest if isinstance(end, Finished) else None
                return self._end(decision, digest)
            cause = decision.cause

    def _take_news(self) -> None:
        """What the coordinator saw, and what people ask for."""
        self._store.take_signals()
        self._requests.tick()

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
            sizing=self._sizing,
            recorder=self._recorder,
            tick=self._gathering.tick,
            draining=self._gathering.draining,
            living=self._gathering.living,
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
        stop = self._aftermath.write_journal(
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

    def _end(self, stop: Stop, weights_digest: str | None = None) -> RunEnd:
        self._store.take_signals()
        self._move(State.ENDED)
        self._aftermath.write_end(stop)
        self._requests.end(stop.reason, is_stop=stop.exit_code is ExitCode.STOPPED)
        return RunEnd(exit_code=stop.exit_code, reason=stop.reason, weights_digest=weights_digest)

    def _move(self, following: State) -> None:
        if following is not self._state:
            _log.debug("controller: %s -> %s", self._state.value, following.value)
        self._state = checked_move(self._state, following)

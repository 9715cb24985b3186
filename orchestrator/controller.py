"""The controller: gathers workers, runs one Attempt after another, and carries Decisions out until the Run ends.

It decides nothing itself: failure_policy, scaling_policy and heartbeats judge, and states.LEGAL_MOVES says where it may
go. How an Attempt is opened and how its World is watched are attempt_opening's and attempt_run's.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from orchestrator.aftermath import Aftermath
from orchestrator.attempt_opening import AttemptOpening
from orchestrator.attempt_run import AttemptEnd, AttemptRun, Finished
from orchestrator.block_list import BlockList
from orchestrator.cluster_news import ClusterNews
from orchestrator.config import RunConfig
from orchestrator.coordinator_client import CoordinatorClient
from orchestrator.decisions import Stop
from orchestrator.exit_codes import ExitCode
from orchestrator.failure_history import FailureHistory, totals_from
from orchestrator.gathering import Gathering
from orchestrator.journal import Journal
from orchestrator.keepers import KeeperCrew
from orchestrator.leaving import Leaving
from orchestrator.memory_setup import MemorySetup
from orchestrator.memory_survey import KeeperSurvey, adopt_keepers
from orchestrator.node_watcher import NodeWatcher
from orchestrator.plan_chooser import PlanChooser
from orchestrator.recorder import Recorder
from orchestrator.replica_doubt import ReplicaDoubt
from orchestrator.request_work import Desk, RequestWork
from orchestrator.resume import Resume
from orchestrator.save_pace import SavePace
from orchestrator.scaling_policy import WorkerView
from orchestrator.sizing import SCALE, Sizing
from orchestrator.slow_node_watch import SlowNodeWatch
from orchestrator.states import State, checked_move
from orchestrator.store_waits import StoreWaits
from orchestrator.unsaved_work import holds_more, is_in_memory_alone
from orchestrator.worker_group import WorkerGroup
from storage.keys import Attempt
from workers.contract import Member, OrderKind, World

__all__ = ["Controller", "RunEnd"]

_log = logging.getLogger(__name__)
_RESUMABLE = frozenset({ExitCode.BELOW_MINIMUM, ExitCode.STORAGE_OUTAGE, ExitCode.FINAL_SAVE_FAILED})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """``keeps_memory``: Keepers hold newer steps than the store, for the driver that goes on."""

    exit_code: ExitCode
    reason: str
    weights_digest: str | None = None
    keeps_memory: bool = False


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
        crew: KeeperCrew,
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
        durable_step: int | None,
        trained_until_s: float | None,
    ) -> None:
        self._config = config
        self._nonce = nonce
        self._group = group
        self._crew = crew
        self._coordinator = coordinator
        self._journal = journal
        self._recorder = recorder
        self._stop_requested = stop_requested
        self._lease_lost = lease_lost
        self._next_number = first_attempt_number
        self._state = State.GATHERING
        self._history = FailureHistory(totals_from(journal.entries, trained_until_s=trained_until_s))
        self._num_nodes = 0
        self._world: World | None = None  # the newest
        self._cluster_news = ClusterNews(
            history=self._history, view=watcher.view, tell=coordinator.tell_cluster, hands_over=self._hands_over
        )
        self._sizing = Sizing(config, recorder, journal.entries)
        recorder.listen(self._sizing.pace.on_signal)
        is_bounded = config.checkpoint.fidelity == "bounded"
        self._save_pace = SavePace(config.policy.deadline, is_usually_bounded=is_bounded)
        recorder.listen(self._save_pace.on_signal)
        self._slow_nodes = SlowNodeWatch(config, recorder, self._sizing.pace)
        recorder.listen(self._slow_nodes.on_signal)
        self._gathering = Gathering(
            config=config,
            sizing=self._sizing,
            slow_nodes=self._slow_nodes,
            block_list=BlockList(config.failure, BlockList.from_entries(entry.fields for entry in journal.entries)),
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
        self._doubt = ReplicaDoubt()
        recorder.listen(self._doubt.on_signal)
        self._aftermath = Aftermath(
            config=config,
            group=group,
            gathering=self._gathering,
            coordinator=coordinator,
            journal=journal,
            recorder=recorder,
            store=self._store,
            history=self._history,
            unlike_replicas=self._doubt.of_ended,
        )
        self._memory = MemorySetup(config.checkpoint.memory, crew, recorder)
        self._chooser = PlanChooser(
            config=config,
            nonce=nonce,
            entries=journal.entries,
            coordinator=coordinator,
            store=self._store,
            recorder=recorder,
            survey=KeeperSurvey(crew.handles),
            adopt=lambda nodes: adopt_keepers(crew.start, nodes - crew.handles().keys()),
            memory_key=crew.transport_key,
            living=self._gathering.living,
            draining=self._gathering.draining,
            resume=resume,
            durable_step=durable_step,
        )
        self._opening = AttemptOpening(
            run_id=run_id,
            config=config,
            group=group,
            view=watcher.view,
            gathering=self._gathering,
            coordinator=coordinator,
            recorder=recorder,
            sizing=self._sizing,
            aftermath=self._aftermath,
            store=self._store,
            history=self._history,
            cluster_news=self._cluster_news,
            memory=self._memory,
            chooser=self._chooser,
            rendezvous=rendezvous,
            move=self._move,
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
        is_first, is_unsaved = True, False
        end: AttemptEnd | None = None
        while True:
            self._move(State.GATHERING)
            is_unsaved = is_in_memory_alone(end, self._recorder, self._chooser.durable_step, was=is_unsaved)
            members = self._gathering.members(
                wait_for_more=is_first, is_unsaved=is_unsaved, is_save_over=partial(self._aftermath.is_save_over, end)
            )
            if isinstance(members, Stop):
                return self._end(self._aftermath.stopped_between(members, end), end, is_unsaved=is_unsaved)
            is_first = False
            ended = self._attempt(members, cause, end)
            if isinstance(ended, Stop):
                return self._end(ended, end, is_unsaved=is_unsaved)
            end = ended
            if isinstance(end, Finished):
                self._move(State.SAVING)
            decision = self._aftermath.after(end, self._chooser.resume_url)
            if isinstance(decision, Stop):
                return self._end(decision, end, is_unsaved=is_unsaved)
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
        """A World of ``members`` restores and trains; returns how it ended."""
        attempt = Attempt(number=self._next_number, nonce=self._nonce)
        self._next_number += 1
        world = World(
            attempt=attempt,
            members=tuple(
                Member(rank=rank, worker_id=view.worker_id, node_id=view.node_id) for rank, view in enumerate(members)
            ),
        )
        self._world, self._num_nodes = world, len({member.node_id for member in world.members})
        specs = self._opening.open(world, cause, before)
        if isinstance(specs, Stop):
            return specs
        self._slow_nodes.begin(world)
        self._save_pace.begin(world.size, self._opening.state_bytes(world))
        run = AttemptRun(
            world=world,
            group=self._group,
            coordinator=self._coordinator,
            config=self._config,
            leaving=self._leaving_of(world),
            recorder=self._recorder,
            tick=self._tick,
            noticed=lambda: frozenset(self._gathering.notices()),
            living=self._gathering.living,
            move=self._move,
            doubt=self._doubt.of,
        )
        return run.run(specs)

    def _leaving_of(self, world: World) -> Leaving:
        return Leaving(
            world=world,
            group=self._group,
            coordinator=self._coordinator,
            config=self._config,
            sizing=self._sizing,
            slow_nodes=self._slow_nodes,
            recorder=self._recorder,
            draining=self._gathering.draining,
            notices=self._gathering.notices,
            asked_to_stop=self._asked_to_stop,
            is_store_away=lambda: self._store.is_away,
            part_kind=lambda: self._part_kind(world),
            forecast=self._save_pace.forecast,
            move=self._move,
        )

    def _tick(self) -> None:
        self._gathering.tick()
        self._cluster_news.follow()
        self._memory.follow_keepers()
        self._memory.note_errors()
        if self._recorder.steps_this_attempt:  # before, what an older Attempt is sending may be gone on from
            self._crew.fence(self._next_number - 1)

    def _part_kind(self, world: World) -> OrderKind:
        """A World that nobody may take over from must leave its last step in the store: memory goes with the driver."""
        draining = self._gathering.draining()
        staying = [view for view in self._group.views(draining) if view.is_ready and not view.is_draining]
        if len(staying) < self._sizing.world.min_workers or self._aftermath.is_next_preemption_last:
            return OrderKind.LEAVE
        return self._memory.leave_kind(world.members, draining)

    def _hands_over(self) -> bool:
        return self._world is not None and self._part_kind(self._world) is OrderKind.PART

    def _end(self, stop: Stop, end: AttemptEnd | None, *, is_unsaved: bool) -> RunEnd:
        self._store.take_signals()
        durable_step = self._chooser.durable_step
        has_more = holds_more(end, self._recorder, durable_step, is_unsaved=is_unsaved)
        stop = self._aftermath.last_word(stop, end, durable_step=durable_step, is_unsaved=has_more)
        self._move(State.ENDED)
        self._aftermath.write_end(stop)
        self._requests.end(stop.reason, is_stop=stop.exit_code is ExitCode.STOPPED)
        return RunEnd(
            exit_code=stop.exit_code,
            reason=stop.reason,
            weights_digest=end.weights_digest if isinstance(end, Finished) else None,
            keeps_memory=has_more and stop.exit_code in _RESUMABLE,
        )

    def _move(self, following: State) -> None:
        if following is not self._state:
            _log.debug("controller: %s -> %s", self._state.value, following.value)
        self._state = checked_move(self._state, following)
        if following is not State.LEAVING:  # until it has left, a World trains
            self._history.note_running(self._num_nodes if following is State.RUNNING else 0)

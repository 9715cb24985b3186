"""Opens an Attempt: what memory holds for its World, where it goes on, its Journal entry, and the word to each member.

What is chosen is the policies' and the plan chooser's. No rank loads before the Journal has the Attempt and its plan.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from orchestrator.aftermath import Aftermath
from orchestrator.attempt_run import AttemptEnd, Broken, Left
from orchestrator.cluster_news import ClusterNews
from orchestrator.config import RunConfig
from orchestrator.coordinator_client import CoordinatorClient
from orchestrator.decisions import Stop
from orchestrator.exit_codes import ExitCode
from orchestrator.failure_history import FailureHistory
from orchestrator.failure_policy import FaultKind
from orchestrator.gathering import Gathering
from orchestrator.memory_setup import MemorySetup
from orchestrator.node_watcher import ClusterView
from orchestrator.plan_chooser import PlanChooser
from orchestrator.recorder import Recorder
from orchestrator.report_text import count
from orchestrator.scaling_policy import nodes_that_stay
from orchestrator.sizing import Sizing
from orchestrator.states import State
from orchestrator.store_waits import StoreWaits
from orchestrator.worker_group import WorkerGroup
from storage.errors import StorageError, StoreUnavailable
from storage.sources import RestorePlan
from workers.contract import AttemptSpec, World

__all__ = ["AttemptOpening"]

_log = logging.getLogger(__name__)


class AttemptOpening:
    """One per driver. ``view``: the newest picture of the nodes; ``rendezvous``: where the ranks meet."""

    def __init__(
        self,
        *,
        run_id: str,
        config: RunConfig,
        group: WorkerGroup,
        view: Callable[[], ClusterView],
        gathering: Gathering,
        coordinator: CoordinatorClient,
        recorder: Recorder,
        sizing: Sizing,
        aftermath: Aftermath,
        store: StoreWaits,
        history: FailureHistory,
        cluster_news: ClusterNews,
        memory: MemorySetup,
        chooser: PlanChooser,
        rendezvous: Callable[[], tuple[str, int]],
        move: Callable[[State], None],
    ) -> None:
        self._run_id = run_id
        self._config = config
        self._group = group
        self._view = view
        self._gathering = gathering
        self._coordinator = coordinator
        self._recorder = recorder
        self._sizing = sizing
        self._aftermath = aftermath
        self._store = store
        self._history = history
        self._cluster_news = cluster_news
        self._memory = memory
        self._chooser = chooser
        self._rendezvous = rendezvous
        self._move = move

    def open(self, world: World, cause: str, before: AttemptEnd | None) -> dict[str, AttemptSpec] | Stop:
        """The word to each worker of ``world``, once all who must know of the Attempt before it do."""
        plan = self._arrange_memory(world) or self._choose_plan(world, before)
        if isinstance(plan, Stop):
            return plan
        self._move(State.FORMING)
        is_from_memory = plan is not None and plan.memory is not None
        self._history.note_source(is_memory=is_from_memory)
        restored_step = self._announce(world, cause, plan, before)
        if isinstance(restored_step, Stop):
            return restored_step
        durable_step = self._chooser.durable_step if is_from_memory else None
        self._store.begin_attempt(restored_step, durable_step)
        self._coordinator.begin_attempt(world.attempt, world.size, restored_step, durable_step)
        self._cluster_news.begin((member.node_id for member in world.members), self.state_bytes(world))
        if is_from_memory and cause == FaultKind.PREEMPTION.value:
            self._coordinator.submit_snapshot("after a preemption notice: what was in memory alone is to be durable")
        return self._specs(world, plan)

    def _arrange_memory(self, world: World) -> Stop | None:
        homes = {member.node_id for member in world.members}
        # A node without a member is found dead by nobody, and takes no replicas: its agent's lifeline tells at once.
        is_cut = self._group.lifelines.is_agent_cut
        living = {node for node in self._gathering.living() if node in homes or not is_cut(node)}
        return self._memory.arrange(
            world.members,
            nodes={node_id: node for node_id, node in self._view().nodes.items() if node_id in living},
            leaving=self._leaving(world),
            state_bytes=self.state_bytes(world),
        )

    def state_bytes(self, world: World) -> int | None:
        """Of all ranks together; None: nobody tells."""
        return self._group.state_bytes([member.worker_id for member in world.members])

    def _leaving(self, world: World) -> frozenset[str]:
        """Nodes that take no replicas: those with a notice, and, where others are there, those to be given back."""
        draining, listed = self._gathering.draining(), self._view().nodes.keys()
        members = [member.worker_id for member in world.members]
        staying = nodes_that_stay(self._group.views(draining), members, self._sizing.num_workers)
        return draining | (listed - staying) if len(staying) > 1 else draining

    def _choose_plan(self, world: World, before: AttemptEnd | None) -> RestorePlan | Stop | None:
        try:
            return self._chooser.choose(world.attempt, before, [member.node_id for member in world.members])
        except StoreUnavailable as error:
            return Stop(exit_code=ExitCode.STORAGE_OUTAGE, reason=f"resume: {error}")
        except StorageError as error:
            return Stop(exit_code=ExitCode.CONFIG_ERROR, reason=f"resume: {error}")

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
            restored_tier=plan.tier if plan is not None else None,
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
            durable_step=self._chooser.durable_step,
            members=[member.worker_id for member in world.members],
            wanted_workers=self._sizing.world.max_workers,
        )
        workers = count(world.size, "worker")
        _log.info("attempt %d: %s, from step %d (%s)", world.attempt.number, workers, restored_step, cause)
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
                skipped=self._aftermath.skipped,
                memory=self._memory.spec(member.node_id),
            )
            for member in world.members
        }

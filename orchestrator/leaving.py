"""The planned end of one World: whether and when it is to part, by which Order, and whether all part in time.

scaling_policy, slow_nodes and deadline_policy judge; here their facts are gathered and the Order is given, once. What
follows once every rank has left is the controller's business.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from orchestrator.config import RunConfig
from orchestrator.deadline_policy import STEPS_TO_LEAVE, DeadlineFacts, KeepOn, SaveForecast, decide_deadline
from orchestrator.decisions import Keep, Leave, Stop
from orchestrator.failure_policy import FaultKind
from orchestrator.heartbeats import Hang
from orchestrator.recorder import Recorder
from orchestrator.sizing import Sizing
from orchestrator.slow_node_watch import SlowNodeWatch
from orchestrator.states import State
from orchestrator.worker_group import WorkerGroup
from workers.contract import Heartbeat, OrderKind, Phase, World

__all__ = ["Leaving"]

_log = logging.getLogger(__name__)
_LOOKS = 4  # a look that comes late by so many must not cost the usual form


class OrderGiver(Protocol):
    """What this file needs of the coordinator."""

    def submit_leave(self, reason: str, kind: OrderKind) -> int: ...


class Leaving:
    """One per Attempt. ``leave`` None: nothing was ordered yet; then never again.

    ``notices``: nodes with a preemption notice and its deadline, Unix time, 0: unknown. ``draining``: these and other
    nodes that are to be done without. ``part_kind``: by which Order the World can end for one that takes over at once.
    """

    def __init__(
        self,
        *,
        world: World,
        group: WorkerGroup,
        coordinator: OrderGiver,
        config: RunConfig,
        sizing: Sizing,
        slow_nodes: SlowNodeWatch,
        recorder: Recorder,
        draining: Callable[[], frozenset[str]],
        notices: Callable[[], Mapping[str, float]],
        asked_to_stop: Callable[[], Stop | None],
        is_store_away: Callable[[], bool],
        part_kind: Callable[[], OrderKind],
        forecast: Callable[[], SaveForecast],
        move: Callable[[State], None],
        monotonic: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._world = world
        self._nodes = frozenset(member.node_id for member in world.members)
        self._group = group
        self._coordinator = coordinator
        self._config = config
        self._sizing = sizing
        self._slow_nodes = slow_nodes
        self._recorder = recorder
        self._draining = draining
        self._notices = notices
        self._asked_to_stop = asked_to_stop
        self._is_store_away = is_store_away
        self._part_kind = part_kind
        self._forecast = forecast
        self._move = move
        self._monotonic = monotonic
        self._wall_clock = wall_clock
        self._ordered_at = self._looked_at = self._held_up_s = 0.0
        self._was_held_up = False
        self._said: frozenset[str] = frozenset()  # nodes with a notice for which it was said why the World stays
        self.leave: Leave | None = None
        self.kind = OrderKind.LEAVE
        self.ordered_unix_s = 0.0
        self.stop: Stop | None = None

    def consider(self, beats: Mapping[str, Heartbeat | None], *, is_formed: bool) -> None:
        """Look once; orders a Leave where something asks for it. ``beats``: of the members, as far as they came."""
        if self.leave is not None:
            return
        noticed = {node: at_s for node, at_s in self._notices().items() if node in self._nodes}
        stop = self._asked_to_stop()
        if stop is not None:
            self.stop = stop
            self._order(Leave(cause="stop", reason=stop.reason), self._kind_for_stop(noticed, beats))
        elif noticed:
            self._heed(noticed, beats)
        elif is_formed:
            self._consider_size(self._draining())

    def deadline_at_s(self) -> float | None:
        """Unix time of the earliest one of a node of the World; None: there is none, or it is unknown."""
        known = [at_s for node, at_s in self._notices().items() if node in self._nodes and at_s > 0]
        return min(known, default=None)

    def note_first_step(self) -> None:
        """The ranks can meet an Order from here on: what was ordered before gets its time from now."""
        if self.leave is not None:
            self._ordered_at, self._held_up_s = self._monotonic(), 0.0

    def late(
        self, beats: Mapping[str, Heartbeat | None], ended: Collection[str], *, has_stepped: bool
    ) -> tuple[Hang, ...]:
        """Members that did not leave in time, which begins at the step that an Order lands on and does not pass while
        one of them saves, or waits for data unless the Run is to stop: that has a limit of its own. Before the first
        step the limits of its phases hold alone."""
        going = [beat for worker, beat in beats.items() if worker not in ended and beat is not None]
        is_to_end = self.stop is not None or self._asked_to_stop() is not None  # since the Order perhaps
        pausing = {Phase.CHECKPOINTING} if is_to_end else {Phase.CHECKPOINTING, Phase.WAITING_FOR_DATA}
        now, is_held_up = self._monotonic(), any(beat.phase in pausing for beat in going)
        self._held_up_s += now - self._looked_at if self._was_held_up else 0.0
        self._looked_at, self._was_held_up = now, is_held_up
        limit_s = self._config.failure.leaving_s + STEPS_TO_LEAVE * (self._sizing.pace.step_s or 0.0)
        if self.leave is None or not has_stepped or is_held_up or now - self._ordered_at - self._held_up_s <= limit_s:
            return ()
        late = [member.worker_id for member in self._world.members if member.worker_id not in ended]
        return tuple(Hang(worker_id=w, detail=f"did not leave within {limit_s:g} s") for w in late)

    # -- preemption notices -----------------------------------------------------------------------------------------

    def _heed(self, noticed: Mapping[str, float], beats: Mapping[str, Heartbeat | None]) -> None:
        """Nodes of the World are about to go: leave them now, or train on as long as the last save allows."""
        notice = f"preemption notice for node {', '.join(node[:12] for node in sorted(noticed))}"
        kind = self._part_kind()
        if kind is OrderKind.PART:
            self._order(Leave(cause=FaultKind.PREEMPTION.value, reason=f"{notice}: memory hands over"), kind)
            return
        chosen = decide_deadline(self._deadline_facts(noticed, beats), self._config.policy.deadline)
        reason = f"{notice}: {chosen.why}"
        if isinstance(chosen, KeepOn) and self._sizing.world.max_workers >= self._world.size:
            if noticed.keys() != self._said:
                self._said = frozenset(noticed)
                self._emit("keep", reason)
                _log.info("%s", reason)
            return
        kind = OrderKind.LEAVE if isinstance(chosen, KeepOn) else chosen.kind
        self._order(Leave(cause=FaultKind.PREEMPTION.value, reason=reason), kind)

    def _kind_for_stop(self, noticed: Mapping[str, float], beats: Mapping[str, Heartbeat | None]) -> OrderKind:
        """Machines that are taken away may stop the driver too: their deadline holds for its last save as well."""
        if not noticed:
            return OrderKind.LEAVE
        chosen = decide_deadline(self._deadline_facts(noticed, beats), self._config.policy.deadline)
        return OrderKind.LEAVE if isinstance(chosen, KeepOn) else chosen.kind

    def _deadline_facts(self, noticed: Mapping[str, float], beats: Mapping[str, Heartbeat | None]) -> DeadlineFacts:
        known = [at_s for at_s in noticed.values() if at_s > 0]
        step_s = self._sizing.pace.step_s
        has_trained = self._recorder.steps_this_attempt > 0
        told = [beat for beat in beats.values() if beat is not None and beat.attempt == self._world.attempt]
        is_held_up = any(beat.phase is Phase.WAITING_FOR_DATA for beat in told)
        # A step may just have begun, or an evaluation that an Order cuts short at its next batch.
        rest_s = step_s if has_trained and not is_held_up else None
        return DeadlineFacts(
            left_s=min(known) - self._wall_clock() if len(known) == len(noticed) else None,
            save=self._forecast(),
            step_s=step_s,
            rest_s=rest_s,
            look_s=_LOOKS * self._config.failure.poll_s,
        )

    # -- everything else --------------------------------------------------------------------------------------------

    def _consider_size(self, draining: frozenset[str]) -> None:
        views = self._group.views(draining)
        steps_left = self._config.run.steps - self._recorder.newest_step_this_attempt
        decision = self._sizing.consider(
            views,
            steps_left=steps_left,
            is_someone_starting=self._group.is_someone_starting,
            # A World that parts now could not restore: it would stand still until the store is back.
            may_change=not self._is_store_away(),
        )
        if isinstance(decision, Keep) and not self._is_store_away():
            decision = self._slow_nodes.consider(views, self._sizing.world, steps_left)
        if isinstance(decision, Leave):
            self._order(decision, self._part_kind())

    def _order(self, leave: Leave, kind: OrderKind) -> None:
        self.leave, self.kind = leave, kind
        self._ordered_at, self.ordered_unix_s = self._monotonic(), self._wall_clock()
        self._held_up_s = 0.0
        self._coordinator.submit_leave(leave.reason, kind)
        self._emit("leave", leave.reason)
        _log.info("leave ordered: %s", leave.reason)
        self._move(State.LEAVING)

    def _emit(self, decision: str, reason: str, **fields: Any) -> None:
        self._recorder.emit("decision", attempt=self._world.attempt, decision=decision, reason=reason, **fields)

"""One Attempt from the start of its World to its end: watch outcomes, heartbeats and nodes; on a fault, fence the
suspects and free the survivors. Planned ends are ordered by `leaving`.

How an Attempt ended is a value (`AttemptEnd`); what follows from it is the controller's and the policies' business.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray

from orchestrator.config import RunConfig
from orchestrator.coordinator_client import CoordinatorClient
from orchestrator.decisions import Leave, Stop
from orchestrator.failure_policy import AttemptFacts, Fault, classify
from orchestrator.fencing import Reckoning, fence_late, reckon
from orchestrator.heartbeats import Hang
from orchestrator.leaving import Leaving
from orchestrator.long_phases import LongPhases
from orchestrator.recorder import Recorder
from orchestrator.regroup_phases import phase_fields
from orchestrator.replica_doubt import Doubt
from orchestrator.restored import restored_fields
from orchestrator.silent_workers import SilentWorkers
from orchestrator.states import State
from orchestrator.vital_signs import GONE, VitalSigns
from orchestrator.worker_group import WorkerGroup
from storage.keys import Attempt
from workers.contract import AttemptSpec, CauseKind, OrderKind, Outcome, OutcomeKind, Phase, World

__all__ = ["AFTER_DEADLINE_S", "AttemptEnd", "AttemptRun", "Broken", "Finished", "Left"]

_log = logging.getLogger(__name__)
AFTER_DEADLINE_S = 3.0  # a Receipt, or a Commit, that is on its way when a node goes
_QUIET_S = 3.0  # longest that starts of new workers wait for the survivors' first step
_LAST_WORDS_S = 1.0
_OBITUARY_S = 0.2
_OF_ACCELERATOR = "AcceleratorError"  # torch's, which is not imported here
_STARVED_S = 10.0  # how old a kill of the kernel may be to be the reason for a death seen now
_BUSY_PHASES = frozenset({Phase.STARTING, Phase.IDLE, Phase.FORMING, Phase.LOADING})


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Every rank trained to the last step. ``nodes``, ``workers``: of each rank, whose save may still be under way."""

    weights_digest: str | None
    attempt: Attempt | None = None
    nodes: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """Every rank left at ``step`` by Order. ``stop``: the Run is to end with this, else regroup for ``cause``.

    ``is_parted``: its Snapshot is in memory alone. ``deadline_at_s``: Unix time at which the first of its nodes goes,
    after which no word of that one's save is to be expected; None: nobody knows of one.
    """

    step: int
    cause: str
    reason: str
    detected_at_s: float
    stop: Stop | None = None
    is_parted: bool = False
    deadline_at_s: float | None = None

    def save_limit_s(self, limit_s: float, *, now_unix_s: float) -> float:
        """How much of ``limit_s`` the Commit of ``step`` is worth waiting for: a node that is gone sends no more."""
        if self.deadline_at_s is None:
            return limit_s
        return min(limit_s, max(0.0, self.deadline_at_s - now_unix_s) + AFTER_DEADLINE_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """The World broke. ``detected_at_s``: Unix time of the first sign."""

    fault: Fault
    facts: AttemptFacts
    detected_at_s: float


AttemptEnd = Finished | Left | Broken


class AttemptRun:
    """Watches one World. `run` blocks until the Attempt has ended; every wait inside is bounded by a limit.

    ``noticed``: nodes that had a preemption notice, those included that are gone since.
    """

    def __init__(
        self,
        *,
        world: World,
        group: WorkerGroup,
        coordinator: CoordinatorClient,
        config: RunConfig,
        leaving: Leaving,
        recorder: Recorder,
        tick: Callable[[], None],
        noticed: Callable[[], frozenset[str]],
        living: Callable[[], frozenset[str]],
        move: Callable[[State], None],
        doubt: Callable[[World], Doubt | None] = lambda _: None,
    ) -> None:
        self._world = world
        self._group = group
        self._coordinator = coordinator
        self._config = config
        self._leaving = leaving
        self._recorder = recorder
        self._tick = tick
        self._noticed = noticed
        self._living = living
        self._move = move
        self._doubt = doubt
        self._refs: dict[Any, str] = {}
        self._outcomes: dict[str, Outcome] = {}
        self._signs = VitalSigns(world, group, config.failure)
        self._hangs: tuple[Hang, ...] = ()
        self._is_formed = self._has_stepped = self._has_told_phases = False
        self._awaits_restore = False
        self._phases, self._silent = LongPhases(self._say), SilentWorkers(self._say, config.failure.silent_s)

    def run(self, specs: Mapping[str, AttemptSpec]) -> AttemptEnd:
        self._awaits_restore = any(spec.restore is not None for spec in specs.values())
        self._group.set_members(list(specs))
        bell = self._group.lifelines.bell
        self._refs = self._group.start_attempt(specs, self._coordinator.actor)
        for worker_id in specs.keys() - self._refs.values():
            self._signs.gone[worker_id] = "it was gone before the Attempt began"
        for ref in self._refs:
            bell.watch(ref)
        while True:
            bell.wait(self._config.failure.poll_s)
            self._take_outcomes()
            self._signs.look_at_lines(self._outcomes)
            if not self._is_broken():  # else every moment counts; the books are brought up to date on the way
                self._tick()
            end = self._verdict()
            if end is not None:
                self._recorder.emit(
                    "attempt_ended",
                    attempt=self._world.attempt,
                    last_step=self._recorder.newest_step,
                    reason=type(end).__name__.lower(),
                )
                return end
            self._beat()
            self._leaving.consider(self._signs.beats(), is_formed=self._is_formed)

    def _say(self, event: str, fields: Mapping[str, Any]) -> None:
        self._recorder.emit(event, attempt=self._world.attempt, **fields)

    # -- what the members say ---------------------------------------------------------------------------------------

    def _take_outcomes(self) -> None:
        ready, _ = ray.wait(list(self._refs), num_returns=len(self._refs), timeout=0) if self._refs else ([], [])
        for ref in ready:
            worker_id = self._refs.pop(ref)
            try:
                outcome: Outcome | None = ray.get(ref)
            except GONE as error:
                self._signs.lose(worker_id, error)
                continue
            if outcome is None:
                again = self._group.await_outcome(worker_id, self._world.attempt)
                self._refs[self._group.lifelines.bell.watch(again)] = worker_id
                continue
            self._outcomes[worker_id] = outcome
            self._recorder.saw_step(outcome.last_step)

    def _is_broken(self) -> bool:
        lost_nodes = {m.node_id for m in self._world.members} - self._living()
        has_failed = any(outcome.kind is OutcomeKind.FAILED for outcome in self._outcomes.values())
        return bool(self._signs.gone or has_failed or lost_nodes or self._hangs or self._doubt(self._world))

    def _verdict(self) -> AttemptEnd | None:
        """How the Attempt ended, or None while it goes on."""
        if self._is_broken():
            return self._recover()
        kinds = {outcome.kind for outcome in self._outcomes.values()}
        if len(self._outcomes) < self._world.size:
            return None
        if kinds == {OutcomeKind.FINISHED}:
            digests = [o.weights_digest for o in self._outcomes.values() if o.weights_digest is not None]
            return Finished(
                weights_digest=digests[0] if digests else None,
                attempt=self._world.attempt,
                nodes=tuple(member.node_id for member in self._world.members),
                workers=tuple(member.worker_id for member in self._world.members),
            )
        step = max(outcome.last_step for outcome in self._outcomes.values())
        leaving = self._leaving
        leave = leaving.leave or Leave(cause="join", reason="ranks left")
        self._move(State.LEAVING)  # also where nobody here has ordered it
        self._recorder.emit("left", attempt=self._world.attempt, step=step)
        return Left(
            step=step,
            cause=leave.cause,
            reason=leave.reason,
            detected_at_s=leaving.ordered_unix_s or time.time(),
            stop=leaving.stop,
            is_parted=leaving.kind is OrderKind.PART,
            deadline_at_s=leaving.deadline_at_s(),
        )

    # -- heartbeats -------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        self._signs.ask(self._interval_s(), self._outcomes)
        if self._awaits_restore:
            self._note_restored()
        self._phases.look_at(self._signs.beats().values())
        if not self._is_formed:
            self._note_formed()
        if not self._has_stepped and self._recorder.steps_this_attempt > 0:
            self._has_stepped = True
            self._leaving.note_first_step()
            self._group.put_off_starts(0.0)
        if not self._has_told_phases:
            self._note_phases()
        late = self._leaving.late(self._signs.beats(), self._outcomes, has_stepped=self._has_stepped)
        self._silent.look_at(self._signs.silences(self._outcomes))
        self._hangs = (*self._signs.hangs(self._outcomes), *late)

    def _interval_s(self) -> float:
        is_settled = self._is_formed and not self._awaits_restore
        return 4 * self._config.failure.poll_s if is_settled else self._config.failure.poll_s

    def _note_restored(self) -> None:
        """Say once, when every rank has told it, where the state really came from."""
        attempt = self._world.attempt
        told = [beat.restored for beat in self._signs.beats().values() if beat is not None]
        restores = [restored for restored in told if restored is not None and restored.attempt == attempt]
        if len(restores) == self._world.size:
            self._awaits_restore = False
            self._recorder.emit("restored", attempt=attempt, step=restores[0].step, **restored_fields(restores))

    def _note_phases(self) -> None:
        """Say once, when every rank has told it, what the time up to the first step went into."""
        phases = phase_fields(self._signs.beats().values(), self._world.attempt)
        if phases is not None:
            self._has_told_phases = True
            self._recorder.emit("regroup_phases", attempt=self._world.attempt, **phases)

    def _note_formed(self) -> None:
        beats, attempt = self._signs.beats().values(), self._world.attempt
        are_past_loading = all(b is not None and b.attempt == attempt and b.phase not in _BUSY_PHASES for b in beats)
        self._is_formed = are_past_loading or self._recorder.steps_this_attempt > 0
        if self._is_formed:
            self._recorder.emit("regrouped", attempt=attempt, world_size=self._world.size)
            if self._leaving.leave is None:
                self._move(State.RUNNING)

    # -- faults -----------------------------------------------------------------------------------------------------

    def _recover(self) -> Broken | Left:
        """Fence what is suspect, free what lives, and say what happened."""
        detected_at_s = time.time()
        self._move(State.RECOVERING)
        self._group.put_off_starts(_QUIET_S)
        doubt = self._doubt(self._world)
        unlike = frozenset(() if doubt is None else doubt.workers)
        reckoning: Reckoning = reckon(
            world=self._world,
            group=self._group,
            living=self._living(),
            gone=frozenset(self._signs.gone),
            hung=frozenset(hang.worker_id for hang in self._hangs) | self._spoiled() | self._signs.unproven | unlike,
            settle_s=self._config.failure.settle_s,
        )
        asked = self._ask_starved(reckoning, fenced=unlike)
        self._drain_outcomes(reckoning)
        # A peer's echo may be heard before the word of the one that ran out of memory.
        reckoning = fence_late(reckoning, self._group, self._spoiled(), settle_s=self._config.failure.settle_s)
        self._tick()  # what was reported last tells how far the World had come
        facts = AttemptFacts(
            outcomes=tuple(self._outcomes.values()),
            lost_workers=reckoning.lost_workers,
            lost_nodes=reckoning.lost_nodes,
            hung_workers=tuple(hang.worker_id for hang in self._hangs),
            unlike_replicas=None if doubt is None else doubt.detail,
            starved_workers=self._killed_for_memory(asked),
            draining_nodes=self._noticed(),
            reached_step=self._reached_step(),
            step_s=self._recorder.newest_step_s,
        )
        fault = classify(facts)
        self._recorder.emit(
            "fault",
            attempt=self._world.attempt,
            cause=fault.kind.value,
            nodes=list(facts.lost_nodes),
            workers=list(facts.lost_workers),
            detail="; ".join([fault.detail, *(hang.detail for hang in self._hangs)]),
            detected_s=self._recorder.since_start_s(detected_at_s),
        )
        _log.warning("fault: %s: %s", fault.kind.value, fault.detail.partition("\n")[0])  # the event has it all
        return Broken(fault=fault, facts=facts, detected_at_s=detected_at_s)

    def _ask_starved(self, reckoning: Reckoning, fenced: frozenset[str]) -> dict[Any, str]:
        """Questions to the nodes of workers that died there: was it the kernel, for want of memory? By worker."""
        fenced |= {hang.worker_id for hang in self._hangs} | self._spoiled()
        home = {member.worker_id: member.node_id for member in self._world.members}
        died = [w for w in reckoning.lost_workers if w not in fenced and home[w] not in reckoning.lost_nodes]
        refs = {worker: self._group.ask_starved(worker, _STARVED_S) for worker in died}
        return {ref: worker for worker, ref in refs.items() if ref is not None}

    def _killed_for_memory(self, asked: dict[Any, str]) -> tuple[str, ...]:
        """The workers that Ray's memory monitor or the kernel killed, as far as anyone can tell at once."""
        by_ray = {w for w, why in self._signs.gone.items() if why == ray.exceptions.OutOfMemoryError.__name__}
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_OBITUARY_S) if asked else ([], [])
        by_kernel: set[str] = set()
        for ref in answered:
            try:
                by_kernel |= {asked[ref]} if ray.get(ref) else set()
            except ray.exceptions.RayError as error:
                _log.debug("nobody tells why worker %s died: %s", asked[ref], type(error).__name__)
        return tuple(sorted(by_ray | by_kernel))

    def _spoiled(self) -> frozenset[str]:
        """Members whose process is of no more use, so that a fresh one takes its place. Any thread of one that ran out
        of memory may have failed for want of it, and its memory is the machine's again only when it ends. And after an
        error of the accelerator itself, every later call to it in that process may fail with the same."""
        causes = {worker: outcome.cause for worker, outcome in self._outcomes.items() if outcome.cause is not None}
        return frozenset(
            worker
            for worker, cause in causes.items()
            if cause.kind in (CauseKind.OUT_OF_MEMORY, CauseKind.ACCELERATOR) or cause.error_type == _OF_ACCELERATOR
        )

    def _reached_step(self) -> int | None:
        """The last finished step that anyone told of, None before the World had begun to train."""
        if not self._is_formed:
            return None
        beats = [beat for beat in self._signs.beats().values() if beat is not None]
        steps = [beat.step for beat in beats if beat.attempt == self._world.attempt]
        return max([self._recorder.newest_step_this_attempt, *steps])

    def _drain_outcomes(self, reckoning: Reckoning) -> None:
        """Survivors were freed, so their outcomes are at hand; and Ray tells what a lost worker died of, where its node
        lives."""
        home = {member.worker_id: member.node_id for member in self._world.members}
        freed = {ref: w for ref, w in self._refs.items() if w in reckoning.survivors}
        others = {ref: w for ref, w in self._refs.items() if w not in reckoning.survivors}
        dead = {ref: w for ref, w in others.items() if home[w] not in reckoning.lost_nodes}
        for refs, timeout_s in ((freed, _LAST_WORDS_S), (dead, _OBITUARY_S)):
            if refs:
                ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s)
        self._take_outcomes()

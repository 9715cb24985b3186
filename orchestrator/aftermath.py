"""Aftermath: what follows from the way an Attempt ended, carried out up to the Decision to regroup or to stop.

The policies judge; here their verdicts are written to the Journal, budgets are charged and lost members let go.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

from orchestrator.attempt_run import AFTER_DEADLINE_S, AttemptEnd, Broken, Finished, Left
from orchestrator.bad_steps import bad_step_entry
from orchestrator.block_list import NodeFailure
from orchestrator.config import RunConfig
from orchestrator.coordinator_client import CoordinatorClient
from orchestrator.decisions import Regroup, Stop
from orchestrator.exit_codes import ExitCode
from orchestrator.failure_history import FIELD, FailureHistory
from orchestrator.failure_policy import (
    MAX_IN_VAIN,
    AttemptFacts,
    Counters,
    FaultKind,
    classify,
    count_in_vain,
    decide_after_fault,
    is_outage,
)
from orchestrator.gathering import Gathering
from orchestrator.journal import Journal
from orchestrator.keepers import KEEPER_TTL_S
from orchestrator.recorder import Recorder
from orchestrator.replica_doubt import Doubt
from orchestrator.store_waits import StoreWaits
from orchestrator.store_watch import StoreUser
from orchestrator.worker_group import WorkerGroup
from storage.errors import LeaseHeld, ProofFailed, StorageError
from storage.keys import Attempt, StepKey
from workers.contract import SkippedWindow

__all__ = ["Aftermath"]

_log = logging.getLogger(__name__)
_LAST_WORD_S = 5.0
_LAST_SAVE_S = 10.0
_SAVE_FIRST = frozenset({ExitCode.STOPPED, ExitCode.PREEMPTED, ExitCode.STORAGE_OUTAGE})


class Aftermath:
    """One per driver; holds the failure counters and is the Journal's only writer."""

    def __init__(
        self,
        *,
        config: RunConfig,
        group: WorkerGroup,
        gathering: Gathering,
        coordinator: CoordinatorClient,
        journal: Journal,
        recorder: Recorder,
        store: StoreWaits,
        history: FailureHistory,
        wall_clock: Callable[[], float] = time.time,
        unlike_replicas: Callable[[Attempt, tuple[str, ...]], Doubt | None] = lambda *_: None,
    ) -> None:
        self._config = config
        self._group = group
        self._gathering = gathering
        self._coordinator = coordinator
        self._journal = journal
        self._recorder = recorder
        self._store = store
        self._history = history
        self._wall_clock = wall_clock
        self._unlike_replicas = unlike_replicas
        self._counters: Counters = journal.counters()
        self._has_blocked = bool(gathering.blocked)  # the Journal tells of nodes that are, or were
        self._num_in_vain = 0
        self._unproven: StepKey | None = None  # quarantined for its probe, and no step was finished since

    def after(self, end: AttemptEnd, resume_url: str | None) -> Regroup | Stop:
        """``resume_url``: another Run's, where Checkpoints come from until this Run has one of its own."""
        if self._recorder.steps_this_attempt:
            self._unproven = None
        if not isinstance(end, Broken):
            self._num_in_vain = 0
        match end:
            case Finished():
                return self._await_final_commit(end, resume_url)
            case Left(stop=Stop() as stop):
                return self._last_try(end, stop)
            case Left():
                return self._after_leaving(end)
            case Broken():
                return self._after_fault(end, resume_url)

    def is_save_over(self, end: AttemptEnd | None, waited_s: float) -> bool:
        """Whether, ``waited_s`` after a World ended, nothing more is to come of the save that it made last. A driver
        that had no World yet waits for one."""
        if end is None:
            return False
        if not isinstance(end, Left) or end.is_parted:
            return not self._coordinator.pending() or waited_s > AFTER_DEADLINE_S
        if self._coordinator.wait_settled(end.step, 0.0) or waited_s > self._config.checkpoint.leave_timeout_s:
            return True
        last_word_at_s = inf if end.deadline_at_s is None else end.deadline_at_s + AFTER_DEADLINE_S
        return waited_s > AFTER_DEADLINE_S and self._wall_clock() > last_word_at_s

    def stopped_between(self, stop: Stop, end: AttemptEnd | None) -> Stop:
        """``stop`` came when one World had ended and no other had begun. Where that one left to regroup, the save that
        it made is given its time, as for a World that leaves for the stop: Keepers that end upload nothing more."""
        if not isinstance(end, Left) or end.is_parted or stop.exit_code not in _SAVE_FIRST:
            return stop
        return self._last_try(end, stop)

    def _last_try(self, end: Left, stop: Stop) -> Stop:
        limit_s = end.save_limit_s(self._config.checkpoint.leave_timeout_s, now_unix_s=self._wall_clock())
        return self._store.last_try(end.step, limit_s, stop)

    def last_word(self, stop: Stop, end: AttemptEnd | None, *, durable_step: int | None, is_unsaved: bool) -> Stop:
        """``stop``, for want of nodes, with what there is for the next driver. ``is_unsaved``: memory holds more."""
        if stop.exit_code is not ExitCode.BELOW_MINIMUM:
            return stop
        self._store.take_signals()
        words = [stop.reason]
        if isinstance(end, Left) and not end.is_parted and not self._coordinator.has_committed(end.step):
            words.append(f"the last save, of step {end.step}, was not committed")
        newest, durable = self._recorder.newest_step, durable_step or 0
        if durable_step is not None:
            words.append(f"newest checkpoint: {f'step {durable}' if durable else 'none'}")
        if is_unsaved:
            held = f"memory holds steps up to {newest}, and the nodes that live keep them for {KEEPER_TTL_S:g} s"
            words.append(held)
        elif newest > durable and durable_step is not None:
            words.append(f"steps {durable + 1} to {newest} will be trained again")
        words.append("the same command goes on from there")
        return replace(stop, reason="; ".join(words))

    @property
    def is_next_preemption_last(self) -> bool:
        """Whether the Run ends with the next preemption, so that nobody takes over what memory holds."""
        return 0 <= self._config.failure.max_preemptions <= self._counters.preemptions

    @property
    def skipped(self) -> tuple[SkippedWindow, ...]:
        """What every World from here on leaves out of the data."""
        return self._counters.skipped

    def write_journal(self, kind: str, **values: Any) -> Stop | None:
        """One entry, with the counters; tried again for as long as the store is away."""
        self._has_blocked = self._has_blocked or bool(self._gathering.blocked)
        if self._has_blocked:  # that none is any more is to be known too
            values["blocked"] = self._gathering.blocked
        values[FIELD] = self._history.as_entry()
        write = partial(self._journal.append_counters, kind, self._counters, **values)
        try:
            return self._store.call(StoreUser.JOURNAL, write)
        except LeaseHeld as error:
            return Stop(exit_code=ExitCode.REFUSED, reason=str(error))

    def write_once(self, kind: str, **values: Any) -> str | None:
        """One entry, not tried again: whoever asks for it would rather hear why it could not be written."""
        values[FIELD] = self._history.as_entry()
        try:
            self._journal.append_counters(kind, self._counters, deadline_s=_LAST_WORD_S, **values)
        except StorageError as error:
            return f"it could not be written to the Journal: {error}"
        return None

    def write_end(self, stop: Stop) -> None:
        """The driver's last entry, which no store may hold up for long."""
        if stop.exit_code is ExitCode.REFUSED:
            return
        end = {"exit_code": int(stop.exit_code), "reason": stop.reason, FIELD: self._history.as_entry()}
        try:
            self._journal.append_counters("end", self._counters, deadline_s=_LAST_WORD_S, **end)
        except StorageError as error:
            _log.warning("the end of this driver is not in the Journal: %s", error)

    def _await_final_commit(self, end: Finished, resume_url: str | None) -> Regroup | Stop:
        total = self._config.run.steps
        limit_s = self._config.checkpoint.final_timeout_s
        stop = self._store.wait_settled(total, limit_s, lambda: bool(self._lost_while_saving(end)))
        self._store.take_signals()
        if self._coordinator.has_committed(total):
            return Stop(exit_code=ExitCode.SUCCESS, reason=f"finished step {total}")
        doubt = None if end.attempt is None else self._unlike_replicas(end.attempt, end.workers)
        if doubt is not None:
            facts = AttemptFacts(unlike_replicas=doubt.detail, lost_workers=doubt.workers)
            return self._after_fault(self._broken(end, facts, doubt.detail), resume_url)
        if stop is not None:
            return stop
        lost = self._lost_while_saving(end)
        if lost:
            return self._after_fault(self._broken_while_saving(end, lost), resume_url)
        reason = f"step {total} was trained but its final save was not committed; see the save_failed events"
        return Stop(exit_code=ExitCode.FINAL_SAVE_FAILED, reason=reason)

    def _lost_while_saving(self, end: Finished) -> tuple[str, ...]:
        """Nodes that are gone and still owe their part of the last save."""
        missing = self._coordinator.pending().get(self._config.run.steps, ())
        owing = {end.nodes[rank] for rank in missing if rank < len(end.nodes)}
        return tuple(sorted(owing - self._gathering.living()))

    def _broken_while_saving(self, end: Finished, lost: tuple[str, ...]) -> Broken:
        """The last steps must be trained again, from what memory or the store holds of the ones before."""
        workers = tuple(view.worker_id for view in self._group.views(frozenset()) if view.node_id in lost)
        notices = frozenset(self._gathering.notices())
        facts = AttemptFacts(lost_workers=workers, lost_nodes=lost, draining_nodes=notices)
        return self._broken(end, facts, f"{classify(facts).detail}, before its part of the last save was in the store")

    def _broken(self, end: Finished, facts: AttemptFacts, detail: str) -> Broken:
        """Say that the World of ``end`` broke after its last step."""
        fault, detected_at_s = classify(facts), time.time()
        self._recorder.emit(
            "fault",
            attempt=end.attempt,
            cause=fault.kind.value,
            nodes=list(facts.lost_nodes),
            workers=list(facts.lost_workers),
            detail=detail,
            detected_s=self._recorder.since_start_s(detected_at_s),
        )
        _log.warning("fault: %s: %s", fault.kind.value, detail.partition("\n")[0])  # the event has it all
        return Broken(fault=replace(fault, detail=detail), facts=facts, detected_at_s=detected_at_s)

    def _after_leaving(self, end: Left) -> Regroup | Stop:
        if end.cause == FaultKind.PREEMPTION.value:
            self._history.note_fault(FaultKind.PREEMPTION)
            self._counters = replace(self._counters, preemptions=self._counters.preemptions + 1)
            limit = self._config.failure.max_preemptions
            if 0 <= limit < self._counters.preemptions:
                reason = f"{self._counters.preemptions} preemptions, failure.max_preemptions is {limit}"
                return self.stopped_between(Stop(exit_code=ExitCode.PREEMPTED, reason=reason), end)
        return Regroup(cause=end.cause, reason=end.reason)

    def _after_fault(self, end: Broken, resume_url: str | None) -> Regroup | Stop:
        self._history.note_fault(end.fault.kind)
        for node_id in end.facts.lost_nodes:
            self._gathering.lose_node(node_id)
        failures = self._failures_by_node(end)
        for worker_id in end.facts.lost_workers:
            self._group.remove_worker(worker_id)
        self._gathering.note_failures(failures)
        stop = self._quarantine(end, resume_url)
        if stop is not None:
            return stop
        known = self._counters.skipped
        decision, self._counters = decide_after_fault(
            end.fault,
            self._counters,
            self._config.failure,
            steps_finished=self._recorder.steps_this_attempt,
            steps_kept=self._recorder.commits_this_attempt,
        )
        kind = type(decision).__name__.lower()
        stop = self.write_journal("decision", decision=kind, reason=decision.reason, **bad_step_entry(end))
        if stop is not None:
            return stop
        self._recorder.emit("decision", decision=kind, reason=decision.reason)
        for window in self._counters.skipped[len(known) :]:
            self._recorder.emit(
                "window_skipped",
                step=window.step,
                place=window.place,
                samples=window.samples,
                reason=window.reason,
            )
        if isinstance(decision, Regroup):
            self._doubt_processes(end)
        if is_outage(end.fault) and isinstance(decision, Regroup):
            return self._store.loading_failed(end.fault.detail) or decision
        if isinstance(decision, Stop) and not end.facts.lost_nodes:
            self._await_last_save(end)
        return decision

    def _await_last_save(self, end: Broken) -> None:
        """All that a later driver can go on from: a save that every rank handed over is worth a moment. One of the
        step that a rank failed in, or of a later one, is never handed over by that rank."""
        root = end.fault.root
        possible = [step for step in self._coordinator.pending() if root is None or step < root.step]
        if possible:
            self._store.wait_settled(max(possible), _LAST_SAVE_S)
            self._store.take_signals()

    def _doubt_processes(self, end: Broken) -> None:
        steps = self._recorder.steps_this_attempt
        self._num_in_vain = count_in_vain(end.fault, self._num_in_vain, steps_finished=steps)
        if self._num_in_vain >= MAX_IN_VAIN:
            reason = f"{self._num_in_vain} Attempts in a row finished no step although every member lives"
            self._gathering.replace_members(f"{reason}; last: {end.fault.detail}")
            self._num_in_vain = 0

    def _failures_by_node(self, end: Broken) -> list[tuple[str, NodeFailure]]:
        """Members that failed although their node lives; what a lost node takes along says nothing about another."""
        node_of = {view.worker_id: view.node_id for view in self._group.views(frozenset())}
        hung = dict.fromkeys(end.facts.hung_workers, NodeFailure.HANG)
        kinds = dict.fromkeys(end.facts.lost_workers, NodeFailure.WORKER_LOST) | hung
        return [(node_of[worker_id], kind) for worker_id, kind in kinds.items() if worker_id in node_of]

    def _quarantine(self, end: Broken, resume_url: str | None) -> Stop | None:
        """Take the Checkpoint that a rank could not read, if that was the fault, out of use."""
        root = end.fault.root
        if root is None or root.corrupt_step is None:
            return None
        bad, key, why = root.corrupt_step, root.corrupt_key or "-", root.message
        if root.error_type == ProofFailed.__name__:
            if self._unproven is not None:
                return _no_more_doubt(self._unproven, bad, why)
            self._unproven = bad
        url = resume_url if self._recorder.num_commits == 0 else None
        try:
            return self._store.call(StoreUser.PLAN, lambda: self._coordinator.quarantine(bad, key, why, url))
        except StorageError as error:
            reason = f"{end.fault.detail}; taking it out of use failed: {error}"
            return Stop(exit_code=ExitCode.STORAGE_OUTAGE, reason=reason)


def _no_more_doubt(first: StepKey, second: StepKey, why: str) -> Stop:
    """Digests of both are right: going on could take every good Checkpoint out of use because of a changed program."""
    reason = (
        f"the Checkpoints of steps {first.step} and {second.step} both fail their proof, although their bytes are "
        "those that were committed: rather this program or machine computes something else than what saved them. "
        f"Step {second.step} stays in use. Run the program that saved them; or, where it was changed on purpose, put "
        f"step {first.step} back (raysume checkpoints quarantine --lift) and set checkpoint.proof: false. {why}"
    )
    return Stop(exit_code=ExitCode.CONFIG_ERROR, reason=reason)

"""Chooses where an Attempt goes on: from the newest step that memory holds whole, else from the newest Checkpoint.

Asks the Keepers that live, then compares with what is committed. Which generations fit together is
storage.memory_plan's judgement, which Checkpoint is usable the coordinator's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from orchestrator.attempt_run import AttemptEnd, Broken, Left
from orchestrator.bad_steps import bad_steps
from orchestrator.config import RunConfig
from orchestrator.coordinator_actor import utc_now
from orchestrator.decisions import Stop
from orchestrator.failure_policy import FaultKind
from orchestrator.journal import JournalEntry
from orchestrator.memory_survey import MemorySurvey
from orchestrator.recorder import Recorder
from orchestrator.resume import Resume
from orchestrator.run_identity import metadata_of
from orchestrator.signals import Committed, Quarantined, SaveFailed, Signal
from orchestrator.store_watch import StoreUser
from storage.errors import CommitRefused
from storage.keeper_protocol import MemoryReport
from storage.keys import Attempt, StepKey
from storage.memory_plan import ChosenGeneration, NoGeneration, build_plan, choose_generation
from storage.replicas import Disagreement
from storage.sources import RestorePlan

__all__ = ["PlanChooser"]

_log = logging.getLogger(__name__)
IN_FLIGHT_SAVE_S = 3.0  # how long a save that can still become whole is waited for before a restore is planned
AFTER_OUTAGE_S = 45.0  # the same, where a Keeper tries again every half minute
EXPECTED_S = 3.0  # how long a step that must be in memory is looked for
MOVING_S = 5.0  # how long replicas of a node that goes away may take to reach another one
_POLL_S = 0.05
_MOST_TRIES = 8  # generations that are tried for one plan
_MOST_FRUITLESS = 2  # Attempts that may begin with one generation and finish no step


class PlanSource(Protocol):
    """What this file needs of the coordinator."""

    def choose_plan(
        self, attempt: Attempt, step: int | None, allow_partial: bool, url: str | None
    ) -> RestorePlan | None: ...

    def pending(self) -> dict[int, tuple[int, ...]]: ...


class StoreAsker(Protocol):
    """What this file needs of StoreWaits."""

    @property
    def is_away(self) -> bool: ...

    def take_signals(self) -> None: ...

    def call(self, user: StoreUser, ask: Callable[[], Any], *, outlasts_refusals: bool = True) -> Any: ...

    def wait_settled(self, step: int | None, limit_s: float) -> Stop | None: ...


class PlanChooser:
    """One per driver. ``durable_step``: of the newest usable Commit, 0 without one, None where that is not known.

    ``adopt``: makes the Keepers of these nodes, which the driver before this one left, answer to this one.
    """

    def __init__(
        self,
        *,
        config: RunConfig,
        nonce: str,
        entries: Sequence[JournalEntry],
        coordinator: PlanSource,
        store: StoreAsker,
        recorder: Recorder,
        survey: MemorySurvey,
        adopt: Callable[[frozenset[str]], None],
        living: Callable[[], frozenset[str]],
        draining: Callable[[], frozenset[str]],
        resume: Resume,
        memory_key: bytes,
        durable_step: int | None = None,
        now_utc: Callable[[], str] = utc_now,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._config = config
        self._nonce = nonce
        self._entries = entries
        self._coordinator = coordinator
        self._store = store
        self._recorder = recorder
        self._survey = survey
        self._adopt = adopt
        self._living, self._draining = living, draining
        self._resume = resume
        self._memory_key = memory_key
        self._metadata = metadata_of(config)
        self._now_utc = now_utc
        self._monotonic, self._sleep = monotonic, sleep
        self.durable_step = durable_step
        self._distrusted: set[StepKey] = set()
        self._last: RestorePlan | None = None
        self._is_memory_doubtful = False  # what ranks held last is not the same on all of them
        self._num_fruitless = 0
        recorder.listen(self._on_signal)

    @property
    def resume_url(self) -> str | None:
        """Another Run's, where Checkpoints come from until this Run has one of its own."""
        return self._resume.url

    def choose(
        self, attempt: Attempt, before: AttemptEnd | None, member_nodes: Sequence[str]
    ) -> RestorePlan | Stop | None:
        """``before``: how the last Attempt of this driver ended. None: from step 0. Raises StorageError."""
        self._store.take_signals()
        self._judge_last(before)
        reason = "replicas disagreed" if self._is_memory_doubtful else "the memory tier is off"
        found: RestorePlan | NoGeneration = NoGeneration(reason=reason)
        if self._may_use_memory(before):
            found = self._from_memory(attempt, before, member_nodes)
        if isinstance(found, RestorePlan) and self.durable_step is not None and found.step >= self.durable_step:
            return self._chosen(found)
        plan = self._from_store(attempt, before)
        if isinstance(plan, Stop):
            return plan
        if isinstance(found, RestorePlan):
            if plan is None or found.step >= plan.step:
                return self._chosen(found)
            found = NoGeneration(reason=f"step {found.step} in memory is older than the newest Checkpoint")
        if self._config.checkpoint.memory.mode != "off" and before is not None:
            self._say_passed_over(attempt, found.reason, plan)
        self.durable_step = 0 if plan is None else plan.step
        self._is_memory_doubtful = False  # the Attempts so far are no way to anything newer
        return self._chosen(plan)

    # -- from memory ------------------------------------------------------------------------------------------------

    def _may_use_memory(self, before: AttemptEnd | None) -> bool:
        """Who asked for a certain Checkpoint, or for parts of one, gets that first."""
        if self._config.checkpoint.memory.mode == "off" or self._is_memory_doubtful:
            return False
        return before is not None or self._is_plain()

    def _is_plain(self) -> bool:
        return self._config.run.resume == "auto" and self._resume == Resume()

    def _from_memory(
        self, attempt: Attempt, before: AttemptEnd | None, member_nodes: Sequence[str]
    ) -> RestorePlan | NoGeneration:
        """The newest generation that is whole and whose Receipts say so."""
        if not self._lineage():
            return NoGeneration(reason="nothing was trained yet that memory could hold")
        if before is None:
            self._adopt(self._nodes_of_last_worlds() & self._living())
        for _ in range(_MOST_TRIES):
            chosen = self._look(before)
            if isinstance(chosen, NoGeneration):
                return chosen
            for reason in chosen.passed_over:
                _log.warning("memory: %s; going on from step %d", reason, chosen.key.step)
            receipts = self._survey.receipts(chosen.nodes, chosen.key)
            try:
                return build_plan(
                    chosen,
                    receipts,
                    attempt=attempt,
                    member_nodes=member_nodes,
                    root_url=self._config.run.url,
                    time_utc=self._now_utc(),
                    metadata=self._metadata,
                    key=self._memory_key,
                )
            except CommitRefused as error:
                _log.warning("step %d in memory cannot be gone on from: %s", chosen.key.step, error)
                self._distrusted.add(chosen.key)
        return NoGeneration(reason=f"{_MOST_TRIES} steps in memory were not what they should be")

    def _look(self, before: AttemptEnd | None) -> ChosenGeneration | NoGeneration:
        """Ask until the step that memory should hold is there and does not hang on a node that goes away, but not for
        long."""
        is_parted = isinstance(before, Left) and before.is_parted
        expected = before.step if isinstance(before, Left) and is_parted else self._recorder.safe_step_this_attempt
        lineage = self._lineage()
        distrusted = self._distrusted | bad_steps(self._entries)
        expected_until, moved_until = self._monotonic() + EXPECTED_S, self._monotonic() + MOVING_S

        def best(reports: Sequence[MemoryReport]) -> ChosenGeneration | NoGeneration:
            return choose_generation(reports, lineage=lineage, distrusted=distrusted, below_step=self._config.run.steps)

        def is_enough(reports: Sequence[MemoryReport]) -> bool:
            return 0 <= expected <= _step_of(best(reports))

        while True:
            answers, leaving = self._survey.reports(self._living(), is_enough), self._draining()
            anywhere = best(answers.reports)
            steady = best([report for report in answers.reports if report.address.node_id not in leaving])
            now = self._monotonic()
            # Whoever parted has only just handed over; what a loss took away does not come back.
            may_come = (is_parted or bool(answers.silent)) and self._is_untried(expected)
            if _step_of(anywhere) < expected and may_come and now < expected_until:
                self._sleep(_POLL_S)
                continue
            if _step_of(steady) >= _step_of(anywhere):
                return steady
            if now >= moved_until or all(report.address.node_id in leaving for report in answers.reports):
                _log.warning("step %d is read from a node that is going away", _step_of(anywhere))
                return anywhere
            self._sleep(_POLL_S)

    def _is_untried(self, expected: int) -> bool:
        """Whether waiting for ``expected`` can help: not once it was found wanting."""
        return not any(key.step == expected for key in self._distrusted)

    def _nodes_of_last_worlds(self) -> frozenset[str]:
        """Their Keepers may hold what this driver goes on from, also where it uses other nodes. A World that had only
        been chosen has not taken over what the one before it holds, on more nodes perhaps."""
        worlds = [entry.fields.get("world") or () for entry in self._entries if entry.kind == "attempt"]
        return frozenset(str(node_id) for world in worlds[-2:] for _, node_id in world)

    def _lineage(self) -> dict[Attempt, int]:
        """The step that each Attempt went on from, as the Journal has it.

        Attempts of earlier drivers count only where this one plainly goes on from them.
        """
        bases = {
            Attempt(number=int(entry.fields["number"]), nonce=str(entry.fields["nonce"])): int(
                entry.fields["restored_step"]
            )
            for entry in self._entries
            if entry.kind == "attempt"
        }
        if self._is_plain() or self._recorder.num_commits:
            return bases
        return {attempt: base for attempt, base in bases.items() if attempt.nonce == self._nonce}

    # -- from the store ---------------------------------------------------------------------------------------------

    def _from_store(self, attempt: Attempt, before: AttemptEnd | None) -> RestorePlan | Stop | None:
        """The newest Checkpoint. A save that every living rank already handed over is waited for first."""
        stop: Stop | None = None
        if isinstance(before, Left) and not before.is_parted:
            limit_s = before.save_limit_s(self._config.checkpoint.leave_timeout_s, now_unix_s=time.time())
            stop = self._store.wait_settled(before.step, limit_s)
        elif self._can_settle(before) and self._coordinator.pending():
            stop = self._store.wait_settled(None, AFTER_OUTAGE_S if self._store.is_away else IN_FLIGHT_SAVE_S)
        if stop is not None:
            return stop
        self._store.take_signals()
        if self._recorder.num_commits:
            # Only now: an Attempt that broke before its first Commit must not go on from elsewhere, or from nothing.
            self._resume = Resume(allow_partial=self._config.run.allow_partial)
        resume = self._resume
        plan: RestorePlan | Stop | None = self._store.call(
            StoreUser.PLAN,
            lambda: self._coordinator.choose_plan(attempt, resume.step, resume.allow_partial, resume.url),
            outlasts_refusals=self._recorder.num_commits > 0,
        )
        return resume.narrowed(plan) if isinstance(plan, RestorePlan) else plan

    def _can_settle(self, before: AttemptEnd | None) -> bool:
        return isinstance(before, Left) or (isinstance(before, Broken) and not before.facts.lost_nodes)

    # -- what became of plans ---------------------------------------------------------------------------------------

    def _judge_last(self, before: AttemptEnd | None) -> None:
        """Distrust a generation that could not be read, or that nothing comes of although nobody is lost."""
        plan = self._last
        if plan is None or plan.memory is None or not isinstance(before, Broken):
            return
        is_unreadable = before.fault.kind is FaultKind.MEMORY
        facts = before.facts
        if not is_unreadable and not self._recorder.steps_this_attempt:
            self._num_fruitless += not (facts.lost_nodes or facts.lost_workers or facts.failed_forming)
        if is_unreadable or self._num_fruitless >= _MOST_FRUITLESS:
            _log.warning("step %d in memory is not gone on from again: %s", plan.step, before.fault.detail)
            self._distrusted.add(plan.source)

    def _chosen(self, plan: RestorePlan | None) -> RestorePlan | None:
        if plan is None or self._last is None or plan.source != self._last.source:
            self._num_fruitless = 0
        self._last = plan
        return plan

    def _say_passed_over(self, attempt: Attempt, reason: str, plan: RestorePlan | None) -> None:
        step = 0 if plan is None else plan.step
        _log.warning("memory is of no use for attempt %d, which goes on from step %d: %s", attempt.number, step, reason)
        self._recorder.emit("memory_passed_over", attempt=attempt, step=step, reason=reason)

    def _on_signal(self, signal: Signal) -> None:
        match signal:
            case Committed(step=step):
                self.durable_step = max(step, self.durable_step or 0)
            case Quarantined():
                self.durable_step = None  # which one is the newest now, only the store tells
            case SaveFailed(disagreement=Disagreement()):
                self._is_memory_doubtful = True
            case _:
                pass


def _step_of(found: ChosenGeneration | NoGeneration) -> int:
    return found.key.step if isinstance(found, ChosenGeneration) else -1

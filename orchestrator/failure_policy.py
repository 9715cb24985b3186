"""What broke, whose fault it was, and whether to go on: pure functions over facts.

A lost machine, a hang or a peer's echo never uses up the budget of a bug in the training code. No clock, no ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from orchestrator.config import FailureConfig
from orchestrator.crash_loop import Failure, Repeat, count_again, forget_passed, step_doubt
from orchestrator.decisions import Regroup, Stop
from orchestrator.exit_codes import ExitCode
from storage.errors import StoreUnavailable
from workers.contract import CauseKind, FailureCause, Outcome, OutcomeKind, SkippedWindow
from workers.errors import StepNotFinite

__all__ = [
    "MAX_FRUITLESS_ATTEMPTS",
    "MAX_IN_VAIN",
    "AttemptFacts",
    "Counters",
    "Fault",
    "FaultKind",
    "classify",
    "count_in_vain",
    "decide_after_fault",
    "is_outage",
]

MAX_CORRUPT_ATTEMPTS = 64
MAX_IN_VAIN = 2
MAX_FRUITLESS_ATTEMPTS = 8  # attempts in a row that finish no step: something is broken that a regroup cannot mend
_MAX_SAME_USER_ERRORS = 2
_MAX_SAME_STARVATIONS = 2
_MAX_SAME_BAD_STEPS = 2


class FaultKind(StrEnum):
    """Cause of an Attempt's end, as it is written in summary.json for the Attempt that follows."""

    NODE_LOST = "node-lost"
    WORKER_LOST = "worker-lost"
    HANG = "hang"
    PREEMPTION = "preemption"
    COLLECTIVE = "collective-error"
    OUT_OF_MEMORY = "out-of-memory"
    USER_ERROR = "user-error"
    CORRUPT_CHECKPOINT = "corrupt-checkpoint"
    MISMATCH = "checkpoint-mismatch"
    CONFIGURATION = "configuration"
    STORAGE = "storage-error"
    BAD_STEP = "bad-step"
    MEMORY = "memory-unreadable"
    REPLICAS = "replicas-disagree"


_OF_THE_LOST = frozenset({CauseKind.STORAGE, CauseKind.MEMORY})  # a member that is gone may well be the reason
_LOOPING = frozenset({FaultKind.WORKER_LOST, FaultKind.HANG, FaultKind.COLLECTIVE})
_UNCOMMITTED = frozenset({FaultKind.STORAGE, FaultKind.REPLICAS})  # the same steps are trained again and again


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFacts:
    """All that is known when an Attempt broke. ``draining_nodes`` had a preemption notice; ``starved_workers`` are
    those of the lost that were killed because their node ran out of memory. ``unlike_replicas``: who holds something
    else than the others, in words."""

    outcomes: tuple[Outcome, ...] = ()
    lost_workers: tuple[str, ...] = ()
    lost_nodes: tuple[str, ...] = ()
    hung_workers: tuple[str, ...] = ()
    starved_workers: tuple[str, ...] = ()
    unlike_replicas: str | None = None
    draining_nodes: frozenset[str] = frozenset()
    reached_step: int | None = None
    step_s: float | None = None

    @property
    def failed_forming(self) -> bool:
        """Whether ranks did not even find each other: nothing was loaded, so it says nothing of what was to be."""
        return any(outcome.cause is not None and outcome.cause.is_forming for outcome in self.outcomes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """The classified failure: its kind, a line for people, and the root cause of the training code if it was one.

    ``step``: the one it happened in, give or take ``step_doubt``; None where no step was under way.
    """

    kind: FaultKind
    detail: str
    root: FailureCause | None = None
    step: int | None = None
    step_doubt: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Failures so far, over every driver of the Run (kept in the Journal), and what is skipped because of them."""

    user_errors: int = 0
    infrastructure: int = 0
    preemptions: int = 0
    storage_errors: int = 0
    fruitless: int = 0
    repeats: tuple[Repeat, ...] = ()
    skipped: tuple[SkippedWindow, ...] = ()


def _root_cause(outcomes: Sequence[Outcome]) -> FailureCause | None:
    """The first cause that is not an echo, by severity, then lowest rank."""
    severity = [
        CauseKind.CORRUPT_CHECKPOINT,
        CauseKind.CHECKPOINT_MISMATCH,
        CauseKind.CONFIGURATION,
        CauseKind.DATA,
        CauseKind.ACCELERATOR,
        CauseKind.BAD_STEP,
        CauseKind.OUT_OF_MEMORY,
        CauseKind.USER,
        CauseKind.MEMORY,
        CauseKind.STORAGE,
    ]
    causes = [o.cause for o in outcomes if o.kind is OutcomeKind.FAILED and o.cause is not None]
    real = [c for c in causes if c.kind in severity]
    return min(real, key=lambda c: (severity.index(c.kind), c.rank), default=None)


def classify(facts: AttemptFacts) -> Fault:
    """One Fault from all that was seen. A member that is gone outranks what the survivors say about it, except that an
    error of the training code raised by a live member is never hidden by peers that it took down."""
    fault = _classify(facts)
    if fault.root is not None:  # a device at fault says nothing of the step
        return fault if fault.root.kind is CauseKind.ACCELERATOR else replace(fault, step=fault.root.step)
    if facts.reached_step is None:
        return fault
    doubt = step_doubt(facts.step_s, has_witness=bool(facts.outcomes))
    return replace(fault, step=facts.reached_step + 1, step_doubt=doubt)


def _classify(facts: AttemptFacts) -> Fault:
    if facts.unlike_replicas is not None:  # whatever else broke: what this World holds is not to be gone on from
        return Fault(kind=FaultKind.REPLICAS, detail=facts.unlike_replicas)
    root = _root_cause(facts.outcomes)
    of_the_lost = _OF_THE_LOST if facts.lost_nodes or facts.lost_workers else frozenset()
    if facts.lost_nodes:  # links between devices of several machines break with one of them
        of_the_lost |= {CauseKind.ACCELERATOR}
    if root is not None and root.kind not in of_the_lost:
        where = f"{root.where}: {root.error_type}: {root.message}"
        kinds = {
            CauseKind.CORRUPT_CHECKPOINT: FaultKind.CORRUPT_CHECKPOINT,
            CauseKind.CHECKPOINT_MISMATCH: FaultKind.MISMATCH,
            CauseKind.CONFIGURATION: FaultKind.CONFIGURATION,
            CauseKind.STORAGE: FaultKind.STORAGE,
            CauseKind.BAD_STEP: FaultKind.BAD_STEP,
            CauseKind.MEMORY: FaultKind.MEMORY,
            CauseKind.OUT_OF_MEMORY: FaultKind.OUT_OF_MEMORY,
            CauseKind.ACCELERATOR: FaultKind.WORKER_LOST,
        }
        return Fault(kind=kinds.get(root.kind, FaultKind.USER_ERROR), detail=where, root=root)
    preempted = [node for node in facts.lost_nodes if node in facts.draining_nodes]
    if preempted:
        return Fault(kind=FaultKind.PREEMPTION, detail=f"node {preempted[0][:12]} was reclaimed")
    if facts.lost_nodes:
        nodes = ", ".join(node[:12] for node in facts.lost_nodes)
        return Fault(kind=FaultKind.NODE_LOST, detail=f"lost node {nodes}")
    if facts.starved_workers:
        starved = ", ".join(facts.starved_workers)
        return Fault(kind=FaultKind.OUT_OF_MEMORY, detail=f"worker {starved} was killed: its node ran out of memory")
    if facts.hung_workers:
        return Fault(kind=FaultKind.HANG, detail=f"worker {', '.join(facts.hung_workers)} made no progress")
    if facts.lost_workers:
        return Fault(kind=FaultKind.WORKER_LOST, detail=f"lost worker {', '.join(facts.lost_workers)}")
    echo = next((o.cause for o in facts.outcomes if o.cause is not None), None)
    said = f"{echo.error_type}: {echo.message}" if echo is not None else "no member says why"
    return Fault(kind=FaultKind.COLLECTIVE, detail=f"a collective failed, yet every member lives: {said}")


def is_outage(fault: Fault) -> bool:
    """Whether ranks failed only because the store did not answer."""
    return fault.root is not None and fault.root.error_type == StoreUnavailable.__name__


def count_in_vain(fault: Fault, before: int, *, steps_finished: int) -> int:
    """How many Attempts in a row, ``before`` this one, broke without a step although every member lives. At
    `MAX_IN_VAIN` their processes are not to be tried again: one may have kept something that sets it apart."""
    return before + 1 if fault.kind is FaultKind.COLLECTIVE and not steps_finished else 0


def _over(count: int, limit: int) -> bool:
    return 0 <= limit < count


def decide_after_fault(
    fault: Fault, counters: Counters, config: FailureConfig, *, steps_finished: int, steps_kept: int
) -> tuple[Regroup | Stop, Counters]:
    """Go on or stop, and the counters after. ``steps_finished``: optimizer steps the broken Attempt finished;
    ``steps_kept``: those of them that a Commit keeps, which alone count as progress where no Commit comes about."""
    progress = steps_kept if fault.kind in _UNCOMMITTED else steps_finished
    before, counters = counters, replace(counters, fruitless=0 if progress else counters.fruitless + 1)
    if fault.step is not None:
        passed = forget_passed(counters.repeats, fault.step - 1, doubt=fault.step_doubt)
        counters = replace(counters, repeats=passed)
    match fault.kind:
        case FaultKind.MISMATCH | FaultKind.CONFIGURATION:
            return Stop(exit_code=ExitCode.CONFIG_ERROR, reason=fault.detail), counters
        case FaultKind.CORRUPT_CHECKPOINT:
            # Each bad Checkpoint is quarantined once, so their number is the bound; unless the quarantine is not kept.
            if counters.fruitless >= MAX_CORRUPT_ATTEMPTS:
                reason = f"{counters.fruitless} Checkpoints in a row could not be read; last: {fault.detail}"
                return Stop(exit_code=ExitCode.STORAGE_OUTAGE, reason=reason), counters
            return Regroup(cause=fault.kind.value, reason=fault.detail), counters
        case FaultKind.MEMORY if counters.fruitless < MAX_FRUITLESS_ATTEMPTS:
            # Nobody's fault and nothing lost: that generation is not planned with again, and few are held.
            return Regroup(cause=fault.kind.value, reason=fault.detail), counters
        case FaultKind.USER_ERROR:
            return _after_user_error(fault, counters, config)
        case FaultKind.BAD_STEP if fault.root is not None:
            return _after_bad_step(fault, fault.root, counters, config)
        case FaultKind.PREEMPTION:
            counters = replace(counters, preemptions=counters.preemptions + 1)
            if _over(counters.preemptions, config.max_preemptions):
                reason = f"{counters.preemptions} preemptions, failure.max_preemptions is {config.max_preemptions}"
                return Stop(exit_code=ExitCode.PREEMPTED, reason=f"{reason}; last: {fault.detail}"), counters
        case FaultKind.STORAGE if is_outage(fault):
            # How long an outage is outlasted is told by checkpoint.max_outage_s (storage_policy), not by this count.
            counters = replace(counters, storage_errors=counters.storage_errors + 1, fruitless=before.fruitless)
            return Regroup(cause=fault.kind.value, reason=fault.detail), counters
        case FaultKind.STORAGE:
            counters = replace(counters, storage_errors=counters.storage_errors + 1)
            if counters.fruitless >= MAX_FRUITLESS_ATTEMPTS:
                return Stop(exit_code=ExitCode.STORAGE_OUTAGE, reason=fault.detail), counters
        case _:
            counters = replace(counters, infrastructure=counters.infrastructure + 1)
            if _over(counters.infrastructure, config.max_infrastructure):
                limit = f"failure.max_infrastructure is {config.max_infrastructure}"
                reason = f"{counters.infrastructure} infrastructure failures, {limit}; last: {fault.detail}"
                return Stop(exit_code=ExitCode.FAILURE_BUDGET, reason=reason), counters
            starved, counters = _starved_again(fault, counters)
            if starved is not None:
                return starved, counters
            looped, counters = _break_loop(fault, counters, config)
            if looped is not None:
                return looped, counters
    if counters.fruitless >= MAX_FRUITLESS_ATTEMPTS:
        what = "ended without a Commit" if fault.kind is FaultKind.REPLICAS else "finished no step"
        reason = f"{counters.fruitless} attempts in a row {what}; last: {fault.detail}"
        return Stop(exit_code=ExitCode.FAILURE_BUDGET, reason=reason), counters
    return Regroup(cause=fault.kind.value, reason=fault.detail), counters


def _break_loop(fault: Fault, counters: Counters, config: FailureConfig) -> tuple[Stop | None, Counters]:
    """Stop once members were lost, hung or cut off at one step too often: it is the step then, not the machines. A node
    that is lost says nothing of the step."""
    if fault.step is None or fault.kind not in _LOOPING:
        return None, counters
    failure = Failure.of(fault.kind.value, fault.step, doubt=fault.step_doubt)
    repeats, count = count_again(counters.repeats, failure)
    counters = replace(counters, repeats=repeats)
    limit = config.max_same_step_failures
    if limit is None or count < limit:
        return None, counters
    reason = (
        f"crash loop: {fault.kind.value} at step {repeats[-1].step} for the {count}. time"
        f" (failure.max_same_step_failures is {limit}): it is the step, not the machines; last: {fault.detail}"
    )
    return Stop(exit_code=ExitCode.FAILURE_BUDGET, reason=reason), counters


def _starved_again(fault: Fault, counters: Counters) -> tuple[Stop | None, Counters]:
    """Stop where memory ran out at one step twice: a neighbour's hunger passes, the training's own comes back."""
    if fault.kind is not FaultKind.OUT_OF_MEMORY or fault.step is None:
        return None, counters
    failure = Failure.of(fault.kind.value, fault.step, doubt=fault.step_doubt)
    repeats, count = count_again(counters.repeats, failure)
    counters = replace(counters, repeats=repeats)
    if count < _MAX_SAME_STARVATIONS:
        return None, counters
    advice = "lower data.micro_batch, or give each worker more memory"
    reason = f"out of memory at the same step twice: {fault.detail}; {advice}"
    return Stop(exit_code=ExitCode.USER_ERROR, reason=reason), counters


def _after_user_error(fault: Fault, counters: Counters, config: FailureConfig) -> tuple[Regroup | Stop, Counters]:
    counters, count = replace(counters, user_errors=counters.user_errors + 1), 1
    if (root := fault.root) is not None:
        failure = Failure.of(fault.kind.value, root.step, error_type=root.error_type, message=root.message)
        repeats, count = count_again(counters.repeats, failure, is_lasting=True)
        counters = replace(counters, repeats=repeats)
    if count >= _MAX_SAME_USER_ERRORS:
        reason = f"the same error at the same step twice: {fault.detail}"
        return Stop(exit_code=ExitCode.USER_ERROR, reason=reason), counters
    if _over(counters.user_errors, config.max_user_errors):
        return Stop(exit_code=ExitCode.USER_ERROR, reason=fault.detail), counters
    return Regroup(cause=fault.kind.value, reason=fault.detail), counters


def _after_bad_step(
    fault: Fault, root: FailureCause, counters: Counters, config: FailureConfig
) -> tuple[Regroup | Stop, Counters]:
    """Go back and leave the step's samples out; where it goes wrong with others too, they are not the cause."""
    if root.error_type == StepNotFinite.__name__ and config.nan == "stop":
        return Stop(exit_code=ExitCode.USER_ERROR, reason=f"failure.nan is stop: {fault.detail}"), counters
    repeats, count = count_again(counters.repeats, Failure.of(fault.kind.value, root.step), is_lasting=True)
    counters = replace(counters, repeats=repeats)
    num_skipped = len({window.step for window in counters.skipped})
    if count >= _MAX_SAME_BAD_STEPS:
        reason = f"step {root.step} went wrong again, with other samples than before: {fault.detail}"
    elif num_skipped >= config.max_skipped_windows:
        reason = f"{num_skipped} windows are left out already (failure.max_skipped_windows): {fault.detail}"
    else:
        counters = replace(counters, skipped=(*counters.skipped, *root.windows))
        return Regroup(cause=fault.kind.value, reason=f"going on without its samples: {fault.detail}"), counters
    return Stop(exit_code=ExitCode.USER_ERROR, reason=reason), counters

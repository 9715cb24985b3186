"""Folds the events of all drivers of a Run into its summary: what `summary.json` holds. Pure: no file, no clock.

Events come in the order they were written. Lines of an older Attempt that arrive late change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NotRequired, TypedDict

from orchestrator.event_fields import Event, float_of, int_of, text_of
from orchestrator.fault_fold import PLANNED_CAUSES, FaultFold
from orchestrator.memory_summary import MemoryFold, MemorySummary, farthest_tier
from orchestrator.save_summary import SaveFold, SavesSummary, stored_bytes_of
from orchestrator.skipped_summary import SkippedSummary, skipped_window
from orchestrator.storage_summary import StorageFold, StorageSummary
from orchestrator.verified_fold import VerifiedFold, VerifiedSummary

__all__ = [
    "AttemptSummary",
    "CommitSummary",
    "EvalSummary",
    "Event",
    "Goodput",
    "RunSummary",
    "StepLoss",
    "SummaryFold",
    "WorldSize",
    "back_after_s",
    "begins_history",
    "summarize",
]

_DRIVER_RESTART = "driver-restart"
_PREEMPTION = "preemption"


class WorldSize(TypedDict):
    step: int
    size: int


class StepLoss(TypedDict):
    step: int
    loss: float


class EvalSummary(TypedDict):
    step: int
    loss: float


class CommitSummary(TypedDict):
    step: int
    bytes: int
    stall_s: float
    upload_s: float


class AttemptSummary(TypedDict):
    """``halted_s``: since when nothing was trained; not in a summary of an older version."""

    attempt: int
    cause: str
    world_size: int
    wanted_workers: int
    fault_s: float | None
    halted_s: NotRequired[float | None]
    detected_s: float | None
    regrouped_s: float | None
    first_step_s: float | None
    lost_steps: int
    restored_step: int
    restored_from: str


class Goodput(TypedDict):
    total_s: float
    productive_s: float
    lost_work_s: float
    recovery_s: float
    startup_s: float
    save_stall_s: float


class RunSummary(TypedDict):
    run_id: str
    status: str
    exit_reason: str
    exit_code: int | None
    steps: int
    tokens: int
    loss_first: float | None
    loss_last: float | None
    world_sizes: list[WorldSize]
    attempts: list[AttemptSummary]
    commits: list[CommitSummary]
    weights_digest: str | None
    sample_digest: str | None
    goodput: Goodput
    preemptions: int
    failures: int
    evals: list[EvalSummary]
    losses: list[StepLoss]
    skipped_windows: list[SkippedSummary]
    blocked_nodes: dict[str, str]
    storage: StorageSummary
    memory: MemorySummary
    saves: SavesSummary
    verified: VerifiedSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    loss: float
    tokens: int
    sample_chain: str | None
    step_s: float
    world_size: int


@dataclass(slots=True)
class SummaryFold:
    """Takes events one by one; `result` may be asked for at any time."""

    _run_id: str = ""
    _status: str = "running"
    _exit_reason: str = ""
    _exit_code: int | None = None
    _weights_digest: str | None = None
    _last_s: float = 0.0
    _trained_until_s: float = 0.0
    _lost_work_s: float = 0.0
    _recovery_s: float = 0.0
    _startup_s: float = 0.0
    _attempts: list[AttemptSummary] = field(default_factory=list)
    _steps: dict[int, _Step] = field(default_factory=dict)
    _evals: dict[int, float] = field(default_factory=dict)
    _commits: list[CommitSummary] = field(default_factory=list)
    _faults: FaultFold = field(default_factory=FaultFold)
    _unplanned: list[str] = field(default_factory=list)
    _has_driver: bool = False
    _driver_vanished: bool = False
    _skipped: list[SkippedSummary] = field(default_factory=list)
    _ended_step: int = 0
    _first_began_s: float | None = None
    _blocked_nodes: dict[str, str] = field(default_factory=dict)
    _storage: StorageFold = field(default_factory=StorageFold)
    _memory: MemoryFold = field(default_factory=MemoryFold)
    _saves: SaveFold = field(default_factory=SaveFold)
    _verified: VerifiedFold = field(default_factory=VerifiedFold)

    def add(self, event: Event) -> None:
        """Take in one event; unknown ones only move the clock."""
        self._last_s = max(self._last_s, float_of(event, "t_s"))
        self._storage.add(event)
        self._memory.add(event)
        self._saves.add(event)
        self._verified.add(event)
        if event.get("event") == "driver_started" and self._faults.newest_cause is not None:
            self._unplanned.append(self._faults.newest_cause)  # it ended the driver before: no Attempt followed it
        self._faults.add(event)
        match event.get("event"):
            case "run_started":
                self._run_id = self._run_id or text_of(event, "run_id")
            case "driver_started":
                self._driver_vanished = self._has_driver and self._status == "running"
                self._has_driver = True
                self._status, self._exit_reason, self._exit_code = "running", "", None
            case "attempt_started":
                self._start_attempt(event)
            case "restored" if self._is_current(event):
                # The plan said where from; this is where the bytes really came from.
                tier = farthest_tier(event.get("tiers"))
                self._attempts[-1]["restored_from"] = tier or self._attempts[-1]["restored_from"]
            case "regrouped" if self._is_current(event):
                self._set_regrouped(float_of(event, "t_s"))
            case "step" if self._is_current(event):
                self._add_step(event)
            case "eval" if self._is_current(event):
                self._evals[int_of(event, "step")] = float_of(event, "loss")
            case "node_blocked":
                self._blocked_nodes[text_of(event, "node")] = text_of(event, "reason")
            case "decision" if event.get("decision") == "keep":  # of a node: it is used again
                self._blocked_nodes.pop(text_of(event, "node"), None)
            case "window_skipped":
                self._skipped.append(skipped_window(event))
            case "committed":
                self._commits.append(_commit(event))
            case "attempt_ended" if self._is_current(event):
                self._ended_step = int_of(event, "last_step")
            case "run_finished":
                self._status = text_of(event, "status")
                self._exit_reason = text_of(event, "exit_reason")
                self._exit_code = int_of(event, "exit_code")
                digest = event.get("weights_digest")
                self._weights_digest = digest if isinstance(digest, str) else None

    def result(self) -> RunSummary:
        """The summary of all events so far."""
        history = sorted(self._steps.items())
        last = history[-1][1] if history else None
        # The last fault may have ended the run, so that no Attempt followed it.
        newest = self._faults.newest_cause
        causes = [*self._unplanned, *([] if newest is None else [newest])]
        return RunSummary(
            run_id=self._run_id,
            status=self._status,
            exit_reason=self._exit_reason,
            exit_code=self._exit_code,
            steps=history[-1][0] if history else 0,
            tokens=last.tokens if last else 0,
            loss_first=history[0][1].loss if history else None,
            loss_last=last.loss if last else None,
            world_sizes=_size_changes(history),
            attempts=[attempt.copy() for attempt in self._attempts],
            commits=list(self._commits),
            weights_digest=self._weights_digest,
            sample_digest=last.sample_chain if last else None,
            goodput=self._goodput(),
            preemptions=causes.count(_PREEMPTION),
            failures=len(causes) - causes.count(_PREEMPTION),
            evals=[EvalSummary(step=step, loss=loss) for step, loss in sorted(self._evals.items())],
            losses=[StepLoss(step=step, loss=value.loss) for step, value in history],
            skipped_windows=list(self._skipped),
            blocked_nodes=dict(self._blocked_nodes),
            storage=self._storage.result(),
            memory=self._memory.result(),
            saves=self._saves.result(),
            verified=self._verified.result(),
        )

    def _is_current(self, event: Event) -> bool:
        return bool(self._attempts) and int_of(event, "attempt") == self._attempts[-1]["attempt"]

    def _start_attempt(self, event: Event) -> None:
        restored_step = int_of(event, "restored_step")
        finished = max([self._ended_step, *self._steps])
        fault_s, detected_s = self._faults.begin(event, is_first=not self._attempts)
        self._attempts.append(
            AttemptSummary(
                attempt=int_of(event, "attempt"),
                cause=text_of(event, "cause"),
                world_size=int_of(event, "world_size"),
                wanted_workers=int_of(event, "wanted_workers") or int_of(event, "world_size"),
                fault_s=fault_s,
                halted_s=None if fault_s is None else max(fault_s, self._trained_until_s),
                detected_s=detected_s,
                regrouped_s=None,
                first_step_s=None,
                lost_steps=max(0, finished - restored_step, int_of(event, "lost_steps")),
                restored_step=restored_step,
                restored_from=text_of(event, "restored_from") or "none",
            )
        )
        cause = self._attempts[-1]["cause"]
        # A driver that said goodbye and was submitted again is no failure; one that vanished is.
        if cause not in PLANNED_CAUSES and (cause != _DRIVER_RESTART or self._driver_vanished):
            self._unplanned.append(cause)
        self._driver_vanished = False
        self._forget_after(restored_step)
        self._ended_step = 0
        self._first_began_s = None

    def _set_regrouped(self, seen_s: float) -> None:
        """The driver asks now and then, so it may see the ranks formed only after they have begun to train."""
        began_s = self._first_began_s
        self._attempts[-1]["regrouped_s"] = seen_s if began_s is None else min(seen_s, began_s)

    def _forget_after(self, step: int) -> None:
        self._lost_work_s += sum(value.step_s for number, value in self._steps.items() if number > step)
        self._steps = {number: value for number, value in self._steps.items() if number <= step}
        self._evals = {number: loss for number, loss in self._evals.items() if number <= step}

    def _add_step(self, event: Event) -> None:
        attempt = self._attempts[-1]
        step_s = float_of(event, "step_s")
        finished_s = float_of(event, "finished_s") or float_of(event, "t_s")
        self._trained_until_s = max(self._trained_until_s, finished_s)
        if attempt["first_step_s"] is None:
            attempt["first_step_s"] = finished_s
            self._first_began_s = began_s = max(0.0, finished_s - step_s)
            if attempt["regrouped_s"] is not None:
                self._set_regrouped(attempt["regrouped_s"])
            halted_s = attempt.get("halted_s")
            if halted_s is None:
                self._startup_s += began_s
            else:
                self._recovery_s += max(0.0, began_s - halted_s)
        chain = event.get("sample_chain")
        self._steps[int_of(event, "step")] = _Step(
            loss=float_of(event, "loss"),
            tokens=int_of(event, "tokens"),
            sample_chain=chain if isinstance(chain, str) else None,
            step_s=step_s,
            world_size=int_of(event, "world_size") or attempt["world_size"],
        )

    def _goodput(self) -> Goodput:
        return Goodput(
            total_s=self._last_s,
            productive_s=sum(value.step_s for value in self._steps.values()),
            lost_work_s=self._lost_work_s,
            recovery_s=self._recovery_s,
            startup_s=self._startup_s,
            save_stall_s=sum(commit["stall_s"] for commit in self._commits),
        )


def summarize(events: Iterable[Event]) -> RunSummary:
    """The summary of a whole event log."""
    fold = SummaryFold()
    for event in events:
        if begins_history(event):
            fold = SummaryFold()
        fold.add(event)
    return fold.result()


def back_after_s(attempt: AttemptSummary) -> float | None:
    """From when nothing was trained to the end of the first step; None where nothing failed or no step was finished."""
    halted_s, first_step_s = attempt.get("halted_s", attempt["fault_s"]), attempt["first_step_s"]
    return None if halted_s is None or first_step_s is None else max(0.0, first_step_s - halted_s)


def begins_history(event: Event) -> bool:
    """Whether a Run began here. What stands before is of an older Run whose URL was emptied and used again."""
    return event.get("event") == "run_started" and event.get("is_new") is True


def _commit(event: Event) -> CommitSummary:
    return CommitSummary(
        step=int_of(event, "step"),
        bytes=stored_bytes_of(event),
        stall_s=float_of(event, "stall_s"),
        upload_s=float_of(event, "upload_s"),
    )


def _size_changes(history: list[tuple[int, _Step]]) -> list[WorldSize]:
    changes: list[WorldSize] = []
    for step, value in history:
        if not changes or changes[-1]["size"] != value.world_size:
            changes.append(WorldSize(step=step, size=value.world_size))
    return changes

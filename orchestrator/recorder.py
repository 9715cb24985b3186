"""The recorder: turns Signals and the controller's doings into event lines, and keeps the few facts read back.

One writer of the driver's events; the schema is docs/events.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any, Protocol, assert_never

from orchestrator.save_facts import Weighed
from orchestrator.signals import (
    Committed,
    Evaluated,
    Quarantined,
    SaveBound,
    SaveDelayed,
    SaveFailed,
    SaveShare,
    SaveSkipped,
    SaveSlow,
    SaveWeighed,
    Signal,
    StepFinished,
    ThresholdMoved,
)
from storage.keys import Attempt
from workers.contract import StepReport

__all__ = ["EventSink", "Recorder"]

_log = logging.getLogger(__name__)


class EventSink(Protocol):
    """Where event lines go (storage.events.EventLog)."""

    def emit(
        self, event: str, *, attempt: int | None = None, step: int | None = None, rank: int | None = None, **fields: Any
    ) -> None: ...


class Recorder:
    """Emits events and remembers the newest finished step over all Attempts of this driver."""

    def __init__(self, sink: EventSink, *, start_unix_s: float, newest_step: int = 0) -> None:
        self._sink = sink
        self._start_unix_s = start_unix_s
        self._world_size = 0
        self.newest_step = newest_step
        self.steps_this_attempt = 0
        self.commits_this_attempt = 0
        self.newest_step_this_attempt = 0
        self.safe_step_this_attempt = -1  # in memory, replicas included
        self.newest_step_s: float | None = None
        self.num_commits = 0  # of this driver
        self._delayed: set[tuple[int, int | None]] = set()
        self._is_share_told = False  # in this Attempt
        self._listeners: list[Callable[[Signal], None]] = []

    def listen(self, listener: Callable[[Signal], None]) -> None:
        """Tell ``listener`` every Signal once it is recorded."""
        self._listeners.append(listener)

    @property
    def world_size(self) -> int:
        """Of the newest Attempt; 0 before the first."""
        return self._world_size

    def since_start_s(self, unix_s: float) -> float:
        """A wall-clock time as seconds since the Run's start, as events give it."""
        return round(unix_s - self._start_unix_s, 6)

    def attempt_started(self, attempt: Attempt, world_size: int, **fields: Any) -> None:
        self._world_size = world_size
        self.steps_this_attempt = 0
        self.commits_this_attempt = 0
        self.newest_step_this_attempt = int(fields["restored_step"])
        self.safe_step_this_attempt = -1
        self._delayed.clear()
        self._is_share_told = False
        self._sink.emit("attempt_started", attempt=attempt.number, world_size=world_size, **fields)

    def emit(self, event: str, *, attempt: Attempt | None = None, step: int | None = None, **fields: Any) -> None:
        self._sink.emit(event, attempt=None if attempt is None else attempt.number, step=step, **fields)

    def saw_step(self, step: int) -> None:
        """A rank finished ``step``, as it said itself when its Attempt ended."""
        if step > self.newest_step_this_attempt:
            self.steps_this_attempt = max(1, self.steps_this_attempt)
            self.newest_step_this_attempt = step
        self.newest_step = max(self.newest_step, step)

    def lost_steps(self, restored_step: int) -> int:
        """Finished optimizer steps that must be run again from ``restored_step``."""
        return max(0, self.newest_step - restored_step)

    def forget_beyond(self, restored_step: int) -> None:
        """History goes on from ``restored_step``; what lies beyond was rolled back and counted."""
        self.newest_step = restored_step

    def record(self, signals: Iterable[Signal]) -> None:
        for signal in signals:
            self._record_one(signal)
            for listener in self._listeners:
                listener(signal)

    def _record_one(self, signal: Signal) -> None:
        number = signal.attempt.number
        match signal:
            case StepFinished(report=report):
                self.newest_step = max(self.newest_step, report.step)
                self.newest_step_this_attempt = max(self.newest_step_this_attempt, report.step)
                self.steps_this_attempt += 1
                self.safe_step_this_attempt = max(self.safe_step_this_attempt, report.safe_step)
                self.newest_step_s = report.step_s
                self._sink.emit(
                    "step",
                    attempt=number,
                    step=report.step,
                    loss=report.loss,
                    grad_norm=report.grad_norm,
                    lr=report.lr,
                    tokens=report.tokens,
                    position=report.position,
                    sample_chain=report.sample_chain,
                    step_s=report.step_s,
                    finished_s=self.since_start_s(report.finished_at_s),
                    world_size=self._world_size,
                    **_memory_fields(report),
                    **_trace_fields(report),
                    **_scaling_fields(report),
                )
            case Evaluated(report=report):
                self._sink.emit(
                    "eval",
                    attempt=number,
                    step=report.step,
                    loss=report.loss,
                    best=report.best,
                    best_step=report.best_step,
                )
            case SaveWeighed(weighed=weighed):
                self._sink.emit("save_weighed", attempt=number, step=weighed.step, **_weighed_fields(weighed))
            case ThresholdMoved(move=move):
                self._sink.emit(
                    "threshold_moved", attempt=number, step=move.step, old=move.old, new=move.new, why=move.why
                )
                _log.info("threshold offset %.3f -> %.3f: %s", move.old, move.new, move.why)
            case SaveShare(report=report):
                if not self._is_share_told:  # rank 0 says it once, but a call that failed may have brought it
                    self._is_share_told = True
                    self._sink.emit("save_share", attempt=number, **asdict(report))
            case SaveBound(bound=bound, reason=reason):
                kind = bound.kind.name.lower()
                self._sink.emit("save_bound", attempt=number, step=bound.step, kind=kind, reason=reason)
            case SaveSkipped(step=step):
                reason = "two earlier saves are not settled yet"
                self._sink.emit("save_skipped", attempt=number, step=step, reason=reason)
            case SaveFailed(step=step, reason=reason, next_try_in_s=wait_s):
                self._sink.emit("save_failed", attempt=number, step=step, reason=reason, next_try_in_s=wait_s)
                if signal.disagreement is not None:
                    self._sink.emit("replicas_disagree", attempt=number, step=step, **asdict(signal.disagreement))
                    _log.error("step %d is not committed: %s", step, reason)
            case SaveDelayed(step=step, rank=rank):
                if (step, rank) not in self._delayed:  # the first word of it is enough: an outage has its own events
                    self._delayed.add((step, rank))
                    self._sink.emit(
                        "save_delayed",
                        attempt=number,
                        step=step,
                        rank=rank,
                        reason=signal.reason,
                        failing_for_s=signal.failing_for_s,
                    )
            case SaveSlow(step=step):
                self._sink.emit(
                    "save_slow",
                    attempt=number,
                    step=step,
                    seconds=signal.seconds,
                    usual_s=signal.usual_s,
                    cause=signal.cause,
                )
                _log.warning(
                    "save of step %d takes %.1f s, usual are %.1f s: %s",
                    step,
                    signal.seconds,
                    signal.usual_s,
                    signal.cause,
                )
            case Committed():
                self.commits_this_attempt += 1
                self.num_commits += 1
                self._sink.emit(
                    "committed",
                    attempt=number,
                    step=signal.step,
                    bytes=signal.stored_bytes,
                    stall_s=signal.stall_s,
                    encode_s=signal.encode_s,
                    upload_s=signal.upload_s,
                    commit_s=signal.commit_s,
                    write_s=signal.write_s,
                    upload_retries=signal.upload_retries,
                    loss=signal.loss,
                )
            case Quarantined(step=step, key=key, reason=reason):
                self._sink.emit("quarantined", attempt=number, step=step, key=key, reason=reason)
                _log.warning("step %d is quarantined: %s: %s", step, key, reason)
            case _:
                assert_never(signal)


def _weighed_fields(weighed: Weighed) -> dict[str, Any]:
    """``due_in_s`` below 0: it has been due for so long; null: that policy does not ask."""
    wish = weighed.wish
    return {
        "opinions": [
            {
                "policy": opinion.policy,
                "due_in_s": None if opinion.due_at_s is None else round(opinion.due_at_s - weighed.now_s, 3),
                "why": opinion.why,
                "is_pressing": opinion.is_pressing,
            }
            for opinion in weighed.opinions
        ],
        "wish": None if wish is None else {"policy": wish.policy, "reason": wish.reason},
        "held_back": weighed.held_back,
    }


def _memory_fields(report: StepReport) -> dict[str, Any]:
    """Nothing where the memory Tier is off."""
    if report.memory_step < 0 and report.safe_step < 0:
        return {}
    return {
        "memory_step": report.memory_step,
        "safe_step": report.safe_step,
        "memory_stall_s": report.memory_stall_s,
    }


def _trace_fields(report: StepReport) -> dict[str, Any]:
    """Nothing where the step is not traced."""
    if report.weights_digest is None:
        return {}
    return {
        "weights_digest": report.weights_digest,
        "optimizer_digest": report.optimizer_digest,
        "schedule_digest": report.schedule_digest,
        "rest_digest": report.rest_digest,
        "rng_digest": report.rng_digest,
        **({} if report.own_digest is None else {"own_digest": report.own_digest}),
    }


def _scaling_fields(report: StepReport) -> dict[str, Any]:
    """Nothing without loss scaling."""
    if report.loss_scale is None:
        return {}
    return {"loss_scale": report.loss_scale, "is_update_skipped": report.is_update_skipped}

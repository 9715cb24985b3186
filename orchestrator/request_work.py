"""Carries out what people ask a running driver for: another number of workers, a save, a stop. Part of the controller.

How requests come and replies go is the desk's business (requests); what is wanted of the World is kept by sizing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from orchestrator.report_text import count
from orchestrator.requests import ReplyState, Request
from orchestrator.signals import Committed, SaveBound, SaveFailed, SaveSkipped, Signal, StepFinished
from storage.keys import Attempt
from workers.contract import OrderKind

__all__ = ["Desk", "RequestWork", "Size"]

_log = logging.getLogger(__name__)


class Desk(Protocol):
    """Where requests come from (requests.RequestDesk)."""

    def take(self) -> tuple[Request, ...]: ...

    def answer(self, nonce: str, state: ReplyState, reason: str = "", step: int | None = None) -> None: ...


class Size(Protocol):
    """What this file needs of sizing.Sizing."""

    def refuse(self, wanted: int) -> str | None: ...

    def want(self, wanted: int) -> None: ...

    def reached(self) -> None: ...


class Record(Protocol):
    """What this file needs of the recorder."""

    @property
    def newest_step(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def steps_this_attempt(self) -> int: ...

    def emit(self, event: str, **fields: Any) -> None: ...


@dataclass(slots=True, kw_only=True)
class _Scale:
    nonce: str
    workers: int


@dataclass(slots=True, kw_only=True)
class _Save:
    """``after_step``: a Commit of a later step is what was asked for. ``number`` None: nothing is ordered yet."""

    nonce: str
    after_step: int
    number: int | None = None
    bound_step: int | None = None


class RequestWork:
    """One per driver; called by the controller's thread alone.

    ``may_order``: a World trains and is not asked to leave, which an Order would undo. ``keep_size`` writes a wish into
    the Journal and returns why it could not; ``ask_cluster`` tells an autoscaler.
    """

    def __init__(
        self,
        *,
        desk: Desk,
        sizing: Size,
        record: Record,
        total_steps: int,
        may_order: Callable[[], bool],
        submit_snapshot: Callable[[str], int],
        keep_size: Callable[[int], str | None],
        ask_cluster: Callable[[], None],
        stop: Callable[[], None],
    ) -> None:
        self._desk = desk
        self._sizing = sizing
        self._record = record
        self._total_steps = total_steps
        self._may_order = may_order
        self._submit_snapshot = submit_snapshot
        self._keep_size = keep_size
        self._ask_cluster = ask_cluster
        self._stop = stop
        self._scale: _Scale | None = None
        self._saves: list[_Save] = []
        self._stops: list[str] = []
        self._attempt: Attempt | None = None
        self._committed_step = 0

    def tick(self) -> None:
        """Take what came in; order a save where one is wanted and training goes on."""
        for request in self._desk.take():
            self._record.emit("request", wish=request.wish, workers=request.workers, made_by=request.made_by)
            _log.info("asked by %s: %s %s", request.made_by or "someone", request.wish, request.workers or "")
            match request.wish:
                case "scale":
                    self._begin_scale(request.nonce, request.workers or 0)
                case "save":
                    self._begin_save(request.nonce)
                case "stop":
                    self._stops.append(request.nonce)
                    self._desk.answer(request.nonce, "accepted", "saving the newest step, then stopping")
                    self._stop()
        self._order_save()

    def on_signal(self, signal: Signal) -> None:
        """A listener of the recorder."""
        match signal:
            case StepFinished(attempt=attempt):
                self._note_attempt(attempt)
                self._note_size(signal.report.step)
            case SaveBound(bound=bound) if bound.kind is not OrderKind.PART:
                for save in self._saves:
                    # A policy's Order, or a Leave, may have taken the place of one that was not bound yet.
                    if save.number is not None and save.bound_step is None and save.number <= bound.number:
                        save.bound_step = bound.step
                        self._desk.answer(save.nonce, "accepted", "being saved", bound.step)
            case Committed(step=step):
                self._committed_step = max(self._committed_step, step)
                for save in [save for save in self._saves if step > save.after_step]:
                    self._saves.remove(save)
                    self._desk.answer(save.nonce, "done", f"step {step} is committed", step)
            case SaveFailed(step=step, reason=reason):
                self._give_up_saves(step, reason)
            case SaveSkipped(step=step):
                self._give_up_saves(step, "it was left out: two earlier saves are not settled yet; ask again")
            case _:
                pass

    def end(self, reason: str, *, is_stop: bool) -> None:
        """The Run has ended for this driver: say so to everyone who still waits."""
        for nonce in self._stops:
            step = self._record.newest_step
            self._desk.answer(nonce, "done" if is_stop else "refused", f"the run has ended: {reason}", step)
        open_nonces = [save.nonce for save in self._saves] + ([self._scale.nonce] if self._scale else [])
        for nonce in [*open_nonces, *(request.nonce for request in self._desk.take())]:
            self._desk.answer(nonce, "refused", f"the run has ended: {reason}")
        self._stops, self._saves, self._scale = [], [], None

    # -- the World's size -------------------------------------------------------------------------------------------

    def _begin_scale(self, nonce: str, workers: int) -> None:
        refusal = self._sizing.refuse(workers) or self._keep_size(workers)
        if refusal is not None:
            self._record.emit("decision", decision="refuse", reason=refusal)
            self._desk.answer(nonce, "refused", refusal)
            return
        if self._scale is not None:
            self._desk.answer(self._scale.nonce, "refused", f"a later request wants {workers} workers")
        self._scale = _Scale(nonce=nonce, workers=workers)
        self._sizing.want(workers)
        self._ask_cluster()
        reason = f"{workers} workers are wanted, {self._record.world_size} train"
        self._record.emit("decision", decision="scale", workers=workers, reason=reason)
        self._desk.answer(nonce, "accepted", reason)
        if self._record.steps_this_attempt:
            self._note_size(self._record.newest_step)

    def _note_size(self, step: int) -> None:
        if self._scale is None or self._record.world_size != self._scale.workers:
            return
        nonce, workers = self._scale.nonce, self._scale.workers
        self._scale = None
        self._sizing.reached()
        self._desk.answer(nonce, "done", f"{count(workers, 'worker')} train", step)

    # -- saves ------------------------------------------------------------------------------------------------------

    def _begin_save(self, nonce: str) -> None:
        newest = self._record.newest_step
        if newest >= self._total_steps:  # its save was ordered long ago, or is there already
            if self._committed_step >= newest:
                self._desk.answer(nonce, "done", f"step {newest} is committed", newest)
                return
            newest = self._total_steps - 1
        self._saves.append(_Save(nonce=nonce, after_step=newest))
        self._desk.answer(nonce, "accepted", "the next steps are saved" if self._is_training else "no step is made now")

    @property
    def _is_training(self) -> bool:
        return self._record.steps_this_attempt > 0 and self._may_order()

    def _order_save(self) -> None:
        """One Order serves everyone who waits; an Order that is not bound yet would be replaced by another."""
        waiting = [save for save in self._saves if save.number is None]
        is_one_on_its_way = any(save.number is not None and save.bound_step is None for save in self._saves)
        if waiting and not is_one_on_its_way and self._is_training and self._record.newest_step < self._total_steps:
            number = self._submit_snapshot("asked for")
            for save in waiting:
                save.number = number

    def _note_attempt(self, attempt: Attempt) -> None:
        """What was ordered of an Attempt that is over is ordered again of the next."""
        if attempt == self._attempt:
            return
        self._attempt = attempt
        for save in self._saves:
            save.number = save.bound_step = None
            save.after_step = min(save.after_step, self._record.newest_step - 1)  # steps may have been rolled back

    def _give_up_saves(self, step: int, reason: str) -> None:
        for save in [save for save in self._saves if save.bound_step == step]:
            self._saves.remove(save)
            self._desk.answer(save.nonce, "refused", f"the save of step {step} failed: {reason}", step)

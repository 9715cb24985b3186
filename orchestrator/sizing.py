"""How large the World is to be now: the configuration, over it what a person asked for, and what has been measured.

Holds what the pure scaling_policy is asked with. Starts, stops and orders nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from orchestrator.config import RunConfig, WorldConfig
from orchestrator.decisions import Keep, Leave
from orchestrator.journal import JournalEntry
from orchestrator.pace import Pace
from orchestrator.scaling_policy import GrowthFacts, WorkerView, decide_leave, refuse_size

__all__ = ["SCALE", "Sizing"]

SCALE = "scale"
"""Kind of the Journal entry that keeps what a person asked for over a driver's end."""


class DecisionSink(Protocol):
    """Where a decision that changes nothing is said (Recorder)."""

    def emit(self, event: str, **fields: Any) -> None: ...


class Sizing:
    """One per driver. ``pace`` is fed by whoever sees the Signals."""

    def __init__(
        self,
        config: RunConfig,
        recorder: DecisionSink,
        entries: Sequence[JournalEntry] = (),
        *,
        pace: Pace | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._configured = config.world
        self._num_leaves = config.data.num_leaves
        self._recorder = recorder
        self._monotonic = monotonic
        self.pace = pace or Pace()
        self._wanted = _wanted_before(entries, config.world)
        self._is_asked_for = False
        self._ready_since_s: float | None = None
        self._said = ""

    @property
    def world(self) -> WorldConfig:
        """The configuration with the maximum that is wanted now."""
        if self._wanted is None:
            return self._configured
        return self._configured.model_copy(update={"max_workers": self._wanted})

    @property
    def num_workers(self) -> int:
        """Workers to keep: those of a full World and the spares."""
        return self.world.max_workers + self._configured.spares

    def refuse(self, wanted: int) -> str | None:
        """Why a World of ``wanted`` cannot be had; None: it can."""
        return refuse_size(wanted, self._configured, self._num_leaves)

    def as_entry(self, wanted: int) -> dict[str, int]:
        """What the Journal keeps of such a wish: it holds until someone changes the configuration's maximum."""
        return {"workers": wanted, "configured": self._configured.max_workers}

    def want(self, wanted: int) -> None:
        """From here on. Growing to it is not reckoned up against its cost: a person wants it."""
        self._wanted, self._is_asked_for = wanted, True

    def reached(self) -> None:
        """The World has the size that was asked for: later joins, as in a lost member's place, must pay again."""
        self._is_asked_for = False

    def consider(
        self, workers: Sequence[WorkerView], *, steps_left: int, is_someone_starting: bool, may_change: bool
    ) -> Keep | Leave:
        """Whether the running World should part. Why it does not grow although it could is said once."""
        is_free = any(w.is_ready and not w.is_draining and not w.is_member for w in workers)
        now = self._monotonic()
        if not is_free:
            self._ready_since_s = None
        elif self._ready_since_s is None:
            self._ready_since_s = now
        world = self.world
        facts = GrowthFacts(
            steps_left=steps_left,
            step_s=self.pace.step_s,
            regroup_s=self.pace.regroup_s,
            num_leaves=self._num_leaves,
            ready_for_s=0.0 if self._ready_since_s is None else now - self._ready_since_s,
            is_someone_starting=is_someone_starting,
            is_asked_for=self._is_asked_for,
        )
        if not may_change:
            world = world.model_copy(update={"max_workers": sum(worker.is_member for worker in workers)})
        decision = decide_leave(workers, world, facts)
        self._say(decision, workers)
        return decision

    def _say(self, decision: Keep | Leave, workers: Sequence[WorkerView]) -> None:
        if isinstance(decision, Leave) or not decision.reason:
            return
        about = ",".join(
            sorted(w.worker_id for w in workers if w.is_ready)
        )  # the figures in the reason change all along
        if about != self._said:
            self._said = about
            self._recorder.emit("decision", decision="keep", reason=decision.reason)


def _wanted_before(entries: Sequence[JournalEntry], world: WorldConfig) -> int | None:
    """What a person asked an earlier driver for, unless the configuration was changed since."""
    for entry in reversed(entries):
        if entry.kind != SCALE:
            continue
        wanted, configured = entry.fields.get("workers"), entry.fields.get("configured")
        if isinstance(wanted, int) and configured == world.max_workers and wanted >= world.min_workers:
            return wanted
        return None
    return None

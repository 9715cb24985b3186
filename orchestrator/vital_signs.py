"""The vital signs of one World's members: heartbeats, lifelines, and what Ray says. Tells who is gone and who hangs.

It asks and collects; judging pulses is `heartbeats`', and what follows from a death is the Attempt's business.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import ray

from orchestrator.config import FailureConfig
from orchestrator.heartbeats import Hang, Pulse, judge
from orchestrator.lifelines import Lifelines
from orchestrator.worker_group import WorkerGroup
from workers.contract import Heartbeat, World

__all__ = ["GONE", "VitalSigns"]

_log = logging.getLogger(__name__)
# Ray reports an actor that its memory monitor killed by an error that is not one of an actor.
_DEAD = (ray.exceptions.ActorDiedError, ray.exceptions.OutOfMemoryError)
# And who has no memory left to answer with, or cannot be reached, is of no more use.
GONE = (*_DEAD, ray.exceptions.RayActorError, ray.exceptions.RayTaskError)
_PROOF_S = 2.0  # how long a node's agent may take to say whether a process of its machine lives


@dataclass(slots=True, kw_only=True)
class _Vitals:
    """Outstanding and newest heartbeat of one member."""

    ref: Any = None
    beat: Heartbeat | None = None
    asked_at: float = 0.0
    answered_at: float = field(default_factory=time.monotonic)


@dataclass(slots=True, kw_only=True)
class _Doubt:
    """A member whose line has ended while its node's agent stands: the agent is asked whether the process lives."""

    cut_at_s: float
    ref: Any
    asked_at: float = field(default_factory=time.monotonic)
    is_settled: bool = False


class VitalSigns:
    """Not thread-safe; owned by the AttemptRun. Nothing here blocks for longer than a look at what has arrived."""

    def __init__(self, world: World, group: WorkerGroup, config: FailureConfig) -> None:
        self._group, self._config = group, config
        self._lifelines: Lifelines = group.lifelines
        self._members = world.members
        self._vitals = {member.worker_id: _Vitals() for member in world.members}
        self._doubts: dict[str, _Doubt] = {}
        self.gone: dict[str, str] = {}
        self.unproven: set[str] = set()
        """Those of the gone that only did not answer as they should: their processes may live, and train on."""

    def lose(self, worker_id: str, error: Exception) -> None:
        """A call to this member has failed with one of `GONE`."""
        self.gone[worker_id] = type(error).__name__
        if not isinstance(error, _DEAD):
            self.unproven.add(worker_id)

    def beats(self) -> dict[str, Heartbeat | None]:
        """The newest heartbeat of each member, in rank order."""
        return {member.worker_id: self._vitals[member.worker_id].beat for member in self._members}

    def look_at_lines(self, ended: Collection[str]) -> None:
        """Note the members whose lifelines show that they are gone; ``ended`` have told their outcome already."""
        for member in self._members:
            worker_id, node_id = member.worker_id, member.node_id
            cut_at_s = self._lifelines.cut_at_s(worker_id)
            if cut_at_s is None or worker_id in self.gone or worker_id in ended:
                continue
            if self._lifelines.is_agent_cut(node_id):
                self.gone[worker_id] = "its lifeline and that of its node have ended"
                continue
            doubt = self._doubts.get(worker_id)
            if doubt is None or doubt.cut_at_s != cut_at_s:
                doubt = _Doubt(cut_at_s=cut_at_s, ref=self._group.ask_living(worker_id))
                self._doubts[worker_id] = doubt
                if doubt.ref is not None:
                    self._lifelines.bell.watch(doubt.ref)
            if not doubt.is_settled and self._is_dead(worker_id, doubt):
                self.gone[worker_id] = "its lifeline has ended, and its process with it"

    def _is_dead(self, worker_id: str, doubt: _Doubt) -> bool:
        """The agent's word on a process whose line has ended; without one its heartbeats decide, as ever."""
        if doubt.ref is None:
            doubt.is_settled = True
            return False
        ready, _ = ray.wait([doubt.ref], timeout=0)
        if not ready:
            doubt.is_settled = time.monotonic() - doubt.asked_at > _PROOF_S
            return False
        doubt.is_settled = True
        try:
            living = ray.get(doubt.ref)
        except ray.exceptions.RayError as error:
            _log.info("no word on worker %s from its node's agent: %s", worker_id, type(error).__name__)
            return False
        if living:
            _log.warning("the lifeline of worker %s broke, yet its process lives; it is left alone", worker_id)
        return not living

    def ask(self, interval_s: float, ended: Collection[str]) -> None:
        """Take the heartbeats that have come and ask again who has not been asked for ``interval_s``."""
        now = time.monotonic()
        waiting = {w: v for w, v in self._vitals.items() if w not in ended and w not in self.gone}
        refs = {vitals.ref: worker_id for worker_id, vitals in waiting.items() if vitals.ref is not None}
        ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0) if refs else ([], [])
        for ref in ready:
            self._take(refs[ref], ref, now)
        for worker_id, vitals in waiting.items():
            if vitals.ref is None and worker_id not in self.gone:
                vitals.answered_at = now
                if now - vitals.asked_at >= interval_s:
                    vitals.ref, vitals.asked_at = self._group.heartbeat(worker_id), now

    def _take(self, worker_id: str, ref: Any, now: float) -> None:
        vitals = self._vitals[worker_id]
        vitals.ref, vitals.answered_at = None, now
        try:
            vitals.beat = ray.get(ref)
        except GONE as error:
            self.lose(worker_id, error)

    def silences(self, ended: Collection[str]) -> dict[str, float]:
        """For how long each member has owed an answer, in seconds."""
        now = time.monotonic()
        return {
            worker_id: now - v.answered_at if v.ref is not None else 0.0
            for worker_id, v in self._vitals.items()
            if worker_id not in ended
        }

    def hangs(self, ended: Collection[str]) -> tuple[Hang, ...]:
        """The members that are to be killed."""
        silences = self.silences(ended)
        pulses = {w: Pulse(beat=self._vitals[w].beat, silent_s=silent_s) for w, silent_s in silences.items()}
        found = judge(pulses, self._config)
        for hang in found:
            _log.warning("worker %s hangs: %s", hang.worker_id, hang.detail)
        return found

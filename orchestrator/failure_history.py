"""The failure history: how often the World broke and in how much training, over every driver of a Run.

Counts only what hazard is about: losses of nodes, workers or the driver, and hangs. Errors of the training code, steps
that were not finite, joins, resizes and stops are none of it, and time in which nothing trained is no exposure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from orchestrator.failure_policy import FaultKind
from orchestrator.journal import JournalEntry
from orchestrator.save_facts import ClusterFacts, Notice

__all__ = ["FIELD", "FailureHistory", "Totals", "totals_from"]

FIELD = "hazard"
"""Under which name entries of the Journal carry the history."""
_FAULTS = frozenset(
    {FaultKind.NODE_LOST, FaultKind.WORKER_LOST, FaultKind.HANG, FaultKind.COLLECTIVE, FaultKind.OUT_OF_MEMORY}
)
_ENDS_ATTEMPT = frozenset({"decision", "end"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What earlier drivers have seen. ``seen_at_s``: Unix time at which each node was first seen."""

    faults: int = 0
    preemptions: int = 0
    survived: int = 0
    exposure_node_s: float = 0.0
    seen_at_s: Mapping[str, float]


def totals_from(entries: Sequence[JournalEntry], *, trained_until_s: float | None = None) -> Totals:
    """The totals that the Journal's newest entry carries, and what it cannot know: a driver that was killed in the
    middle of an Attempt is a fault, after exposure from that entry until ``trained_until_s`` (Unix time of the last
    step that anyone has a record of)."""
    carrier = next((entry for entry in reversed(entries) if isinstance(entry.fields.get(FIELD), dict)), None)
    kept: dict[str, Any] = carrier.fields[FIELD] if carrier is not None else {}
    faults, exposure_node_s = int(kept.get("faults", 0)), float(kept.get("exposure_node_s", 0.0))
    cut_off = _cut_off(entries)
    if cut_off is not None and faults <= _faults_of(cut_off):  # else a driver that wrote no Attempt has counted it
        faults += 1
        since_s = _unix_s((carrier or cut_off).time_utc)
        num_nodes = len({node_id for _, node_id in cut_off.fields.get("world", ())})
        if trained_until_s is not None and since_s is not None:
            exposure_node_s += num_nodes * max(0.0, trained_until_s - since_s)
    return Totals(
        faults=faults,
        preemptions=int(kept.get("preemptions", 0)),
        survived=int(kept.get("survived", 0)),
        exposure_node_s=exposure_node_s,
        seen_at_s={str(node_id): float(at_s) for node_id, at_s in kept.get("nodes", {}).items()},
    )


def _faults_of(entry: JournalEntry) -> int:
    kept = entry.fields.get(FIELD)
    return int(kept.get("faults", 0)) if isinstance(kept, dict) else 0


def _cut_off(entries: Iterable[JournalEntry]) -> JournalEntry | None:
    """The entry of the Attempt whose end nobody wrote down, because its driver was gone."""
    running: JournalEntry | None = None
    for entry in entries:
        if entry.kind == "attempt":
            running = entry
        elif entry.kind in _ENDS_ATTEMPT:
            running = None
    return running


def _unix_s(time_utc: str) -> float | None:
    try:
        return datetime.fromisoformat(time_utc).timestamp()
    except ValueError:
        return None


class FailureHistory:
    """One per driver, told by the controller as things happen; `as_entry` is what the Journal keeps of it."""

    def __init__(
        self,
        totals: Totals | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        before = totals or Totals(seen_at_s={})
        self._clock = clock
        self._wall_clock = wall_clock
        self._faults = before.faults
        self._preemptions = before.preemptions
        self._survived = before.survived
        self._is_open = False
        self._exposure_node_s = before.exposure_node_s
        self._seen_at_s = dict(before.seen_at_s)
        self._num_running = 0
        self._counted_until_s = clock()

    def note_running(self, num_nodes: int) -> None:
        """From now on a World of so many nodes trains; 0: nothing does."""
        self._count()
        self._num_running = num_nodes

    def note_fault(self, kind: FaultKind) -> None:
        """A World broke. What is not hazard's business is left out."""
        if kind is FaultKind.PREEMPTION:
            self._preemptions += 1
        elif kind in _FAULTS:
            self._faults += 1
        self._is_open = kind in _FAULTS

    def note_source(self, *, is_memory: bool) -> None:
        """Where the next Attempt goes on from, before it begins: a fault that memory survived costs no interval."""
        self._survived += self._is_open and is_memory
        self._is_open = False

    def note_nodes(self, living: Iterable[str]) -> None:
        """The nodes that are there; each is as old as the first time it was told here. Others are forgotten."""
        now_s = self._wall_clock()
        self._seen_at_s = {node_id: self._seen_at_s.get(node_id, now_s) for node_id in living}

    def facts(
        self, nodes: Iterable[str], *, notices: tuple[Notice, ...] = (), state_bytes: int | None = None
    ) -> ClusterFacts:
        """For a World on ``nodes``, as of now."""
        self._count()
        now_s, homes = self._wall_clock(), sorted(set(nodes))
        return ClusterFacts(
            num_nodes=len(homes),
            faults=self._faults,
            preemptions=self._preemptions,
            survived=self._survived,
            exposure_node_s=self._exposure_node_s,
            node_ages_s=tuple(max(0.0, now_s - self._seen_at_s.get(node_id, now_s)) for node_id in homes),
            notices=notices,
            state_bytes=state_bytes,
        )

    def as_entry(self) -> dict[str, Any]:
        """Plain JSON, as `totals_from` reads it."""
        self._count()
        return {
            "faults": self._faults,
            "preemptions": self._preemptions,
            "survived": self._survived,
            "exposure_node_s": round(self._exposure_node_s, 3),
            "nodes": {node_id: round(at_s, 3) for node_id, at_s in self._seen_at_s.items()},
        }

    def _count(self) -> None:
        now_s = self._clock()
        self._exposure_node_s += self._num_running * (now_s - self._counted_until_s)
        self._counted_until_s = now_s

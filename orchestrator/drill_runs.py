"""The two runs of a drill: each a `raysume run` in a process of its own, followed through its events to its end.

What they do is the configuration's, whether they did the same is `orchestrator.drill_compare`'s business.
"""

from __future__ import annotations

import re
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from orchestrator.chaos import ChaosAction
from orchestrator.config import RunConfig
from orchestrator.driver_child import DriverChild
from orchestrator.driver_record import events_path_of
from orchestrator.event_fields import Event
from orchestrator.event_tail import EventTail
from orchestrator.exit_codes import ExitCode
from orchestrator.own_python import child_python
from orchestrator.progress import ProgressView

__all__ = ["INTERRUPTED", "UNBROKEN", "DrillPlan", "DrillRun", "RunEnd", "run_command"]

UNBROKEN: Final = "uninterrupted"
INTERRUPTED: Final = "interrupted"
_POLL_S: Final = 0.1
_STOP_MARGIN_S: Final = 120.0
_KEPT_LINES: Final = 400
_UNDONE: Final = re.compile(r"chaos: (\S+) (?:did NOT happen(?:, or not as told)?|never happened): (.*)")
_START_GRACE_S: Final = 120.0  # both runs begin with all workers


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillPlan:
    """What is run twice. ``overrides`` hold everything that the command line changed in the file, ``actions`` are the
    faults of the second run, ``folder`` takes both runs."""

    config: RunConfig
    config_path: Path
    overrides: tuple[str, ...]
    num_nodes: int
    actions: tuple[ChaosAction, ...]
    folder: Path
    loop_options: tuple[str, ...] = ()

    def directory(self, name: str) -> Path:
        return self.folder / name

    @property
    def num_workers(self) -> int:
        """Of a full World on the nodes of the local cluster."""
        world = self.config.world
        return min(world.max_workers, self.num_nodes * (world.workers_per_node or 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """``lines``: the last that it said on stderr. ``undone``: why a planned fault did not happen, by fault."""

    name: str
    exit_code: int
    events: list[Event]
    seconds: float
    lines: tuple[str, ...]
    undone: Mapping[str, str] = field(default_factory=dict)


def run_command(plan: DrillPlan, name: str) -> list[str]:
    """The command line of one of the two runs. Values pass as they are: no shell reads them."""
    options = ["--local-nodes", str(plan.num_nodes), "--json", *plan.loop_options]
    if name == INTERRUPTED:
        options += ["--chaos", ",".join(map(str, plan.actions))]
    changes = [
        *plan.overrides,
        f"run.url={plan.directory(name)}",
        "run.trace_every=1",
        f"world.max_workers={plan.num_workers}",
        f"world.start_grace_s={max(plan.config.world.start_grace_s, _START_GRACE_S):g}",
        "world.join_gain_ratio=0",  # so short a run gains nothing by growing, which is to be tried all the same
    ]
    return child_python("orchestrator", "run", *options, "--", str(plan.config_path), *changes)


class DrillRun:
    """One run, from its start to its end. ``stops`` collects signals: the first is passed on, and waited for."""

    def __init__(
        self,
        plan: DrillPlan,
        name: str,
        view: ProgressView,
        stops: list[int],
        start: Callable[[Sequence[str], Callable[[str], None]], DriverChild] = DriverChild,
    ) -> None:
        self._plan, self._name, self._view, self._stops, self._start = plan, name, view, stops, start
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._undone: dict[str, str] = {}
        self._num_passed_on = 0
        self._stop_deadline_s: float | None = None

    def run(self) -> RunEnd:
        plan, began_s = self._plan, time.monotonic()
        tail = EventTail(events_path_of(str(plan.directory(self._name)), ""))
        events: list[Event] = []

        def look() -> None:
            for event in tail.read():
                events.append(event)
                self._view.on_event(event)

        child = self._start(run_command(plan, self._name), self._hear)
        try:
            while (code := child.wait(_POLL_S)) is None:
                look()
                self._pass_stops_on(child)
            look()
        finally:
            child.close()
        if code < 0:
            code = ExitCode.STOPPED if self._stops else ExitCode.INTERNAL_ERROR
        seconds = time.monotonic() - began_s
        return RunEnd(
            name=self._name,
            exit_code=code,
            events=events,
            seconds=seconds,
            lines=tuple(self._lines),
            undone=self._undone,
        )

    def _hear(self, line: str) -> None:
        self._lines.append(line)
        if (found := _UNDONE.search(line)) is not None:
            self._undone[found[1]] = found[2]
        if line.strip():
            self._view.note(line)

    def _pass_stops_on(self, child: DriverChild) -> None:
        """Within bounds: the run saves its newest work at the first signal and ends at once at the second."""
        for number in self._stops[self._num_passed_on : 2]:
            if not self._num_passed_on:
                limit_s = self._plan.config.checkpoint.leave_timeout_s + _STOP_MARGIN_S
                self._stop_deadline_s = time.monotonic() + limit_s
                self._view.note(f"stopping the {self._name} run; once more stops at once")
            self._num_passed_on += 1
            child.send(number)
        if self._stop_deadline_s is not None and time.monotonic() > self._stop_deadline_s:
            child.send(signal.SIGKILL)

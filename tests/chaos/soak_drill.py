"""One run on a local cluster of its own that is struck again and again, each time it has recovered from the last.

It is the run's supervisor: it owns the cluster, starts the driver again when it was killed, and replaces lost nodes.
What must hold in the end is `soak_invariants`' business; here a run that does not go on at all is given up.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.chaos import ChaosSchedule, ChaosVerb
from orchestrator.chaos_deeds import Deeds
from orchestrator.driver_child import DriverChild
from orchestrator.errors import ChaosSpecError, SupervisorError
from orchestrator.event_tail import EventTail
from orchestrator.exit_codes import ExitCode
from orchestrator.local_cluster import Fittings, LocalCluster, descendants
from orchestrator.supervisor_plan import SupervisorPlan
from storage.arena import process_incarnation
from tests.chaos.soak_course import Course, Outcome
from tests.chaos.soak_plan import STEPS_PER_FAULT, Strike
from tests.chaos.soak_watch import Watch

__all__ = ["NUM_NODES", "Drill", "SoakBroken", "Struck"]

NUM_NODES = 4
SCRIPT = Path(__file__).with_name("soak_script.py")
_HARMLESS = frozenset({ChaosVerb.KILL_KEEPER, ChaosVerb.SLOW_NODE})
_START_S = 180.0
_RECOVERY_S = 150.0
_IDLE_S = 20.0  # within which a starved or interrupted worker shows it
_LATE_S = 3.0  # within which a victim that was no member yet may be made one
_REJOIN_S = 15.0
_PHASE_S = 40.0
_GROUPS_S = 60.0
_MAX_REFUSALS = 10
_REFUSAL_PAUSE_S = 3.0
_UNCAUGHT = 1
_POLL_S = 0.05
_LOOK_S = 0.5
_KEPT_LINES = 25


class SoakBroken(Exception):
    """The run did not go on as every run must. The first argument names what did not hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    """A strike and what became of it. ``refused``: faults of it that could not be done just then, and why."""

    strike: Strike
    outcome: Outcome
    refused: tuple[str, ...]


class Drill:
    """A context around cluster and driver. ``say`` is told in one line what goes on."""

    def __init__(self, plan: SupervisorPlan, folder: Path, *, seed: int, say: Callable[[str], None]) -> None:
        self._plan, self._folder, self._seed, self._say = plan, folder, seed, say
        self._pace = folder / "pace"
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._log = (folder / "driver.log").open("a", buffering=1)
        self._tail = EventTail(plan.events_path)
        self._broken: set[ChaosVerb] = set()
        self._num_drivers = self._refusals = 0
        self._is_ending = False
        self._look_at_s = 0.0
        self._driver: DriverChild | None = None
        self.course = Course()
        self.watch = Watch(os.getpid(), plan.run_id)
        self.processes: set[tuple[int, int]] = set()
        self.node_ids: tuple[str, ...] = ()  # every node that ever was in the cluster, once that is closed
        self.exit_code: int | None = None
        self.struck: list[Struck] = []

    def __enter__(self) -> Drill:
        resources = self._plan.config.world.resources_per_worker
        self._cluster = LocalCluster(node_resources=resources, fittings=Fittings(has_seams=True))
        self._deeds = Deeds(self._plan, self._cluster, ChaosSchedule((), seed=self._seed))
        try:
            for _ in range(NUM_NODES):
                self._cluster.add_node()
            self._connect()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        import ray

        self._look()
        self._deeds.close()
        if self._driver is not None:
            self._driver.close()
        ray.shutdown()
        self._cluster.close()
        self.node_ids = self._cluster.started_node_ids
        self._log.close()

    # -- the run ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the run and wait until all nodes train."""
        self._set_pace(STEPS_PER_FAULT)
        self._start_driver()
        self._wait("the first step", _START_S, lambda: self.course.has_stepped)

    def strike(self, strike: Strike) -> Struck:
        """One strike: its moment, its faults, the recovery, the repair. SoakBroken when the run does not go on."""
        course = self.course
        due_step = course.furthest_step + strike.gap_steps
        self._pump_until(_REJOIN_S, lambda: course.has_stepped and len(course.members) >= NUM_NODES - 1)
        self._wait("the next strike's step", _RECOVERY_S, lambda: course.has_stepped and course.step >= due_step)
        since, attempt = len(course.events), course.attempt
        refused = self._do_all(strike)
        if strike.is_repaired_early:
            self._repair()
        outcome = self._recover(strike, since, attempt, are_all_refused=len(refused) == len(strike.verbs))
        self._repair()
        done = Struck(strike=strike, outcome=outcome, refused=tuple(refused))
        self.struck.append(done)
        num_faults = sum(len(one.strike.verbs) for one in self.struck)
        self._set_pace(STEPS_PER_FAULT * (num_faults + 1))
        self._check_groups(len(self._cluster.nodes))
        self.watch.take(strike.number, self._living_driver().pid)
        return done

    def end(self, timeout_s: float) -> None:
        """Let the run train freely to its last step. Its placement groups must be gone with it."""
        self._is_ending = True
        self._set_pace(None)
        self._pump_until(timeout_s, lambda: self.exit_code is not None)
        if self.exit_code is None:
            raise SoakBroken("finish", f"the run did not end within {timeout_s:g} s after its last fault")
        self._check_groups(0)

    def last_words(self) -> str:
        return "\n".join(self._lines)

    # -- one strike -------------------------------------------------------------------------------------------------

    def _do_all(self, strike: Strike) -> list[str]:
        """Inject the faults; those that could not be done just then."""
        refused: list[str] = []
        for index in range(len(strike.verbs)):
            if strike.phase is not None and index == len(strike.verbs) - 1:
                begun = len(self.course.events)
                phase = strike.phase
                self._pump_until(_PHASE_S, lambda: any(phase.begins_with(e) for e in self.course.events[begun:]))  # noqa: B023
            action = strike.action(index, self.course.step)
            try:
                self._broken.add(action.verb)  # before: the driver may end on it at once
                self._deeds.do(action, self._living_driver())
            except (ChaosSpecError, SupervisorError) as error:
                refused.append(f"{action}: {error}")
        return refused

    def _recover(self, strike: Strike, since: int, attempt: int, *, are_all_refused: bool) -> Outcome:
        course, begun_s = self.course, time.monotonic()
        while True:
            self._pump()
            outcome = course.outcome(since, attempt, is_given_up=time.monotonic() - begun_s > _IDLE_S)
            waited_s = time.monotonic() - begun_s
            if outcome is not None and (outcome.causes or waited_s > _LATE_S or set(strike.verbs) <= _HARMLESS):
                return outcome
            if are_all_refused:
                return Outcome(
                    step=course.step, recovery_s=0.0, tier=None, causes=(), lost_steps=0, world_size=0, is_idle=True
                )
            if time.monotonic() - begun_s > _RECOVERY_S:
                raise SoakBroken("recovery", f"no new step within {_RECOVERY_S:g} s of {strike}\n{self.last_words()}")

    def _repair(self) -> None:
        """As many nodes as there were, those left out that are still under notice."""
        while len(self._cluster.nodes) < NUM_NODES:
            self._cluster.add_node()
            self._pump()

    # -- the driver -------------------------------------------------------------------------------------------------

    def _start_driver(self) -> None:
        plan = self._plan
        arguments = (plan.config_path, self._cluster.address, plan.events_path, self._pace)
        if self._driver is not None:
            self._driver.close()
        self._broken.clear()
        self._num_drivers += 1
        self._driver = DriverChild([sys.executable, str(SCRIPT), *map(str, arguments)], self._hear)

    def _hear(self, line: str) -> None:
        self._lines.append(line)
        self._log.write(f"{line}\n")

    def _living_driver(self) -> DriverChild:
        if self._driver is None:
            raise SupervisorError("no driver is running")
        return self._driver

    def _pump(self) -> None:
        """Take in what happened; start a driver again that was broken on purpose."""
        code = self._living_driver().wait(_POLL_S)
        for event in self._tail.read():
            self.course.take_in(event)
            self._deeds.take_in(event)
        self._deeds.tick()
        self._look()
        if code is not None:
            self._after_driver(code)

    def _after_driver(self, code: int) -> None:
        """Start it again where a job system would; else the run is over, for which it must be time."""
        if self._was_broken(code):
            self._refusals = 0
            self._start_driver()
        elif code == ExitCode.REFUSED and self._num_drivers > 1 and self._refusals < _MAX_REFUSALS:
            self._refusals += 1
            time.sleep(_REFUSAL_PAUSE_S)  # the killed driver's lease must run out
            self._start_driver()
        elif code != 0:
            raise SoakBroken("finish", f"the driver ended with exit code {code}\n{self.last_words()}")
        elif not self._is_ending:
            raise SoakBroken("schedule", f"the run ended at step {self.course.step}, before all faults had struck")
        else:
            self.exit_code = code

    def _was_broken(self, code: int) -> bool:
        if ChaosVerb.KILL_DRIVER in self._broken and code < 0:
            return True
        return ChaosVerb.KILL_COORDINATOR in self._broken and code in (_UNCAUGHT, ExitCode.INTERNAL_ERROR)

    # -- waiting and looking ----------------------------------------------------------------------------------------

    def _wait(self, what: str, timeout_s: float, is_there: Callable[[], bool]) -> None:
        if not self._pump_until(timeout_s, is_there):
            raise SoakBroken("progress", f"{what} did not come within {timeout_s:g} s\n{self.last_words()}")

    def _pump_until(self, timeout_s: float, is_there: Callable[[], bool]) -> bool:
        deadline_s = time.monotonic() + timeout_s
        while not is_there():
            if time.monotonic() > deadline_s:
                return False
            self._pump()
        return True

    def _set_pace(self, allowed_step: int | None) -> None:
        new = self._pace.with_suffix(".new")
        new.write_text("" if allowed_step is None else str(allowed_step))
        new.replace(self._pace)  # a reader sees the old or the new one, whole

    def _look(self) -> None:
        """Note every process there is below this one."""
        if time.monotonic() < self._look_at_s:
            return
        self._look_at_s = time.monotonic() + _LOOK_S
        found = ((pid, process_incarnation(pid)) for pid in descendants(os.getpid()))
        self.processes |= {(pid, born) for pid, born in found if born is not None}

    def _connect(self) -> None:
        import ray

        ray.init(address=self._cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        # Ray puts a handler of its own in place, which would leave the cluster behind.
        signal.signal(signal.SIGTERM, signal.default_int_handler)

    def _check_groups(self, num_expected: int) -> None:
        """One placement group for each living node, none for any other."""
        rows: list[dict[str, Any]] = []

        def fits() -> bool:
            nonlocal rows
            rows = _placement_groups(self._plan.run_id)
            return len(rows) == num_expected and all(row["state"] == "CREATED" for row in rows)

        deadline_s = time.monotonic() + _GROUPS_S
        while not fits():
            if time.monotonic() > deadline_s:
                names = ", ".join(f"{row['name']} {row['state']}" for row in rows)
                raise SoakBroken("placement groups", f"{num_expected} expected, there are: {names or 'none'}")
            if self.exit_code is None:
                self._pump()
            else:
                time.sleep(_POLL_S)


def _placement_groups(run_id: str) -> list[dict[str, Any]]:
    import ray

    rows: Sequence[dict[str, Any]] = list(ray.util.placement_group_table().values())
    return [row for row in rows if row["name"].startswith(f"raysume-{run_id}-") and row["state"] != "REMOVED"]

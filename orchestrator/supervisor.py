"""Runs a driver on a local cluster and carries out the chaos schedule on it, for real, when its steps are reached.

It decides nothing about the Run: it only breaks and adds what the schedule says, and restarts a driver that it killed,
as a job system would.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, assert_never

from orchestrator.chaos import ChaosAction, ChaosSchedule, ChaosVerb
from orchestrator.config import RunConfig
from orchestrator.driver_child import DriverChild, driver_command
from orchestrator.errors import ChaosSpecError, SupervisorError
from orchestrator.event_tail import EventTail
from orchestrator.exit_codes import ExitCode
from orchestrator.local_cluster import LocalCluster, LocalNode, descendants, is_running
from orchestrator.progress import ProgressView, open_progress
from storage.arena import arena_directory
from storage.config import LocalDiskConfig
from storage.events import EventLog
from storage.spool_files import remove_spool, spool_directory

__all__ = ["Supervisor", "SupervisorPlan", "supervise"]

logger = logging.getLogger(__name__)

_POLL_S: Final = 0.05
_STOP_MARGIN_S: Final = 60.0
_MAX_REFUSALS: Final = 10  # a killed driver's Lease must run out first
_REFUSAL_PAUSE_S: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorPlan:
    """What to run and what to break. ``overrides`` hold everything that the command line changed in the file."""

    config: RunConfig
    config_path: Path
    overrides: tuple[str, ...]
    num_nodes: int
    actions: tuple[ChaosAction, ...]
    events_path: Path
    run_id: str
    json_output: bool = False
    show_progress: bool = True


class Cluster(Protocol):
    """What the supervisor asks of a cluster (LocalCluster, or a test's)."""

    @property
    def address(self) -> str: ...

    @property
    def nodes(self) -> dict[int, LocalNode]: ...

    def add_node(self) -> LocalNode: ...

    def kill_node(self, number: int) -> LocalNode: ...

    def bury(self, node: LocalNode) -> None: ...

    def drain_node(self, number: int, *, notice_s: float) -> LocalNode: ...


class Driver(Protocol):
    """What the supervisor asks of a driver process (DriverChild, or a test's)."""

    @property
    def pid(self) -> int: ...

    def wait(self, timeout_s: float) -> int | None: ...

    def send(self, number: int) -> None: ...

    def close(self) -> None: ...

    def copy_output(self) -> None: ...


StartDriver = Callable[[tuple[str, ...]], Driver]


def supervise(plan: SupervisorPlan) -> int:
    """Bring the cluster up, run the driver to its end, take everything down. Returns the driver's exit code."""
    view = open_progress(total_steps=plan.config.run.steps, is_shown=plan.show_progress)
    with _stop_signals() as stops:
        view.note(f"starting a local cluster of {plan.num_nodes} node{'s' if plan.num_nodes != 1 else ''}")
        resources = plan.config.world.resources_per_worker
        workers = plan.config.world.workers_per_node or 1
        cluster = LocalCluster(node_resources={name: amount * workers for name, amount in resources.items()})
        try:
            for _ in range(plan.num_nodes):
                if stops:
                    return ExitCode.STOPPED
                cluster.add_node()

            def start_driver(overrides: tuple[str, ...]) -> Driver:
                command = driver_command(
                    plan.config_path,
                    overrides,
                    ray_address=cluster.address,
                    events_path=plan.events_path,
                    json_output=plan.json_output,
                )
                return DriverChild(command, view.note)

            return Supervisor(plan, cluster, start_driver, view, stops).run()
        finally:
            view.close()
            cluster.close()
            for node_id in cluster.started_node_ids:
                _remove_leftovers(plan.config.checkpoint.local_disk, plan.run_id, node_id)


class Supervisor:
    """The loop around one Run on one cluster."""

    def __init__(
        self,
        plan: SupervisorPlan,
        cluster: Cluster,
        start_driver: StartDriver,
        view: ProgressView,
        stops: list[int],
    ) -> None:
        self._plan = plan
        self._cluster = cluster
        self._start_driver = start_driver
        self._view = view
        self._stops = stops  # signals received, in order; a handler appends to it
        self._stop_deadline_s: float | None = None
        self._schedule = ChaosSchedule(plan.actions, seed=plan.config.seed)
        self._tail = EventTail(plan.events_path)
        self._driver_pids: set[int] = set()
        self._is_armed = False
        self._step = 0
        self._start_unix_s: float | None = None
        self._workers: dict[str, tuple[str, int]] = {}
        self._draining: list[tuple[float, int, ChaosAction]] = []
        self._driver_was_killed = False

    def run(self) -> int:
        """Until the driver ends by itself."""
        refusals = 0
        overrides = self._plan.overrides
        while True:
            driver = self._start_driver(overrides)
            self._driver_pids.add(driver.pid)
            was_restarted, self._driver_was_killed = overrides != self._plan.overrides, False
            try:
                code = self._watch(driver)
            finally:
                driver.close()
            if self._stops:
                pass
            elif self._driver_was_killed:
                self._view.note("chaos: the driver is started again")
                overrides, refusals = (*self._plan.overrides, "run.resume=auto"), 0
                continue
            elif code == ExitCode.REFUSED and was_restarted and refusals < _MAX_REFUSALS:
                refusals += 1
                self._view.note("the killed driver's lease has not run out yet; trying again")
                self._pause(_REFUSAL_PAUSE_S)
                continue
            for action in self._schedule.pending:
                self._view.note(f"chaos: {action} never happened: the run ended first")
            self._view.close()
            driver.copy_output()
            return self._exit_code(code)

    def _exit_code(self, code: int) -> int:
        if code >= 0:
            return code
        if self._stops:
            return ExitCode.STOPPED
        logger.error("the driver was killed by signal %s, which nobody here sent", -code)
        return ExitCode.INTERNAL_ERROR

    def _pause(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s and not self._stops:
            time.sleep(_POLL_S)

    def _watch(self, driver: Driver) -> int:
        """Follow the driver until it ends; break things on the way."""
        while True:
            code = driver.wait(_POLL_S)
            for event in self._tail.read():
                self._take_in(event)
            if code is not None:
                return code
            if self._stops:
                self._forward_stop(driver)
            elif self._is_armed:
                for action in self._schedule.due(self._step):
                    self._carry_out(action, driver)
            self._end_drains()

    def _take_in(self, event: Mapping[str, Any]) -> None:
        match event["event"]:
            case "run_started":
                self._start_unix_s = float(event["start_unix_s"])
            case "driver_started":
                # The file may begin with an earlier life of the run, whose steps must set off nothing.
                self._is_armed = event.get("pid") in self._driver_pids
            case "worker_ready":
                self._workers[str(event["worker"])] = (str(event["node_id"]), int(event["pid"]))
            case "step":
                self._step = int(event["step"])
        if self._is_armed:
            self._view.on_event(event)

    def _forward_stop(self, driver: Driver) -> None:
        """Pass the first signal on and wait within bounds; a second one, or the end of the wait, kills."""
        if self._stop_deadline_s is None:
            limit_s = self._plan.config.checkpoint.leave_timeout_s + _STOP_MARGIN_S
            self._stop_deadline_s = time.monotonic() + limit_s
            self._view.note("stopping: the newest work is being saved; once more stops at once")
            driver.send(self._stops[0])
        elif len(self._stops) > 1 or time.monotonic() > self._stop_deadline_s:
            driver.send(signal.SIGKILL)

    def _carry_out(self, action: ChaosAction, driver: Driver) -> None:
        try:
            self._do(action, driver)
        except (ChaosSpecError, SupervisorError) as error:
            self._view.note(f"chaos: {action} did NOT happen: {error}")

    def _do(self, action: ChaosAction, driver: Driver) -> None:
        live = sorted(self._cluster.nodes)
        match action.verb:
            case ChaosVerb.KILL_NODE:
                self._kill_node(self._schedule.choose(action, live), action, action.verb)
            case ChaosVerb.ADD_NODE:
                node = self._cluster.add_node()
                self._record(action, action.verb, time.time(), node_id=node.node_id, detail=f"node {node.number}")
            case ChaosVerb.KILL_WORKER | ChaosVerb.STOP_WORKER:
                self._signal_worker(action)
            case ChaosVerb.DRAIN_NODE:
                self._drain(action, live)
            case ChaosVerb.KILL_DRIVER:
                at_s = time.time()
                self._driver_was_killed = True
                driver.send(signal.SIGKILL)
                self._record(action, action.verb, at_s, pid=driver.pid, detail="driver")
            case _:
                assert_never(action.verb)

    def _kill_node(self, number: int, action: ChaosAction, verb: str) -> None:
        at_s = time.time()
        node = self._cluster.kill_node(number)
        self._record(action, verb, at_s, node_id=node.node_id, pid=node.raylet_pid, detail=f"node {number}")
        # A lost machine takes its memory and disk along: nobody may recover from what it leaves on this one.
        _remove_leftovers(self._plan.config.checkpoint.local_disk, self._plan.run_id, node.node_id)
        self._cluster.bury(node)

    def _signal_worker(self, action: ChaosAction) -> None:
        by_node: dict[int, list[int]] = {}
        for number, node in self._cluster.nodes.items():
            below = set(descendants(node.raylet_pid))
            pids = [pid for node_id, pid in self._workers.values() if node_id == node.node_id]
            alive = sorted(pid for pid in pids if pid in below and is_running(pid))
            if alive:
                by_node[number] = alive
        number = self._schedule.choose(action, sorted(by_node))
        pid, node_id = by_node[number][0], self._cluster.nodes[number].node_id
        at_s = time.time()
        try:
            os.kill(pid, signal.SIGKILL if action.verb is ChaosVerb.KILL_WORKER else signal.SIGSTOP)
        except ProcessLookupError as error:
            raise SupervisorError(f"worker {pid} of node {number} ended by itself just before") from error
        self._record(action, action.verb, at_s, node_id=node_id, pid=pid, detail=f"a worker of node {number}")

    def _drain(self, action: ChaosAction, live: list[int]) -> None:
        being_drained = {number for _, number, _ in self._draining}
        number = self._schedule.choose(action, [other for other in live if other not in being_drained])
        notice_s = action.notice_s or 0.0
        at_s = time.time()
        node = self._cluster.drain_node(number, notice_s=notice_s)
        self._draining.append((time.monotonic() + notice_s, number, action))
        detail = f"node {number}, {notice_s:g} s of notice"
        self._record(action, action.verb, at_s, node_id=node.node_id, pid=node.raylet_pid, detail=detail)

    def _end_drains(self) -> None:
        now_s = time.monotonic()
        over = [entry for entry in self._draining if entry[0] <= now_s]
        self._draining = [entry for entry in self._draining if entry[0] > now_s]
        for _, number, action in over:
            if number in self._cluster.nodes:
                self._kill_node(number, action, "drain-deadline")

    def _record(
        self,
        action: ChaosAction,
        verb: str,
        at_unix_s: float,
        *,
        detail: str,
        node_id: str | None = None,
        pid: int | None = None,
    ) -> None:
        """One ``chaos`` line, stamped with the moment just before the deed."""
        log = EventLog(
            self._plan.events_path, self._plan.run_id, lambda: at_unix_s, started_at_s=self._start_unix_s or at_unix_s
        )
        try:
            log.emit(
                "chaos",
                verb=str(verb),
                node_id=node_id,
                pid=pid,
                planned_step=action.step,
                at_step=self._step,
                detail=detail,
            )
        finally:
            log.close()


def _remove_leftovers(local_disk: LocalDiskConfig, run_id: str, node_id: str) -> None:
    """Whatever killed processes of one node of this cluster left in shared memory and on the local disk.

    Only by node: the same Run may be alive on another cluster of this machine, which refused this driver.
    """
    shutil.rmtree(arena_directory(run_id, node_id), ignore_errors=True)
    remove_spool(spool_directory(local_disk, run_id, node_id))


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """SIGINT and SIGTERM are collected, not raised: half-done chaos or a half-started node would be left behind."""
    received: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda got, _frame: received.append(got)) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

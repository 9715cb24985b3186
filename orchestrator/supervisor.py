"""Runs a driver on a local cluster and carries out the chaos schedule on it, for real, when its steps are reached.

It decides nothing about the Run: it only breaks and adds what the schedule says, and restarts a driver that it killed,
as a job system would.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from orchestrator.chaos import ChaosAction, ChaosSchedule, ChaosVerb
from orchestrator.chaos_deeds import Deeds, remove_leftovers
from orchestrator.chaos_needs import check_schedule, fittings_for, store_endpoint
from orchestrator.driver_child import DriverChild, driver_command
from orchestrator.errors import ChaosSpecError, SupervisorError
from orchestrator.event_tail import EventTail
from orchestrator.exit_codes import ExitCode
from orchestrator.local_cluster import LocalCluster
from orchestrator.progress import ProgressView, open_progress
from orchestrator.run_status import RunStatus
from orchestrator.stop_signals import stop_signals
from orchestrator.store_proxy import StoreProxy
from orchestrator.supervisor_plan import Cluster, Driver, SupervisorPlan

__all__ = ["Supervisor", "SupervisorPlan", "supervise"]

logger = logging.getLogger(__name__)

_POLL_S: Final = 0.05
_STOP_MARGIN_S: Final = 60.0
_MAX_REFUSALS: Final = 10  # a killed driver's Lease must run out first
_REFUSAL_PAUSE_S: Final = 3.0
_UNCAUGHT: Final = 1
_KEPT_LINES: Final = 400
_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")

StartDriver = Callable[[tuple[str, ...]], Driver]


def supervise(plan: SupervisorPlan) -> int:
    """Bring the cluster up, run the driver to its end, take everything down. Returns the driver's exit code.

    Raises ChaosSpecError, and starts nothing, when the schedule holds what cannot happen.
    """
    check_schedule(plan.actions, plan.config, plan.num_nodes)
    view = open_progress(total_steps=plan.config.run.steps, is_shown=plan.show_progress)
    with stop_signals() as stops:
        view.note(f"starting a local cluster of {plan.num_nodes} node{'s' if plan.num_nodes != 1 else ''}")
        resources = plan.config.world.resources_per_worker
        workers = plan.config.world.workers_per_node or 1
        cluster = LocalCluster(
            node_resources={name: amount * workers for name, amount in resources.items()},
            fittings=fittings_for(plan.actions, plan.config),
        )
        # With --json nothing is shown; why a driver broke must be all the same.
        kept: deque[str] = deque(maxlen=_KEPT_LINES)
        say = view.note if plan.show_progress else kept.append
        proxy: StoreProxy | None = None
        try:
            proxy = _open_proxy(plan, cluster.host)
            for _ in range(plan.num_nodes):
                if stops:
                    return ExitCode.STOPPED
                cluster.add_node()

            def start_driver(overrides: tuple[str, ...]) -> Driver:
                detour = () if proxy is None else (f"checkpoint.store.endpoint_url={proxy.endpoint}",)
                command = driver_command(
                    plan.config_path,
                    (*overrides, *detour),
                    ray_address=cluster.address,
                    events_path=plan.events_path,
                    json_output=plan.json_output,
                    loop_options=plan.loop_options,
                    asked=plan.asked,
                )
                return DriverChild(command, say)

            code = Supervisor(plan, cluster, start_driver, view, stops, proxy).run()
            if code in (_UNCAUGHT, ExitCode.INTERNAL_ERROR):
                print(*kept, sep="\n", file=sys.stderr, flush=True)
            return code
        finally:
            view.close()
            cluster.close()
            if proxy is not None:
                proxy.close()
            for node_id in cluster.started_node_ids:
                remove_leftovers(plan.config.checkpoint.local_disk, plan.run_id, node_id)


def _open_proxy(plan: SupervisorPlan, host: str) -> StoreProxy | None:
    """A proxy before the run's store where the schedule takes the store away, or nodes could not reach it else."""
    endpoint = store_endpoint(plan.config)
    is_out_of_reach = endpoint is not None and host not in _LOOPBACK and urlsplit(endpoint).hostname in _LOOPBACK
    is_taken_away = any(action.verb is ChaosVerb.STORE_OUTAGE for action in plan.actions)
    return StoreProxy(endpoint, host=host) if endpoint is not None and (is_taken_away or is_out_of_reach) else None


class Supervisor:
    """The loop around one Run on one cluster."""

    def __init__(
        self,
        plan: SupervisorPlan,
        cluster: Cluster,
        start_driver: StartDriver,
        view: ProgressView,
        stops: list[int],
        proxy: StoreProxy | None = None,
    ) -> None:
        self._plan = plan
        self._start_driver = start_driver
        self._view = view
        self._stops = stops  # signals received, in order; a handler appends to it
        self._stop_deadline_s: float | None = None
        self._schedule = ChaosSchedule(plan.actions, seed=plan.config.seed)
        self._tail = EventTail(plan.events_path)
        self._status = RunStatus()
        self._driver_pids: set[int] = set()
        self._deeds = Deeds(plan, cluster, self._schedule, proxy)
        self._is_armed = False
        self._broke: set[ChaosVerb] = set()  # what was done to the present driver

    def run(self) -> int:
        """Until the driver ends by itself."""
        try:
            return self._run()
        finally:
            self._deeds.close()

    def _run(self) -> int:
        refusals = 0
        overrides = self._plan.overrides
        while True:
            driver = self._start_driver(overrides)
            self._driver_pids.add(driver.pid)
            was_restarted = overrides != self._plan.overrides
            self._broke.clear()
            try:
                code = self._watch(driver)
            finally:
                driver.close()
            if self._stops:
                pass
            elif self._was_broken(code):
                self._view.note("chaos: the driver is started again")
                overrides, refusals = (*self._plan.overrides, "run.resume=auto"), 0
                continue
            elif code == ExitCode.REFUSED and was_restarted and refusals < _MAX_REFUSALS:
                refusals += 1
                self._view.note("the killed driver's lease has not run out yet; trying again")
                self._pause(_REFUSAL_PAUSE_S)
                continue
            for action in self._schedule.pending:
                self._say(f"chaos: {action} never happened: the run ended first")
            self._view.close()
            driver.copy_output()
            return self._exit_code(code)

    def _was_broken(self, code: int) -> bool:
        """Whether the driver ended by our hand, so that a job system would start it again."""
        if ChaosVerb.KILL_DRIVER in self._broke:
            return True
        is_accident = code < 0 or code in (_UNCAUGHT, ExitCode.INTERNAL_ERROR)
        return is_accident and bool(self._broke & {ChaosVerb.KILL_COORDINATOR, ChaosVerb.RESTART_HEAD})

    def _say(self, line: str) -> None:
        """To whoever is there: what did not happen must not pass for having happened."""
        if self._plan.show_progress:
            self._view.note(line)
        else:
            logger.warning("%s", line)

    def _exit_code(self, code: int) -> int:
        if code >= 0:
            return code
        if self._stops:
            return ExitCode.STOPPED
        last_words = self._status.last_words()
        logger.error("the driver was killed by signal %s, which nobody here sent; %s", -code, last_words)
        return ExitCode.INTERNAL_ERROR

    def _pause(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s and not self._stops:
            time.sleep(_POLL_S)

    def _watch(self, driver: Driver) -> int:
        """Follow the driver until it ends; break things on the way."""
        while True:
            code = driver.wait(_POLL_S)
            begun: list[ChaosAction] = []
            for event in self._tail.read():
                self._take_in(event)
                if self._is_armed:
                    begun += self._schedule.due_at(event, self._deeds.step)
            if code is not None:
                for action in begun:
                    self._say(f"chaos: {action} never happened: the driver ended first")
                return code
            if self._stops:
                self._forward_stop(driver)
            elif self._is_armed:
                for action in (*begun, *self._schedule.due(self._deeds.step)):
                    self._carry_out(action, driver)
            self._deeds.tick()

    def _take_in(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "driver_started":
            # The file may begin with an earlier life of the run, whose steps must set off nothing.
            self._is_armed = event.get("pid") in self._driver_pids
        self._deeds.take_in(event)
        self._status.add(event)
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
            self._deeds.do(action, driver)
        except (ChaosSpecError, SupervisorError) as error:
            self._say(f"chaos: {action} did NOT happen: {error}")
        except Exception as error:  # noqa: BLE001 - as of a head that is away just then: the run outlives it
            self._say(f"chaos: {action} did NOT happen, or not as told: {type(error).__name__}: {error}")
        else:
            self._broke.add(action.verb)

"""Carries out one chaos action at a time on a real cluster, and records each as a ``chaos`` event.

When it is due is the schedule's and the supervisor's business. What lasts (a slow node, a full disk, an outage) is
ended by `tick` when its time is over, and by `close` in any case.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, assert_never

from orchestrator.chaos import ChaosAction, ChaosSchedule, ChaosVerb
from orchestrator.chaos_asking import Resizing
from orchestrator.chaos_disk import DiskFill
from orchestrator.chaos_processes import (
    COORDINATOR_TITLE,
    KEEPER_TITLE,
    SlowedNode,
    pids_titled,
    signal_pid,
    starve,
)
from orchestrator.errors import SupervisorError
from orchestrator.local_cluster import chaos_directory, descendants, is_running
from orchestrator.store_proxy import StoreProxy
from orchestrator.supervisor_plan import Cluster, Driver, SupervisorPlan
from storage.arena import arena_directory
from storage.config import LocalDiskConfig
from storage.events import EventLog
from storage.spool_files import remove_spool, spool_directory
from workers.chaos_seam import strike

__all__ = ["Deeds", "remove_leftovers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lasting:
    """Something to end: at ``end_s`` (monotonic; None: with the run), by calling ``end``. ``verb``: how it is told."""

    end_s: float | None
    end: Callable[[], None]
    action: ChaosAction
    verb: str
    node_id: str | None = None
    detail: str = ""


class Deeds:
    """The hand of the schedule. Told of every event, it knows which processes there are and how far the run is."""

    def __init__(
        self, plan: SupervisorPlan, cluster: Cluster, schedule: ChaosSchedule, proxy: StoreProxy | None = None
    ) -> None:
        self._plan, self._cluster, self._schedule, self._proxy = plan, cluster, schedule, proxy
        self._start_unix_s: float | None = None
        self._workers: dict[str, tuple[str, int]] = {}
        self._members: frozenset[str] = frozenset()  # of the newest World
        self._stopped: set[int] = set()
        self._draining: list[tuple[float, int, ChaosAction]] = []
        self._lasting: list[_Lasting] = []
        self._resizing = Resizing(plan.config)
        self.step = 0

    def take_in(self, event: Mapping[str, Any]) -> None:
        match event["event"]:
            case "run_started":
                self._start_unix_s = float(event["start_unix_s"])
            case "worker_ready":
                self._workers[str(event["worker"])] = (str(event["node_id"]), int(event["pid"]))
            case "attempt_started":
                self._members = frozenset(map(str, event.get("members", ())))
            case "step":
                self.step = int(event["step"])

    def do(self, action: ChaosAction, driver: Driver) -> None:
        """Raises ChaosSpecError or SupervisorError when it cannot be done."""
        match action.verb:
            case ChaosVerb.KILL_NODE:
                self._kill_node(self._choose_node(action), action, action.verb)
            case ChaosVerb.ADD_NODE:
                at_s = time.time()
                node = self._cluster.add_node()
                self._record(action, action.verb, at_s, node_id=node.node_id, detail=f"node {node.number}")
            case ChaosVerb.KILL_WORKER | ChaosVerb.STOP_WORKER | ChaosVerb.OOM_WORKER | ChaosVerb.RAISE_IN_WORKER:
                self._hit_worker(action)
            case ChaosVerb.DRAIN_NODE:
                self._drain(action)
            case ChaosVerb.KILL_DRIVER:
                at_s = time.time()
                driver.send(signal.SIGKILL)
                self._record(action, action.verb, at_s, pid=driver.pid, detail="driver")
            case ChaosVerb.KILL_KEEPER:
                self._kill_keeper(action)
            case ChaosVerb.KILL_COORDINATOR:
                self._kill_coordinator(action)
            case ChaosVerb.RESTART_HEAD:
                at_s = time.time()
                pid = self._cluster.restart_head()
                self._record(action, action.verb, at_s, pid=pid, detail="the head's control store, then a new one")
            case ChaosVerb.SLOW_NODE:
                self._slow(action)
            case ChaosVerb.CUT_NODE:
                at_s = time.time()
                node = self._cluster.cut_node(self._choose_node(action))
                detail = f"node {node.number}: its link is down, its processes live on"
                self._record(action, action.verb, at_s, node_id=node.node_id, pid=node.raylet_pid, detail=detail)
            case ChaosVerb.DISK_FULL:
                self._fill_disk(action)
            case ChaosVerb.STORE_OUTAGE:
                self._cut_store(action)
            case ChaosVerb.SCALE:
                at_s = time.time()
                told = f"{action.workers} workers are asked for"
                self._resizing.ask(action, lambda: self._record(action, action.verb, at_s, detail=told))
            case _:
                assert_never(action.verb)

    def tick(self) -> None:
        """End what is over: notices of drains, and faults that were to last for some time only."""
        now_s = time.monotonic()
        over = [entry for entry in self._draining if entry[0] <= now_s]
        self._draining = [entry for entry in self._draining if entry[0] > now_s]
        for _, number, action in over:
            if number in self._cluster.nodes:
                self._kill_node(number, action, "drain-deadline")
        ending = [entry for entry in self._lasting if entry.end_s is not None and entry.end_s <= now_s]
        self._lasting = [entry for entry in self._lasting if entry not in ending]
        for entry in ending:
            at_s = time.time()
            entry.end()
            self._record(entry.action, entry.verb, at_s, node_id=entry.node_id, detail=entry.detail)

    def close(self) -> None:
        """End everything that still lasts."""
        self._resizing.close()
        while self._lasting:
            self._lasting.pop().end()

    # -- nodes ------------------------------------------------------------------------------------------------------

    def _choose_node(self, action: ChaosAction, without: frozenset[int] = frozenset()) -> int:
        """One that trains, where none is named: whatever is done to an empty one interrupts nothing."""
        live = self._cluster.nodes.keys() - without
        training = live & self._workers_by_node(self._members).keys() if action.target is None else set()
        return self._schedule.choose(action, sorted(training or live))

    def _kill_node(self, number: int, action: ChaosAction, verb: str) -> None:
        at_s = time.time()
        node = self._cluster.kill_node(number)
        self._record(action, verb, at_s, node_id=node.node_id, pid=node.raylet_pid, detail=f"node {number}")
        # A lost machine takes its memory and disk along: nobody may recover from what it leaves on this one.
        remove_leftovers(self._plan.config.checkpoint.local_disk, self._plan.run_id, node.node_id)
        self._cluster.bury(node)

    def _drain(self, action: ChaosAction) -> None:
        number = self._choose_node(action, without=frozenset(number for _, number, _ in self._draining))
        notice_s = action.notice_s or 0.0
        at_s = time.time()
        node = self._cluster.drain_node(number, notice_s=notice_s)
        self._draining.append((time.monotonic() + notice_s, number, action))
        detail = f"node {number}, {notice_s:g} s of notice"
        self._record(action, action.verb, at_s, node_id=node.node_id, pid=node.raylet_pid, detail=detail)

    def _slow(self, action: ChaosAction) -> None:
        number, _ = self._choose_worker(action)
        node_id, at_s = self._cluster.nodes[number].node_id, time.time()
        slowed = SlowedNode(lambda: self._workers_by_node().get(number, []), self._stopped)
        detail = f"node {number}: its workers get half of the time"
        self._record(action, action.verb, at_s, node_id=node_id, detail=detail)
        self._last(action, "slow-node-over", slowed.close, node_id=node_id, detail=f"node {number}")

    def _fill_disk(self, action: ChaosAction) -> None:
        number = self._choose_node(action)
        node, at_s = self._cluster.nodes[number], time.time()
        fill = DiskFill(node.directory)
        detail = f"node {number}: {fill.filled_bytes} bytes taken, {fill.free_bytes} left"
        self._record(action, action.verb, at_s, node_id=node.node_id, detail=detail)
        self._last(action, "disk-full-over", fill.close, node_id=node.node_id, detail=f"node {number}")

    # -- processes --------------------------------------------------------------------------------------------------

    def _workers_by_node(self, only: frozenset[str] | None = None) -> dict[int, list[int]]:
        """Pids of the workers that live now, by the number of their node. ``only``: None for all workers."""
        by_node: dict[int, list[int]] = {}
        workers = list(self._workers.items())  # a slowed node's thread looks while events are taken in
        known = [place for worker, place in workers if only is None or worker in only]
        for number, node in self._cluster.nodes.items():
            below = set(descendants(node.raylet_pid))
            pids = [pid for node_id, pid in known if node_id == node.node_id]
            alive = sorted(pid for pid in pids if pid in below and is_running(pid))
            if alive:
                by_node[number] = alive
        return by_node

    def _choose_worker(self, action: ChaosAction) -> tuple[int, list[int]]:
        """A node and its workers."""
        by_node = self._workers_by_node(self._members)
        if not by_node or action.target not in (None, *by_node):
            by_node = self._workers_by_node()  # spares: nothing is interrupted, but they may be meant
        self._require("worker", action, by_node)
        number = self._schedule.choose(action, sorted(by_node))
        return number, by_node[number]

    def _require(self, what: str, action: ChaosAction, having: Collection[int]) -> None:
        """SupervisorError where no node has a ``what``, or not the living one that is named: nothing would happen."""
        if action.target is None and not having:
            raise SupervisorError(f"no node has a {what} just now")
        if action.target in self._cluster.nodes and action.target not in having:
            there = ", ".join(map(str, sorted(having))) or "none"
            raise SupervisorError(f"node {action.target} lives, but has no {what} just now; nodes with one: {there}")

    def _hit_worker(self, action: ChaosAction) -> None:
        number, pids = self._choose_worker(action)
        pid, node = pids[0], self._cluster.nodes[number]
        what, at_s = f"worker of node {number}", time.time()
        detail = f"a {what}"
        match action.verb:
            case ChaosVerb.KILL_WORKER:
                signal_pid(pid, signal.SIGKILL, what=what)
            case ChaosVerb.STOP_WORKER:
                self._stopped.add(pid)
                signal_pid(pid, signal.SIGSTOP, what=what)
            case ChaosVerb.OOM_WORKER:
                detail += f": no more than {starve(pid)} bytes of memory"
            case _:
                try:
                    strike(chaos_directory(node), pid)
                except OSError as error:
                    raise SupervisorError(f"the {what} (pid {pid}) does not listen: {error}") from error
        self._record(action, action.verb, at_s, node_id=node.node_id, pid=pid, detail=detail)

    def _kill_keeper(self, action: ChaosAction) -> None:
        keepers = {n: pids_titled(node.raylet_pid, KEEPER_TITLE) for n, node in self._cluster.nodes.items()}
        having = sorted(n for n, pids in keepers.items() if pids)
        self._require("Keeper", action, having)
        number = self._schedule.choose(action, having)
        pid, at_s = keepers[number][0], time.time()
        signal_pid(pid, signal.SIGKILL, what=f"the Keeper of node {number}")
        node_id = self._cluster.nodes[number].node_id
        self._record(action, action.verb, at_s, node_id=node_id, pid=pid, detail=f"the Keeper of node {number}")

    def _kill_coordinator(self, action: ChaosAction) -> None:
        # It lives on the driver's node, the head, whose processes are ours as all others of the cluster.
        pids = pids_titled(os.getpid(), COORDINATOR_TITLE)
        if not pids:
            raise SupervisorError("no coordinator is running")
        at_s = time.time()
        signal_pid(pids[0], signal.SIGKILL, what="the coordinator")
        self._record(action, action.verb, at_s, pid=pids[0], detail="the coordinator")

    # -- the store --------------------------------------------------------------------------------------------------

    def _cut_store(self, action: ChaosAction) -> None:
        if self._proxy is None:
            raise SupervisorError("the run's store is not reached through this process")
        at_s = time.time()
        self._proxy.cut()
        self._record(action, action.verb, at_s, detail=f"{self._proxy.target} is silent for {action.notice_s:g} s")
        self._last(action, "store-outage-over", self._proxy.mend, detail=self._proxy.target)

    # -- records ----------------------------------------------------------------------------------------------------

    def _last(
        self, action: ChaosAction, verb: str, end: Callable[[], None], *, detail: str, node_id: str | None = None
    ) -> None:
        end_s = None if action.notice_s is None else time.monotonic() + action.notice_s
        entry = _Lasting(end_s=end_s, end=end, action=action, verb=verb, node_id=node_id, detail=detail)
        self._lasting.append(entry)

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
                at_step=self.step,
                detail=detail,
            )
        finally:
            log.close()


def remove_leftovers(local_disk: LocalDiskConfig, run_id: str, node_id: str) -> None:
    """Whatever killed processes of one node of this cluster left in shared memory and on the local disk.

    Only by node: the same Run may be alive on another cluster of this machine, which refused this driver.
    """
    shutil.rmtree(arena_directory(run_id, node_id), ignore_errors=True)
    remove_spool(spool_directory(local_disk, run_id, node_id))

"""Gathering: keeps the driver's books of nodes and workers up to date, and waits until a World can be formed of them.

Which workers make a World is scaling_policy's choice; what the World then does is not seen here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from orchestrator.block_list import BlockList, NodeFailure
from orchestrator.config import RunConfig
from orchestrator.decisions import Stop, Wait
from orchestrator.exit_codes import ExitCode
from orchestrator.lost_nodes import LostNodes
from orchestrator.node_watcher import NodeView, NodeWatcher
from orchestrator.recorder import Recorder
from orchestrator.scaling_policy import (
    WorkerView,
    choose_members,
    nodes_to_admit,
    wait_reason,
    workers_that_fit,
)
from orchestrator.sizing import Sizing
from orchestrator.slow_node_watch import SlowNodeWatch
from orchestrator.worker_group import WorkerGroup

__all__ = ["Gathering"]

_log = logging.getLogger(__name__)


class Gathering:
    """One per driver. ``take_signals`` and ``asked_to_stop`` are the controller's."""

    def __init__(
        self,
        *,
        config: RunConfig,
        sizing: Sizing,
        slow_nodes: SlowNodeWatch,
        block_list: BlockList,
        group: WorkerGroup,
        watcher: NodeWatcher,
        recorder: Recorder,
        take_signals: Callable[[], None],
        asked_to_stop: Callable[[], Stop | None],
    ) -> None:
        self._config = config
        self._sizing = sizing
        self._slow_nodes = slow_nodes
        self._block_list = block_list
        self._group = group
        self._watcher = watcher
        self._recorder = recorder
        self._take_signals = take_signals
        self._asked_to_stop = asked_to_stop
        self._lost = LostNodes()
        self._last_world: frozenset[str] = frozenset()  # the nodes of it
        self._waits_for_fresh = False
        self._saved_by: list[frozenset[str]] = []  # workers that were a World once more although all their nodes go

    def members(
        self,
        *,
        wait_for_more: bool,
        is_unsaved: bool = False,
        is_save_over: Callable[[float], bool] = lambda _: False,
    ) -> tuple[WorkerView, ...] | Stop:
        """Ready workers for a World; waits below the minimum, at the first start, or where the last World's processes
        were replaced, also a grace for the maximum.

        ``is_unsaved``: what the last World did is in memory alone. A person's stop, or a wait for other workers than
        those that notices take away, comes after another World has saved it, where there are workers for one.
        ``is_save_over``: whether, after so many seconds, nothing more is to come of the last World's save. Then nobody
        is waited for once every node goes away with a notice.
        """
        for node_id in self._block_list.blocked:
            self._group.forget_node(node_id)
        wait_for_more, self._waits_for_fresh = wait_for_more or self._waits_for_fresh, False
        began = time.monotonic()
        said: Wait | None = None
        while True:
            self.tick()
            world = self._sizing.world  # a person may change it meanwhile
            stop = self._asked_to_stop() or self._refused_to_start()
            views = self._group.views(self.draining())
            members = choose_members(views, world)
            if stop is not None:
                can_save = is_unsaved and stop.exit_code is ExitCode.STOPPED and len(members) >= world.min_workers
                return self._as_world(members) if can_save else stop
            waited = time.monotonic() - began
            if len(members) >= world.min_workers:
                is_full = len(members) >= world.max_workers
                settled = not self._group.is_someone_starting and waited >= world.start_grace_s
                if is_full or settled or not wait_for_more:
                    return self._as_world(members)
            else:
                self._slow_nodes.wake()
                wait = self._too_few(views, len(members))
                all_are_going = self._all_are_going() and not self._lift_blocks()
                if is_unsaved and (doomed := self._last_savers()):
                    return self._as_world(doomed)
                said = self._say_waiting(wait, said, waited)
                if all_are_going and is_save_over(waited):
                    text = f"every node that could hold a worker has a preemption notice: {wait.missing}"
                    return Stop(exit_code=ExitCode.BELOW_MINIMUM, reason=text)
                if waited > world.max_wait_s:
                    text = f"waited {waited:.0f} s (world.max_wait_s) for {wait.missing}"
                    return Stop(exit_code=ExitCode.BELOW_MINIMUM, reason=text)
            time.sleep(min(0.1, self._config.failure.poll_s))

    def _too_few(self, views: Sequence[WorkerView], num_ready: int) -> Wait:
        num_starting = sum(1 for view in views if not view.is_ready)
        num_blocked = len(self._block_list.blocked.keys() & self.living())
        return wait_reason(num_ready, num_starting, self._sizing.world, num_blocked)

    def _as_world(self, members: tuple[WorkerView, ...]) -> tuple[WorkerView, ...]:
        self._last_world = frozenset(member.node_id for member in members)
        return members

    def tick(self) -> None:
        """Bring the books up to date: signals, dead nodes, new nodes, workers that became ready or failed to start."""
        self._take_signals()
        living = self._watcher.view().living()
        for node_id in self._lost.take_back(time.monotonic(), living):
            _log.warning("node %s was taken for lost, yet Ray still lists it: it may be used again", node_id[:12])
        for node_id in self._group.known_nodes():
            if node_id not in living or node_id in self._lost.away:
                self._group.forget_node(node_id)
        self._take_nodes(living)
        before = {view.worker_id for view in self._group.views(frozenset()) if view.is_ready}
        failures: list[tuple[str, NodeFailure]] = []
        for lost in self._group.reconcile(self._sizing.num_workers, self._unusable()):
            _log.warning("worker %s on node %s did not start: %s", lost.worker_id, lost.node_id[:12], lost.reason)
            if lost.worker_id != "-" and not lost.is_refusal:
                failures.append((lost.node_id, NodeFailure.NOT_STARTED))
        for worker in self._group.views(frozenset()):
            if worker.is_ready and worker.worker_id not in before:
                facts = self._group.worker(worker.worker_id).facts
                pid = None if facts is None else facts.pid
                self._recorder.emit("worker_ready", worker=worker.worker_id, node_id=worker.node_id, pid=pid)
        for worker_id, seconds in self._group.starting_for_s().items():
            if seconds > self._config.failure.starting_s:
                _log.warning("worker %s did not start within failure.starting_s; it is replaced", worker_id)
                failures.append((self._group.worker(worker_id).node_id, NodeFailure.NOT_STARTED))
                self._group.remove_worker(worker_id)
        if failures:
            self.note_failures(failures)
        if self._recorder.steps_this_attempt:  # before, the new World may be reading from what is given back
            self._group.release(self._sizing.num_workers, self._unusable())

    def _take_nodes(self, living: Mapping[str, NodeView]) -> None:
        """Take as many nodes into use as the workers that are wanted need."""
        missing = self._sizing.num_workers - self._group.capacity(self._unusable())
        unusable = self._unusable() | self._lost.away
        fits = [
            (node_id, self._group.room(node_id, workers_that_fit(node.resources, self._config.world)))
            for node_id, node in living.items()
            if node_id not in unusable and node.drain_deadline_at_s is None
        ]
        fits.sort(key=lambda fit: self._group.reluctance(fit[0]))
        for node_id, count in nodes_to_admit(fits, missing).items():
            self._group.admit(node_id, count)

    def note_failures(self, failures: Iterable[tuple[str, NodeFailure]]) -> None:
        """Workers failed on these nodes; one on which they do so again and again is not used any more."""
        now = time.monotonic()
        living, unusable = self._watcher.view().living(), self._unusable() | self._lost.away
        for node_id, kind in failures:
            if node_id in living and node_id not in unusable:
                self._block_list.note(node_id, now, kind)
        fits = {n: workers_that_fit(v.resources, self._config.world) for n, v in living.items() if n not in unusable}
        enough = sum(fits.values()) - self._config.world.min_workers
        for node_id, reason in self._block_list.review(now, {n: fit <= enough for n, fit in fits.items()}).items():
            _log.warning("node %s is not used any more: %s", node_id[:12], reason)
            self._recorder.emit("node_blocked", node=node_id, reason=reason)
            if not any(view.is_member and view.node_id == node_id for view in self._group.views(frozenset())):
                self._group.forget_node(node_id)

    def replace_members(self, reason: str) -> None:
        """Fresh processes in the place of the last World's, which are alive but of no use."""
        members = [view.worker_id for view in self._group.views(frozenset()) if view.is_member]
        _log.warning("%s: fresh processes take the place of workers %s", reason, ", ".join(members))
        for worker_id in members:
            self._group.remove_worker(worker_id)
        self._recorder.emit("workers_replaced", workers=members, reason=reason)
        self._group.put_off_starts(0.0)  # nobody regroups meanwhile
        self._waits_for_fresh = True

    @property
    def blocked(self) -> dict[str, str]:
        """Nodes that are not used any more, and why."""
        return self._block_list.blocked

    def _unusable(self) -> frozenset[str]:
        return self.draining() | self._block_list.blocked.keys()

    def draining(self) -> frozenset[str]:
        """Nodes that the World is to do without: with a preemption notice, or at rest because they were slow."""
        return self._watcher.view().draining() | self._slow_nodes.resting

    def notices(self) -> dict[str, float]:
        """Nodes with a preemption notice, also those that are gone since, and its deadline: Unix time, 0: unknown."""
        return self._watcher.view().notices()

    def living(self) -> frozenset[str]:
        """Nodes that Ray lists as alive and nobody has found dead."""
        return frozenset(self._watcher.view().living()) - self._lost.away

    def lose_node(self, node_id: str) -> None:
        """Do not use ``node_id`` for a while, whatever Ray's list says of it."""
        self._lost.lose(node_id, time.monotonic())
        self._group.forget_node(node_id)

    def _all_are_going(self) -> bool:
        """Whether nodes have a notice, and none without one is left, or has come, on which a worker could be. A node
        that went before the last World began says nothing about what may still come; one that was judged lost, and
        that Ray still lists, may be used again soon."""
        view, unusable = self._watcher.view(), self._unusable()
        living = view.living()
        others = [node for node_id, node in living.items() if node_id not in unusable]
        is_one_going = bool(view.notices().keys() & (living.keys() | self._last_world))
        return is_one_going and not any(workers_that_fit(n.resources, self._config.world) for n in others)

    def _last_savers(self) -> tuple[WorkerView, ...]:
        """Where the nodes that stay are too few, a World with those that have a notice, which saves what memory alone
        holds: one parts for the first notice it hears of, and others may follow at once. Each choice of workers is
        tried once."""
        world, noticed = self._sizing.world, self.notices().keys()
        members = choose_members(self._group.views(self.draining() - noticed), world)
        chosen = frozenset(member.worker_id for member in members)
        if len(members) < world.min_workers or chosen in self._saved_by:
            return ()
        self._saved_by.append(chosen)
        text = "notices leave too few workers, and the last steps are in memory alone: the World goes on to save them"
        _log.warning("%s", text)
        self._recorder.emit("decision", decision="regroup", reason=text)
        return members

    def _lift_blocks(self) -> bool:
        """Use blocked nodes again, now that every other one goes: with them the Run may fail again, without them it
        certainly ends. Whether there are any."""
        draining, living = self.draining(), self._watcher.view().living()
        lifted = {
            node_id: reason
            for node_id, reason in self._block_list.blocked.items()
            if node_id in living
            and node_id not in draining
            and workers_that_fit(living[node_id].resources, self._config.world)
        }
        for node_id, reason in lifted.items():
            self._block_list.lift(node_id)
            text = f"node {node_id[:12]} is used again, as every other one has a preemption notice: {reason}"
            _log.warning("%s", text)
            self._recorder.emit("decision", decision="keep", reason=text, node=node_id)
        return bool(lifted)

    def _refused_to_start(self) -> Stop | None:
        """Waiting for more workers is in vain when the code of each of them raises before it is warm."""
        refusal = self._group.refusal()
        if refusal is None:
            return None
        text = f"no worker can start; worker {refusal.worker_id} on node {refusal.node_id[:12]}: {refusal.reason}"
        return Stop(exit_code=ExitCode.CONFIG_ERROR, reason=text)

    def _say_waiting(self, wait: Wait, said: Wait | None, waited_s: float) -> Wait | None:
        """Say what is waited for, once for each change; workers that are just starting get their grace first."""
        is_overdue = not self._group.is_someone_starting or waited_s > self._config.world.start_grace_s
        if wait == said or not is_overdue:
            return said
        self._sizing.pace.interrupt()
        self._recorder.emit("waiting", have=wait.have, need=wait.need, missing=wait.missing)
        return wait

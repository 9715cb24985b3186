"""The worker group: every node agent, Keeper handle and worker actor of one driver, and the calls made to them.

It starts, asks and removes; it does not decide. Nothing here outlives the driver but the Keepers.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import ray

from orchestrator.group_parts import (
    MAX_STARTS_PER_NODE,
    Admission,
    NodeParts,
    SpawnWorker,
    StartKeeper,
    Worker,
    WorkerLost,
)
from orchestrator.letting_go import LettingGo
from orchestrator.lifelines import Lifelines
from orchestrator.node_agent import NodeAgentActor
from orchestrator.node_bundles import NodeBundles
from orchestrator.placement import NodePlacement, on_node
from orchestrator.scaling_policy import WorkerView, choose_surplus
from orchestrator.start_failure import is_refusal, reason_of
from storage.errors import KeeperRefused
from storage.keys import Attempt
from workers.contract import AttemptSpec

__all__ = ["NodeParts", "SpawnWorker", "StartKeeper", "Worker", "WorkerGroup", "WorkerLost"]

_log = logging.getLogger(__name__)
_ADMIT_THREADS = 8
OUTCOME_CALL_S = 600.0  # one outcome call waits this long in the worker, then is made anew
_LET_GO_S = 10.0
_AGENT_RESTARTS = 8  # one that died alone would make its node, and all that is in memory there, lost at the next fault
_ADMISSION_S = 20.0  # a node that takes longer to be taken in is not counted on any more


class WorkerGroup:
    """Keyed by worker id and node id; not thread-safe, owned by the controller. It closes ``lifelines`` at its end."""

    def __init__(
        self,
        *,
        run_id: str,
        spawn: SpawnWorker,
        start_keeper: StartKeeper,
        resources_per_worker: dict[str, float],
        lifelines: Lifelines,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_id = run_id
        self._spawn = spawn
        self._start_keeper = start_keeper
        self._resources = resources_per_worker
        self.lifelines = lifelines
        self._letting_go = LettingGo()
        self._starts_wait_until = 0.0
        self._monotonic = monotonic
        self._nodes: dict[str, NodeParts] = {}
        self._workers: dict[str, Worker] = {}
        self._admitting: dict[str, Admission] = {}
        self._num_failed_admissions: Counter[str] = Counter()
        self._refused: dict[str, list[WorkerLost]] = {}  # by Keepers, for each node
        self._num_spawned = 0
        self._threads = ThreadPoolExecutor(max_workers=_ADMIT_THREADS, thread_name_prefix="admit")

    # -- nodes ------------------------------------------------------------------------------------------------------

    def known_nodes(self) -> frozenset[str]:
        """Those in use, on their way, or left alone because their Keeper refuses to be made."""
        return frozenset(self._nodes) | frozenset(self._admitting) | self._left_alone()

    def capacity(self, excluded: frozenset[str]) -> int:
        """Workers that the nodes in use and those on their way can hold, without the ``excluded`` ones."""
        now = self._monotonic()
        inside = [p.bundles.num for n, p in self._nodes.items() if n not in excluded and not p.is_exhausted]
        coming = [
            admission.count
            for node_id, admission in self._admitting.items()
            if node_id not in excluded and now - admission.began_at < _ADMISSION_S
        ]
        return sum(inside) + sum(coming)

    def room(self, node_id: str, fit: int) -> int:
        """Further workers that this driver may put on a node where ``fit`` can be; none on one that is not in order."""
        parts = self._nodes.get(node_id)
        if parts is None:
            return 0 if node_id in self.known_nodes() else fit
        return 0 if parts.is_exhausted else max(0, fit - parts.bundles.num)

    def reluctance(self, node_id: str) -> tuple[int, int]:
        """Which nodes to take last: those that could not be taken in before, then those in use."""
        return (self._num_failed_admissions[node_id], int(node_id in self._nodes))

    def admit(self, node_id: str, count: int) -> None:
        """Use a node for ``count`` more workers; on a new one agent and Keeper start beside everything else."""
        if node_id in self._nodes:
            self._nodes[node_id].bundles.grow(count)
            return
        future = self._threads.submit(self._build_node, node_id, count)
        self._admitting[node_id] = Admission(count=count, future=future, began_at=self._monotonic())

    def release(self, wanted: int, excluded: frozenset[str]) -> None:
        """Let go of workers that ``wanted`` ones do not need, then of what their nodes held for them. Members stay."""
        for worker_id in choose_surplus(self.views(excluded), wanted):
            self.remove_worker(worker_id)
        surplus = self.capacity(excluded) - wanted
        busy = {worker.node_id for worker in self._workers.values()}
        for node_id, parts in sorted(self._nodes.items(), key=lambda item: item[0] in busy):
            if surplus <= 0:
                return
            if node_id in excluded or parts.is_exhausted:
                continue
            gone = parts.bundles.trim(surplus)
            surplus -= sum(placement.count for placement in gone)
            for placement in gone:
                self._letting_go.remove(placement)
            if not parts.bundles.placements:
                _log.info("node %s is given back", node_id[:12])
                self.forget_node(node_id)

    def _build_node(self, node_id: str, count: int) -> NodeParts:
        agent = NodeAgentActor.options(
            num_cpus=0, max_concurrency=4, max_restarts=_AGENT_RESTARTS, scheduling_strategy=on_node(node_id)
        ).remote(node_id, self.lifelines.spec)
        bundles = NodeBundles(lambda number: NodePlacement(self._run_id, node_id, number, self._resources), count)
        try:
            keeper = self._start_keeper(node_id)
        except BaseException:
            for placement in bundles.placements:
                placement.remove()
            raise
        return NodeParts(node_id=node_id, agent=agent, keeper=keeper, bundles=bundles)

    def reconcile(self, max_workers: int, draining: frozenset[str]) -> tuple[WorkerLost, ...]:
        """Take admitted nodes in, start workers on free bundles up to ``max_workers``, notice who became ready.
        Returns what failed."""
        lost: list[WorkerLost] = []
        for node_id, future in [(n, a.future) for n, a in self._admitting.items() if a.future.done()]:
            del self._admitting[node_id]
            error = future.exception()
            if error is None:
                self._nodes[node_id] = future.result()
                self._refused.pop(node_id, None)
                del self._num_failed_admissions[node_id]
                continue
            self._num_failed_admissions[node_id] += 1
            is_refusal, reason = isinstance(error, KeeperRefused), f"{type(error).__name__}: {error}"
            lost.append(WorkerLost(worker_id="-", node_id=node_id, reason=reason, is_refusal=is_refusal))
            if is_refusal:
                self._refused.setdefault(node_id, []).append(lost[-1])
        self._spawn_missing(max_workers, draining)
        lost.extend(self._poll_starting())
        return tuple(lost)

    def put_off_starts(self, limit_s: float) -> None:
        """Start no worker for the next ``limit_s``: a start's imports would take the processors from those that regroup
        now. 0 ends that."""
        self._starts_wait_until = self._monotonic() + limit_s

    def _spawn_missing(self, max_workers: int, draining: frozenset[str]) -> None:
        if self._monotonic() < self._starts_wait_until:
            return
        usable = sum(1 for worker in self._workers.values() if worker.node_id not in draining)
        for parts in self._nodes.values():
            while parts.bundles.num_free and usable < max_workers and parts.node_id not in draining:
                if parts.is_exhausted:
                    break
                self._start_worker(parts)
                usable += 1

    def _start_worker(self, parts: NodeParts) -> None:
        bundle = parts.bundles.take()
        self._num_spawned += 1
        worker_id = f"w{self._num_spawned:03d}-{parts.node_id[:8]}"
        options = bundle.actor_options()
        actor = self._spawn(
            worker_id=worker_id,
            node_id=parts.node_id,
            keeper=parts.keeper,
            options=options,
            lifeline=self.lifelines.spec,
        )
        self._workers[worker_id] = Worker(
            worker_id=worker_id,
            node_id=parts.node_id,
            bundle=bundle,
            actor=actor,
            ready_ref=actor.prepare.remote(),
            started_at=self._monotonic(),
        )

    def _poll_starting(self) -> Iterable[WorkerLost]:
        starting = {worker.ready_ref: worker for worker in self._workers.values() if worker.facts is None}
        if not starting:
            return []
        ready, _ = ray.wait(list(starting), num_returns=len(starting), timeout=0)
        lost = []
        for ref in ready:
            worker = starting[ref]
            try:
                worker.facts = ray.get(ref)
            except Exception as error:  # noqa: BLE001 - a worker's start may fail in any way; it is reported as lost
                loss = WorkerLost(
                    worker_id=worker.worker_id,
                    node_id=worker.node_id,
                    reason=reason_of(error),
                    is_refusal=is_refusal(error),
                )
                lost.append(loss)
                parts = self._nodes[worker.node_id]
                parts.failed_starts += 1
                parts.refusal = loss if loss.is_refusal else parts.refusal
                self.remove_worker(worker.worker_id)
        return lost

    def forget_node(self, node_id: str) -> None:
        """Let a lost node go: its workers, its placement group, its agent. Its Keeper is dead or will expire."""
        for worker in [w for w in self._workers.values() if w.node_id == node_id]:
            self._letting_go.kill(worker.actor)
            del self._workers[worker.worker_id]
        self._give_up_admission(node_id)
        self._refused.pop(node_id, None)
        parts = self._nodes.pop(node_id, None)
        if parts is not None:
            self._let_go(parts)
        self.lifelines.forget_node(node_id)

    def _let_go(self, parts: NodeParts) -> None:
        self._letting_go.kill(parts.agent)
        for placement in parts.bundles.placements:
            self._letting_go.remove(placement)

    def _give_up_admission(self, node_id: str) -> None:
        admission = self._admitting.pop(node_id, None)
        if admission is not None and not admission.future.cancel():
            admission.future.add_done_callback(_discard)

    # -- workers ----------------------------------------------------------------------------------------------------

    def views(self, draining: frozenset[str]) -> tuple[WorkerView, ...]:
        return tuple(
            WorkerView(
                worker_id=worker.worker_id,
                node_id=worker.node_id,
                is_ready=worker.facts is not None,
                is_draining=worker.node_id in draining,
                is_member=worker.is_member,
            )
            for worker in self._workers.values()
        )

    @property
    def is_someone_starting(self) -> bool:
        return bool(self._admitting) or any(worker.facts is None for worker in self._workers.values())

    def refusal(self) -> WorkerLost | None:
        """Why no worker can start: set once workers refused to start on every node and none is ready anywhere."""
        refusals = [parts.refusal for parts in self._nodes.values()]
        refusals += [self._refused[node_id][-1] for node_id in self._left_alone()]
        is_anyone_ready = any(worker.facts is not None for worker in self._workers.values())
        if is_anyone_ready or self._admitting or not refusals or None in refusals:
            return None
        return refusals[0]

    def _left_alone(self) -> frozenset[str]:
        return frozenset(n for n, refused in self._refused.items() if len(refused) >= MAX_STARTS_PER_NODE)

    def starting_for_s(self) -> Mapping[str, float]:
        """Worker id -> seconds since its start, for workers that are not warm yet."""
        now = self._monotonic()
        return {w.worker_id: now - w.started_at for w in self._workers.values() if w.facts is None}

    def worker(self, worker_id: str) -> Worker:
        return self._workers[worker_id]

    def state_bytes(self, worker_ids: Iterable[str]) -> int | None:
        """Of the whole training state, as these say; one that was let go with its node meanwhile says nothing."""
        facts = [self._workers[worker_id].facts for worker_id in worker_ids if worker_id in self._workers]
        return max((one.state_bytes for one in facts if one is not None and one.state_bytes is not None), default=None)

    def set_members(self, worker_ids: Sequence[str]) -> None:
        for worker in self._workers.values():
            worker.is_member = worker.worker_id in worker_ids

    def start_attempt(self, specs: Mapping[str, AttemptSpec], coordinator: Any) -> dict[Any, str]:
        """Start the training thread of every member; returns outcome ref -> worker id.

        The outcome call is sent right behind the start, so a worker that cannot start fails its outcome. A member that
        was let go with its node since the World was chosen is left out.
        """
        refs: dict[Any, str] = {}
        for worker_id, spec in specs.items():
            if worker_id not in self._workers:
                continue
            actor = self._workers[worker_id].actor
            actor.start.remote(spec, coordinator)
            refs[actor.wait_outcome.remote(spec.attempt, OUTCOME_CALL_S)] = worker_id
        return refs

    def await_outcome(self, worker_id: str, attempt: Attempt) -> Any:
        """Ask again for an outcome after a call came back without one."""
        return self._workers[worker_id].actor.wait_outcome.remote(attempt, OUTCOME_CALL_S)

    def abandon(self, worker_ids: Sequence[str], attempt: Attempt, timeout_s: float) -> dict[Any, str]:
        """Ask members to let the Attempt go; returns report ref -> worker id."""
        return {self._workers[w].actor.abandon.remote(attempt, timeout_s): w for w in worker_ids if w in self._workers}

    def heartbeat(self, worker_id: str) -> Any:
        return self._workers[worker_id].actor.heartbeat.remote()

    def ping_agent(self, node_id: str) -> Any | None:
        """A ref that resolves if the node's agent lives; None when the node is not known any more."""
        parts = self._nodes.get(node_id)
        return None if parts is None else parts.agent.ping.remote()

    def ask_living(self, worker_id: str) -> Any | None:
        """A ref that resolves to the worker's pid if its process lives, else to nothing; None where nobody can tell."""
        worker = self._workers.get(worker_id)
        if worker is None or worker.facts is None or worker.node_id not in self._nodes:
            return None
        return self._nodes[worker.node_id].agent.living.remote((worker.facts.pid,))

    def ask_starved(self, worker_id: str, within_s: float) -> Any | None:
        """A ref that tells whether the kernel lately killed a process of the worker's node for want of memory."""
        worker = self._workers.get(worker_id)
        if worker is None or worker.node_id not in self._nodes:
            return None
        return self._nodes[worker.node_id].agent.has_starved.remote(within_s)

    def fence(self, worker_id: str) -> Any | None:
        """SIGKILL a worker through its node's agent; the ref resolves to the pids still alive (none, if it worked)."""
        worker = self._workers.get(worker_id)
        if worker is None or worker.facts is None or worker.node_id not in self._nodes:
            return None
        return self._nodes[worker.node_id].agent.kill.remote((worker.facts.pid,))

    def remove_worker(self, worker_id: str) -> None:
        """Forget a worker that is gone or must go; its bundle is free for another one."""
        worker = self._workers.pop(worker_id, None)
        if worker is None:
            return
        self._letting_go.kill(worker.actor)
        parts = self._nodes.get(worker.node_id)
        if parts is not None:
            parts.bundles.give_back(worker.bundle)

    # -- keepers ----------------------------------------------------------------------------------------------------

    def keepers(self) -> dict[str, Any]:
        """Node id -> Keeper actor handle."""
        return {node_id: parts.keeper for node_id, parts in self._nodes.items()}

    def close(self) -> None:
        """Kill every worker and agent and give all resources back. Keepers stay."""
        for worker_id in list(self._workers):
            self.remove_worker(worker_id)
        for parts in self._nodes.values():
            self._let_go(parts)
        self._nodes.clear()
        for node_id in list(self._admitting):
            self._give_up_admission(node_id)
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._letting_go.close(_LET_GO_S)
        self.lifelines.close()


def _discard(admission: Future[NodeParts]) -> None:
    """A node was let go while it was being admitted: give back what was made for it."""
    if admission.cancelled() or admission.exception() is not None or not ray.is_initialized():
        return
    parts = admission.result()
    ray.kill(parts.agent, no_restart=True)
    for placement in parts.bundles.placements:
        placement.remove()

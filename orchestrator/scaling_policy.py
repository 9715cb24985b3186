"""How large the World should be: pure functions from what is there to a Decision. No clock, no ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.config import WorldConfig
from orchestrator.decisions import Keep, Leave, Wait

__all__ = ["WorkerView", "choose_members", "decide_leave", "wait_reason", "workers_that_fit"]

MIN_STEPS_LEFT_TO_JOIN = 4  # a Leave lands two steps ahead: nearer the end a new worker would only train nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """A worker as the policy sees it. ``is_draining``: its node has a preemption notice."""

    worker_id: str
    node_id: str
    is_ready: bool
    is_draining: bool
    is_member: bool


def workers_that_fit(resources: dict[str, float], config: WorldConfig) -> int:
    """Workers a node with these total resources can hold, capped by ``world.workers_per_node``."""
    per_resource = [
        int(resources.get(name, 0.0) / amount) for name, amount in config.resources_per_worker.items() if amount
    ]
    fit = min(per_resource, default=0)
    return fit if config.workers_per_node is None else min(fit, config.workers_per_node)


def choose_members(workers: Sequence[WorkerView], config: WorldConfig) -> tuple[WorkerView, ...]:
    """Ready workers on nodes that stay, at most ``max_workers``: present members first, then by node and worker name,
    so that ranks stay where their state is."""
    usable = [worker for worker in workers if worker.is_ready and not worker.is_draining]
    usable.sort(key=lambda worker: (not worker.is_member, worker.node_id, worker.worker_id))
    return tuple(usable[: config.max_workers])


def decide_leave(
    workers: Sequence[WorkerView], config: WorldConfig, *, steps_left: int, is_someone_starting: bool
) -> Keep | Leave:
    """Whether the running World should part at a coming step: for a preemption notice at once, for growth when every
    starting worker is ready (joins that come together are taken together) and enough steps are left."""
    members = [worker for worker in workers if worker.is_member]
    draining = [worker for worker in members if worker.is_draining]
    if draining:
        nodes = ", ".join(sorted({worker.node_id[:12] for worker in draining}))
        return Leave(cause="preemption", reason=f"preemption notice for node {nodes}")
    spare = [worker for worker in workers if worker.is_ready and not worker.is_draining and not worker.is_member]
    grows = bool(spare) and len(members) < config.max_workers and config.accept_joins
    if grows and not is_someone_starting and steps_left >= MIN_STEPS_LEFT_TO_JOIN:
        return Leave(cause="join", reason=f"{len(spare)} new worker(s) ready")
    return Keep()


def wait_reason(num_ready: int, num_starting: int, config: WorldConfig) -> Wait:
    """What a run below its minimum waits for, in words."""
    short = config.min_workers - num_ready
    needs = ", ".join(f"{amount:g} {name}" for name, amount in config.resources_per_worker.items())
    starting = f", {num_starting} starting" if num_starting else ""
    missing = f"{short} more worker(s), each {needs} ({num_ready} ready{starting})"
    return Wait(have=num_ready, need=config.min_workers, missing=missing)

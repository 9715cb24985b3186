"""How large the World should be: pure functions from what is there to a Decision. No clock, no ray."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from orchestrator.config import WorldConfig
from orchestrator.decisions import Keep, Leave, Wait

__all__ = [
    "GrowthFacts",
    "WorkerView",
    "choose_members",
    "choose_surplus",
    "decide_leave",
    "growth_gain_s",
    "nodes_that_stay",
    "nodes_to_admit",
    "refuse_size",
    "wait_reason",
    "workers_that_fit",
]

_BIND_AHEAD = 2  # a Leave lands two steps ahead; what is trained until then gains nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """A worker as the policy sees it. ``is_draining``: its node has a preemption notice."""

    worker_id: str
    node_id: str
    is_ready: bool
    is_draining: bool
    is_member: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthFacts:
    """What it takes to say whether growing pays.

    ``step_s`` None: no step was finished yet. ``regroup_s``: from the last step of a World to the first of the next.
    ``ready_for_s``: how long the first worker that could join has been ready. ``is_asked_for``: a person wants this
    size, so nobody reckons whether it pays.
    """

    steps_left: int
    step_s: float | None
    regroup_s: float
    num_leaves: int
    ready_for_s: float
    is_someone_starting: bool
    is_asked_for: bool = False


def workers_that_fit(resources: dict[str, float], config: WorldConfig) -> int:
    """Workers a node with these total resources can hold, capped by ``world.workers_per_node``."""
    per_resource = [
        int(resources.get(name, 0.0) / amount) for name, amount in config.resources_per_worker.items() if amount
    ]
    fit = min(per_resource, default=0)
    return fit if config.workers_per_node is None else min(fit, config.workers_per_node)


def nodes_to_admit(fits: Sequence[tuple[str, int]], missing: int) -> dict[str, int]:
    """Which of the nodes not in use, given with the workers that fit on each, to take for ``missing`` more workers."""
    taken: dict[str, int] = {}
    for node_id, fit in fits:
        count = min(fit, missing - sum(taken.values()))
        if count > 0:
            taken[node_id] = count
    return taken


def choose_members(workers: Sequence[WorkerView], config: WorldConfig) -> tuple[WorkerView, ...]:
    """Ready workers on nodes that stay, at most ``max_workers``: present members first, so that ranks stay where their
    state is; of those the ones on nodes with most of them, so that a World that shrinks gives whole nodes back."""
    usable = [worker for worker in workers if worker.is_ready and not worker.is_draining]
    on_node = Counter(worker.node_id for worker in usable if worker.is_member)
    usable.sort(key=lambda w: (not w.is_member, -on_node[w.node_id], w.node_id, w.worker_id))
    return tuple(usable[: config.max_workers])


def choose_surplus(workers: Sequence[WorkerView], wanted: int) -> tuple[str, ...]:
    """Workers to let go so that ``wanted`` are left on nodes that stay. Never members of the World; those that are
    still starting first, then those on nodes with the fewest members, newest first."""
    staying = [worker for worker in workers if not worker.is_draining]
    on_node = Counter(worker.node_id for worker in staying if worker.is_member)
    free = sorted((w for w in staying if not w.is_member), key=lambda w: w.worker_id, reverse=True)
    free.sort(key=lambda w: (w.is_ready, on_node[w.node_id]))
    return tuple(worker.worker_id for worker in free[: max(0, len(staying) - wanted)])


def nodes_that_stay(workers: Sequence[WorkerView], members: Collection[str], wanted: int) -> frozenset[str]:
    """Nodes that a coming World of ``members`` will not give back: theirs, and those of the spares that it keeps."""
    coming = [replace(worker, is_member=worker.worker_id in members) for worker in workers]
    surplus = choose_surplus(coming, wanted)
    return frozenset(w.node_id for w in coming if not w.is_draining and w.worker_id not in surplus)


def growth_gain_s(*, steps_left: int, step_s: float, num_leaves: int, old: int, new: int) -> float:
    """Seconds that ``new`` instead of ``old`` workers save until the last step.

    A step takes as long as its rounds, and W workers need ceil(leaves / W) of them: 3 do 4 leaves no faster than 2.
    """
    rounds_before, rounds_after = (-(-num_leaves // size) for size in (old, new))
    return max(0, steps_left - _BIND_AHEAD) * step_s * (1 - rounds_after / rounds_before)


def decide_leave(workers: Sequence[WorkerView], config: WorldConfig, facts: GrowthFacts) -> Keep | Leave:
    """Whether the running World should part at a coming step: for a preemption notice at once, to become smaller when
    fewer are wanted, to grow when it pays. Joiners that come within ``join_window_s`` are taken together; whoever is
    ready when the World parts for another reason comes along."""
    members = [worker for worker in workers if worker.is_member]
    draining = [worker for worker in members if worker.is_draining]
    if draining:
        nodes = ", ".join(sorted({worker.node_id[:12] for worker in draining}))
        return Leave(cause="preemption", reason=f"preemption notice for node {nodes}")
    if len(members) > config.max_workers:
        return Leave(cause="scale", reason=f"{config.max_workers} workers are wanted, {len(members)} train")
    free = [worker for worker in workers if worker.is_ready and not worker.is_draining and not worker.is_member]
    joiners = min(len(free), config.max_workers - len(members))
    if not members or joiners <= 0 or not (config.accept_joins or facts.is_asked_for):
        return Keep()
    is_window_open = facts.is_someone_starting and facts.ready_for_s < config.join_window_s
    if facts.steps_left <= _BIND_AHEAD or (is_window_open and len(members) + joiners < config.max_workers):
        return Keep()
    if facts.is_asked_for:
        return Leave(cause="scale", reason=f"{joiners} new worker(s) ready, {config.max_workers} are wanted")
    return _join_if_it_pays(len(members), joiners, config, facts)


def _join_if_it_pays(old: int, joiners: int, config: WorldConfig, facts: GrowthFacts) -> Keep | Leave:
    joined = Leave(cause="join", reason=f"{joiners} new worker(s) ready")
    if config.join_gain_ratio == 0:
        return joined
    if facts.step_s is None:
        return Keep()
    new = old + joiners
    gain_s = growth_gain_s(
        steps_left=facts.steps_left, step_s=facts.step_s, num_leaves=facts.num_leaves, old=old, new=new
    )
    if gain_s > config.join_gain_ratio * facts.regroup_s:
        return joined
    why = f"{new} workers would save {gain_s:.1f} s in the steps left, a regroup costs {facts.regroup_s:.1f} s"
    if -(-facts.num_leaves // old) == -(-facts.num_leaves // new):
        why = f"{facts.num_leaves} leaves a step take {new} workers as many rounds as {old}"
    return Keep(reason=f"{joiners} new worker(s) wait as spares: {why}")


def refuse_size(wanted: int, config: WorldConfig, num_leaves: int) -> str | None:
    """Why a person cannot have ``wanted`` workers; None: they can."""
    if wanted < config.min_workers:
        return f"{wanted} workers are fewer than world.min_workers ({config.min_workers})"
    if wanted > num_leaves:
        return f"a step has {num_leaves} leaves (global_batch / micro_batch), so more workers would have nothing to do"
    return None


def wait_reason(num_ready: int, num_starting: int, config: WorldConfig, num_blocked: int = 0) -> Wait:
    """What a run below its minimum waits for, in words. ``num_blocked``: nodes that are there but not used any more."""
    short = config.min_workers - num_ready
    needs = ", ".join(f"{amount:g} {name}" for name, amount in config.resources_per_worker.items())
    starting = f", {num_starting} starting" if num_starting else ""
    missing = f"{short} more worker(s), each {needs} ({num_ready} ready{starting})"
    if num_blocked:
        missing += f"; {num_blocked} node(s) are there but blocked, because workers failed on them again and again"
    return Wait(have=num_ready, need=config.min_workers, missing=missing)

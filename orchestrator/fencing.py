"""Fencing: after the first sign of a fault, find out within a bounded time who lives, kill who hangs, free the rest.

Every member is asked directly to let the Attempt go, and every node agent to answer, all at once. No answer from a node
means it is lost for this Run: its worker can write nothing more, because the coordinator refuses its Attempt.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any

import ray

from orchestrator.worker_group import WorkerGroup
from workers.contract import World

__all__ = ["Reckoning", "reckon"]

_log = logging.getLogger(__name__)
_ABANDON_S = 10.0  # longest a live worker may take to end its training thread and drop the model


@dataclass(frozen=True, slots=True, kw_only=True)
class Reckoning:
    """Who is left. ``survivors`` let the Attempt go cleanly; the lost include those that had to be killed."""

    survivors: frozenset[str]
    lost_workers: tuple[str, ...]
    lost_nodes: tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class _Poll:
    """The questions that are out and what came back."""

    abandons: dict[Any, str] = field(default_factory=dict)
    pings: dict[Any, str] = field(default_factory=dict)
    clean: set[str] = field(default_factory=set)
    unclean: set[str] = field(default_factory=set)
    dead: set[str] = field(default_factory=set)
    answering_nodes: set[str] = field(default_factory=set)
    silent_nodes: set[str] = field(default_factory=set)


def reckon(
    *,
    world: World,
    group: WorkerGroup,
    living: frozenset[str],
    gone: frozenset[str],
    hung: frozenset[str],
    settle_s: float,
) -> Reckoning:
    """Ask everyone, wait at most ``settle_s`` for silent nodes (longer only for workers on nodes that answer)."""
    fenced = _kill(group, hung)
    poll = _Poll(dead=set(gone) | fenced)
    home = {member.worker_id: member.node_id for member in world.members}
    asked = [worker for worker in home if worker not in poll.dead]
    poll.abandons = group.abandon(asked, world.attempt, _ABANDON_S)
    for node_id in set(home.values()):
        ref = group.ping_agent(node_id) if node_id in living else None
        if ref is None:
            poll.silent_nodes.add(node_id)
        else:
            poll.pings[ref] = node_id
    _collect(poll, home, settle_s)
    poll.silent_nodes |= set(poll.pings.values())
    suspects = set(poll.abandons.values()) | poll.unclean
    to_kill = frozenset(w for w in suspects if home[w] not in poll.silent_nodes)
    _kill(group, to_kill)
    lost_nodes = tuple(sorted(poll.silent_nodes))
    survivors = frozenset(w for w in poll.clean if home[w] not in poll.silent_nodes)
    lost_workers = tuple(sorted(set(home) - survivors))
    return Reckoning(survivors=survivors, lost_workers=lost_workers, lost_nodes=lost_nodes)


def _collect(poll: _Poll, home: dict[str, str], settle_s: float) -> None:
    """Take answers until nobody is left to wait for: silent nodes get ``settle_s``, live workers `_ABANDON_S`."""
    began = time.monotonic()
    while poll.abandons or poll.pings:
        waited = time.monotonic() - began
        if waited >= _ABANDON_S:
            return
        if waited >= settle_s:
            unanswered = set(poll.pings.values()) | poll.silent_nodes
            if all(home[worker] in unanswered for worker in poll.abandons.values()):
                return
        refs = [*poll.abandons, *poll.pings]
        ready, _ = ray.wait(refs, num_returns=1, timeout=0.05)
        for ref in ready:
            _take(poll, ref)


def _take(poll: _Poll, ref: Any) -> None:
    worker_id, node_id = poll.abandons.pop(ref, None), poll.pings.pop(ref, None)
    try:
        answer = ray.get(ref)
    except ray.exceptions.RayError as error:
        if worker_id is not None:
            _log.info("worker %s does not answer: %s", worker_id, type(error).__name__)
            poll.dead.add(worker_id)
        if node_id is not None:
            poll.silent_nodes.add(node_id)
        return
    if worker_id is not None:
        (poll.clean if answer.is_clean else poll.unclean).add(worker_id)
    if node_id is not None:
        poll.answering_nodes.add(node_id)


def _kill(group: WorkerGroup, workers: frozenset[str]) -> set[str]:
    """SIGKILL through the node agents, waiting a bounded time for their word."""
    refs = {ref: worker for worker in workers if (ref := group.fence(worker)) is not None}
    if refs:
        ray.wait(list(refs), num_returns=len(refs), timeout=2.0)
        _log.warning("fenced %s", ", ".join(sorted(workers)))
    return set(workers)

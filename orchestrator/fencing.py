"""Fencing: after the first sign of a fault, find out within a bounded time who lives, kill who hangs, free the rest.

Every member is asked directly to let the Attempt go, and every node agent to answer, all at once; nobody is waited for
whose lifeline has ended. No answer from a node means it is lost: its worker can write nothing more, because the
coordinator refuses its Attempt. A node that shows life in another way, by its agent's lifeline or its worker's answer,
is given more time: an agent answers late on a busy machine. And one that has died alone takes nobody along.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import ray

from orchestrator.worker_group import WorkerGroup
from workers.contract import World
from workers.lifeline import Role

__all__ = ["Reckoning", "fence_late", "reckon"]

_log = logging.getLogger(__name__)
_ABANDON_S = 10.0  # longest a live worker may take to end its training thread and drop the model, or an agent to answer
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Reckoning:
    """Who is left. ``survivors`` let the Attempt go cleanly; the lost include those that had to be killed."""

    survivors: frozenset[str]
    lost_workers: tuple[str, ...]
    lost_nodes: tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class _Poll:
    """The questions that are out and what came back. ``home``: worker id -> node id."""

    home: dict[str, str]
    fences: dict[Any, str] = field(default_factory=dict)
    abandons: dict[Any, str] = field(default_factory=dict)
    pings: dict[Any, str] = field(default_factory=dict)
    clean: set[str] = field(default_factory=set)
    unclean: set[str] = field(default_factory=set)
    silent_nodes: set[str] = field(default_factory=set)
    agentless: set[str] = field(default_factory=set)  # nodes whose agent cannot answer

    def is_open(self, waited_s: float, settle_s: float, held: Collection[str]) -> bool:
        """Whether there is still somebody to wait for: silent nodes get ``settle_s``, those that show life (``held``:
        a line stands, of their agent or, where that is gone, of a worker) and their workers `_ABANDON_S`."""
        if not (self.fences or self.abandons or self.pings) or waited_s >= _ABANDON_S:
            return False
        if waited_s < settle_s:
            return True
        unanswered = set(self.pings.values())
        if unanswered & {*held, *(self.home[worker] for worker in self.clean | self.unclean)}:
            return True
        waited_for = {*self.fences.values(), *self.abandons.values()}
        mute = unanswered | self.silent_nodes | (self.agentless - set(held))
        return any(self.home[worker] not in mute for worker in waited_for)

    def settle(self) -> None:
        """Nobody is waited for any more. A node without an agent lives where each of its members has let go."""
        unsafe = {node for worker, node in self.home.items() if worker not in self.clean}
        self.silent_nodes |= {*self.pings.values(), *(self.agentless & unsafe)}

    def drop(self, lost_nodes: frozenset[str]) -> None:
        """Wait no longer for who cannot answer."""
        self.silent_nodes |= lost_nodes
        self.pings = {ref: node for ref, node in self.pings.items() if node not in lost_nodes}
        self.fences = {ref: w for ref, w in self.fences.items() if self.home[w] not in lost_nodes}
        self.abandons = {ref: w for ref, w in self.abandons.items() if self.home[w] not in lost_nodes}


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
    poll = _Poll(home={member.worker_id: member.node_id for member in world.members})
    poll.fences = _kill(group, hung)
    asked = [worker for worker in poll.home if worker not in gone | hung]
    poll.abandons = group.abandon(asked, world.attempt, _ABANDON_S)
    for node_id in set(poll.home.values()):
        is_there = node_id in living and not _is_lost(group, node_id, gone, world)
        ref = group.ping_agent(node_id) if is_there else None
        if ref is None:
            poll.silent_nodes.add(node_id)
        else:
            poll.pings[ref] = node_id
    _collect(poll, group, world, gone, settle_s)
    poll.settle()
    suspects = set(poll.abandons.values()) | poll.unclean
    late = _kill(group, frozenset(w for w in suspects if poll.home[w] not in poll.silent_nodes))
    if late:
        ray.wait(list(late), num_returns=len(late), timeout=settle_s)
    survivors = frozenset(w for w in poll.clean if poll.home[w] not in poll.silent_nodes)
    return Reckoning(
        survivors=survivors,
        lost_workers=tuple(sorted(set(poll.home) - survivors)),
        lost_nodes=tuple(sorted(poll.silent_nodes)),
    )


def fence_late(reckoning: Reckoning, group: WorkerGroup, workers: Collection[str], *, settle_s: float) -> Reckoning:
    """Kill those of ``workers`` that survived the reckoning: what they said was heard only when it was over."""
    late = reckoning.survivors & frozenset(workers)
    if not late:
        return reckoning
    if killed := _kill(group, late):
        ray.wait(list(killed), num_returns=len(killed), timeout=settle_s)
    return Reckoning(
        survivors=reckoning.survivors - late,
        lost_workers=tuple(sorted({*reckoning.lost_workers, *late})),
        lost_nodes=reckoning.lost_nodes,
    )


def _collect(poll: _Poll, group: WorkerGroup, world: World, gone: frozenset[str], settle_s: float) -> None:
    """Take answers and ended lifelines until nobody is left to wait for."""
    bell, began = group.lifelines.bell, time.monotonic()
    for ref in (*poll.fences, *poll.abandons, *poll.pings):
        bell.watch(ref)
    while True:
        waited_s = time.monotonic() - began  # before the look: a driver that was held up itself must not blame others
        poll.drop(frozenset(node for node in poll.home.values() if _is_lost(group, node, gone, world)))
        refs = [*poll.fences, *poll.abandons, *poll.pings]
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0) if refs else ([], [])
        for ref in ready:
            _take(poll, ref)
        held = {node for node in poll.pings.values() if group.lifelines.is_held(Role.AGENT, node)}
        lonely = [worker for worker in poll.abandons.values() if poll.home[worker] in poll.agentless]
        held |= {poll.home[worker] for worker in lonely if group.lifelines.is_held(Role.WORKER, worker)}
        if not poll.is_open(waited_s, settle_s, held):
            return
        if not ready:
            bell.wait(_LOOK_S)


def _is_lost(group: WorkerGroup, node_id: str, gone: frozenset[str], world: World) -> bool:
    """Whether the lifelines of a node's agent and of all its members have ended: the whole machine is gone, or out of
    reach of this driver, which is the same to the Run."""
    members = [member.worker_id for member in world.members if member.node_id == node_id]
    lines = group.lifelines
    return lines.is_agent_cut(node_id) and all(worker in gone or lines.is_cut(worker) for worker in members)


def _take(poll: _Poll, ref: Any) -> None:
    fenced, worker_id, node_id = poll.fences.pop(ref, None), poll.abandons.pop(ref, None), poll.pings.pop(ref, None)
    try:
        answer = ray.get(ref)
    except ray.exceptions.RayError as error:
        if fenced is not None or worker_id is not None:
            _log.info("no word on worker %s: %s", fenced or worker_id, type(error).__name__)
        if node_id is not None:
            poll.agentless.add(node_id)
        return
    if worker_id is not None:
        (poll.clean if answer.is_clean else poll.unclean).add(worker_id)
    if fenced is not None and answer:
        _log.warning("worker %s outlives its SIGKILL: pids %s", fenced, answer)


def _kill(group: WorkerGroup, workers: frozenset[str]) -> dict[Any, str]:
    """SIGKILL through the node agents; the references resolve once the processes are gone."""
    refs = {ref: worker for worker in sorted(workers) if (ref := group.fence(worker)) is not None}
    if refs:
        _log.warning("fenced %s", ", ".join(refs.values()))
    return refs

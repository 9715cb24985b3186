"""Sets the memory Tier up for each World: how much of it there is, where replicas go, and what each rank is told.

The policies decide (memory_policy, replica_policy); here their facts are gathered and what they chose is said, once for
each change. What Keepers hold is not seen here.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from orchestrator.decisions import Stop
from orchestrator.exit_codes import ExitCode
from orchestrator.memory_policy import MemoryChoice, MemoryFacts, decide_memory
from orchestrator.node_watcher import NodeView
from orchestrator.recorder import Recorder
from orchestrator.replica_policy import assign_peers
from storage.config import MemoryConfig
from storage.keeper_protocol import KeeperGreeting, TransportAddress
from workers.contract import Member, MemorySpec, OrderKind

__all__ = ["MemorySetup"]

_log = logging.getLogger(__name__)
_SETTLED_S = 5.0
_NUMBER = re.compile(r"\d+")


class Crew(Protocol):
    """What this file needs of KeeperCrew."""

    @property
    def transport_key(self) -> bytes: ...

    def handles(self) -> Mapping[str, Any]: ...

    def greetings(self) -> Mapping[str, KeeperGreeting]: ...

    def memory_errors(self) -> Mapping[str, str]: ...

    def redirect(self, node_id: str, lost: TransportAddress, address: TransportAddress) -> None: ...


class MemorySetup:
    """One per driver; `arrange` comes before every Attempt."""

    def __init__(
        self,
        config: MemoryConfig,
        crew: Crew,
        recorder: Recorder,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._crew = crew
        self._recorder = recorder
        self._choice = MemoryChoice(mode="off", reason="no World yet")
        self._peers: dict[str, str | None] = {}
        self._said: tuple[object, ...] | None = None
        self._has_begun = False
        self._monotonic = monotonic
        # By node, without the numbers in it: the same trouble of a later step is no new one.
        self._troubles: dict[str, tuple[str, float]] = {}  # and since when
        self._said_errors: dict[str, str] = {}
        self._domains: dict[str, str | None] = {}
        self._leaving: frozenset[str] = frozenset()
        self._budgets: dict[str, int] = {}  # of every Keeper that ever was
        self._told: dict[str, TransportAddress] = {}  # by member node: where its ranks were told that replicas go
        self._targets: dict[str, TransportAddress] = {}  # and where they go now
        # By member node: its Keeper, which would forget it with its life, and where that was told to send instead.
        self._redirected: dict[str, tuple[TransportAddress, TransportAddress]] = {}

    def arrange(
        self,
        members: Sequence[Member],
        *,
        nodes: Mapping[str, NodeView],
        leaving: Collection[str],
        state_bytes: int | None,
    ) -> Stop | None:
        """For a World of ``members`` among the living ``nodes``. A Stop where what was insisted on does not fit the
        first of them: a run that trains is not ended because fewer nodes are left for it."""
        if self._config.mode == "off":
            return None
        greetings = {node: one for node, one in self._crew.greetings().items() if node in nodes}
        domains = {
            node: nodes[node].labels.get(self._config.domain_label)
            for node, greeting in greetings.items()
            if greeting.address is not None
        }
        ranks = Counter(member.node_id for member in members)
        # A member's Keeper may have died just now: its successor on that node has as much to give.
        self._budgets |= {node: greeting.budget_bytes for node, greeting in greetings.items()}
        peers = assign_peers(domains, ranks, leaving=leaving)
        facts = MemoryFacts(
            state_bytes=state_bytes,
            ranks=ranks,
            budgets={node: self._budgets[node] for node in {*ranks, *greetings} if node in self._budgets},
            peers=peers,
        )
        self._choice = decide_memory(self._config, facts)
        self._peers = peers if self._choice.mode == "replicated" else dict.fromkeys(ranks)
        addresses = {node: greeting.address for node, greeting in greetings.items() if greeting.address is not None}
        self._domains, self._leaving = domains, frozenset(leaving)
        self._told = {node: addresses[peer] for node, peer in self._peers.items() if peer in addresses}
        self._targets, self._redirected = dict(self._told), {}
        self._say()
        is_first, self._has_begun = not self._has_begun, True
        if self._config.mode == "on" and not self._choice.fits and is_first:
            text = f"checkpoint.memory.mode is on, but {self._choice.reason}; auto goes on with what fits"
            return Stop(exit_code=ExitCode.CONFIG_ERROR, reason=text)
        return None

    def spec(self, node_id: str) -> MemorySpec | None:
        """What a rank on ``node_id`` is told. None: it takes no generations."""
        if self._choice.mode == "off":
            return None
        # A peer's Keeper that has died meanwhile too: without a peer its ranks would take their steps for safe alone.
        return MemorySpec(peer=self._told.get(node_id), key=self._crew.transport_key)

    def leave_kind(self, members: Sequence[Member], draining: Collection[str]) -> OrderKind:
        """How a World that regroups at once is to end: PART where what each member keeps in memory can be expected to
        be there for the next."""
        nodes = {member.node_id for member in members}
        going = nodes & set(draining)
        has_worked = self._recorder.safe_step_this_attempt >= 0
        if self._choice.mode == "off" or not has_worked or not nodes <= set(self._crew.handles()):
            return OrderKind.LEAVE
        if going and (self._choice.mode == "own-only" or going & self._crew.memory_errors().keys()):
            return OrderKind.LEAVE  # what the node keeps goes with it
        return OrderKind.PART

    def follow_keepers(self) -> None:
        """Where a Keeper that takes replicas has died, have them sent to its successor, or to another one."""
        living = {node: one.address for node, one in self._crew.greetings().items() if one.address is not None}
        lost = [node for node, target in self._targets.items() if living.get(target.node_id) != target]
        domains = {node: self._domains.get(node) for node in living}
        others = assign_peers(domains, self._targets, leaving=self._leaving) if lost else {}
        for node in lost:
            target, peer = living.get(self._targets[node].node_id), others[node]
            if target is None and peer is not None:
                target = living[peer]
            if target is not None:
                self._targets[node] = target
                _log.info("memory: replicas of node %s go to node %s now", node[:12], target.node_id[:12])
        for node, target in self._targets.items():
            keeper = living.get(node)
            if keeper is None or target == self._told[node] or self._redirected.get(node) == (keeper, target):
                continue
            self._redirected[node] = (keeper, target)
            self._crew.redirect(node, self._told[node], target)

    def note_errors(self) -> None:
        """Say once what keeps Keepers from replicating; each change again, once it has stayed for a while: what a lost
        node leaves unsent is part of its loss."""
        if self._config.mode == "off":
            return
        errors = {node: (_NUMBER.sub("#", reason), reason) for node, reason in self._crew.memory_errors().items()}
        now = self._monotonic()
        for node, (kind, reason) in errors.items():
            known, since = self._troubles.get(node, ("", now))
            self._troubles[node] = (kind, since if kind == known else now)
            if self._said_errors.get(node) != kind and now - self._troubles[node][1] >= _SETTLED_S:
                _log.warning("memory: node %s: %s", node[:12], reason)
                self._recorder.emit("memory_degraded", node=node, reason=reason)
                self._said_errors[node] = kind
        for gone in (self._troubles.keys() | self._said_errors.keys()) - errors.keys():
            self._troubles.pop(gone, None)
            self._said_errors.pop(gone, None)

    def _say(self) -> None:
        choice = self._choice
        peers = {node: peer for node, peer in sorted(self._peers.items()) if peer is not None}
        said = (choice.mode, choice.need_bytes, choice.have_bytes, tuple(peers.items()))
        if said == self._said:
            return
        self._said = said
        log = _log.debug if choice.fits else _log.warning  # it is said by its event
        log("memory tier: %s: %s", choice.mode, choice.reason)
        self._recorder.emit(
            "memory_tier",
            mode=choice.mode,
            need_bytes=choice.need_bytes,
            have_bytes=choice.have_bytes,
            peers=peers,
            reason=choice.reason,
        )

"""Whether the memory Tier fits the nodes of a World: with replicas, with each rank's own Snapshots alone, or not. Pure.

Counts what is held at most: per rank one generation that is safe, one that is sealed and one that is being written, and
as many replicas of them at the peer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from storage.config import MemoryConfig

__all__ = ["GENERATIONS", "MemoryChoice", "MemoryFacts", "MemoryMode", "decide_memory"]

GENERATIONS: Final = 3
_SPARE_SHARE: Final = 1 / 64  # headers, indexes, and shards that do not divide evenly
_SPARE_BYTES: Final = 1 << 20

MemoryMode = Literal["replicated", "own-only", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """``state_bytes``: of the whole training state, None while nobody knows. ``ranks``: how many each member node has.

    ``budgets``: what each Keeper may hold in memory; ``peers``: where each member node's replicas go.
    """

    state_bytes: int | None
    ranks: Mapping[str, int]
    budgets: Mapping[str, int]
    peers: Mapping[str, str | None]

    @property
    def world_size(self) -> int:
        return sum(self.ranks.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryChoice:
    """``need_bytes`` and ``have_bytes``: of the node where it is tightest. ``fits``: what was asked for has room."""

    mode: MemoryMode
    reason: str
    need_bytes: int | None = None
    have_bytes: int | None = None
    fits: bool = True


def decide_memory(config: MemoryConfig, facts: MemoryFacts) -> MemoryChoice:
    """As much of the memory Tier as has room."""
    if config.mode == "off":
        return MemoryChoice(mode="off", reason="checkpoint.memory.mode is off")
    without = sorted(node for node in facts.ranks if not facts.budgets.get(node))
    if without:
        reason = f"the Keeper of node {without[0][:12]} has no memory to give"
        return MemoryChoice(mode="off", reason=reason, have_bytes=0, fits=False)
    alone = _reason_for_none(config, facts)
    if facts.state_bytes is None:
        size = "whether it fits is not known before the first Snapshot"
        return MemoryChoice(mode="own-only" if alone else "replicated", reason=f"{alone}; {size}" if alone else size)
    own_need, own_have = _tightest(facts, with_replicas=False)
    need, have = (own_need, own_have) if alone else _tightest(facts, with_replicas=True)
    if need <= have:
        fit = f"needs {_size(need)} of {_size(have)} on the node where it is tightest"
        mode: MemoryMode = "own-only" if alone else "replicated"
        return MemoryChoice(mode=mode, reason=f"{alone}; {fit}" if alone else fit, need_bytes=need, have_bytes=have)
    short = (
        f"{'Snapshots' if alone else 'Snapshots and replicas'} need {_size(need)} on one node, which may give "
        f"{_size(have)}: checkpoint.memory.max_host_memory is {config.max_host_memory:g}"
    )
    if not alone and own_need <= own_have:
        reason = f"no replicas: {short}"
        return MemoryChoice(mode="own-only", reason=reason, need_bytes=need, have_bytes=have, fits=False)
    return MemoryChoice(mode="off", reason=short, need_bytes=need, have_bytes=have, fits=False)


def _reason_for_none(config: MemoryConfig, facts: MemoryFacts) -> str:
    """Why there are no replicas whatever the room; empty where there are."""
    if not config.replicate:
        return "checkpoint.memory.replicate is false"
    if any(facts.peers.get(node) is None for node in facts.ranks):
        return "there is no other node for replicas"
    return ""


def _tightest(facts: MemoryFacts, *, with_replicas: bool) -> tuple[int, int]:
    """What is needed and what there is on the node that has the least to spare."""
    share = -(-(facts.state_bytes or 0) // max(1, facts.world_size))
    per_rank = GENERATIONS * (share + int(share * _SPARE_SHARE) + _SPARE_BYTES)
    need = {node: count * per_rank for node, count in facts.ranks.items()}
    if with_replicas:
        for node, count in facts.ranks.items():
            peer = facts.peers.get(node)
            if peer is not None:
                need[peer] = need.get(peer, 0) + count * per_rank
    node = min(need, key=lambda node: (facts.budgets.get(node, 0) - need[node], node))
    return need[node], facts.budgets.get(node, 0)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / (1 << 20):.1f} MiB"

"""What the ranks of an Attempt restored and from where, folded into the fields of one event. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from workers.contract import Restored

__all__ = ["restored_fields"]


def restored_fields(restores: Iterable[Restored]) -> dict[str, Any]:
    """``tiers``: bytes that all ranks read, by Tier; ``bound``: the largest that a restored tensor promises."""
    restores = tuple(restores)
    tiers: Counter[str] = Counter()
    for restored in restores:
        tiers.update(restored.bytes_by_tier)
    bound = max((restored.bound for restored in restores if restored.bound is not None), default=None)
    return {
        "tiers": {tier: tiers[tier] for tier in sorted(tiers) if tiers[tier]},
        "bytes": tiers.total(),
        "fidelity": "exact" if bound is None else "bounded",
        "bound": bound,
        "reseeded_ranks": sum(restored.reseeded for restored in restores),
    }

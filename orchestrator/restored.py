"""What the ranks of an Attempt restored and from where, folded into the fields of one event, and that event in words.

Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from orchestrator.event_fields import Event
from orchestrator.report_text import size
from workers.contract import ProofReport, Restored

__all__ = ["restored_fields", "restored_words"]


def restored_fields(restores: Iterable[Restored]) -> dict[str, Any]:
    """``tiers``: bytes that all ranks read, by Tier; ``bound``: the largest that a restored tensor promises.

    ``proof``: of the first rank; all have judged alike. ``side_by_side``: field, saved, restored. ``schedule_steps``:
    how long the LR schedule was and is, there only where the two differ.
    """
    restores = tuple(restores)
    tiers: Counter[str] = Counter()
    for restored in restores:
        tiers.update(restored.bytes_by_tier)
    bound = max((restored.bound for restored in restores if restored.bound is not None), default=None)
    proof = next((restored.proof for restored in restores if restored.proof is not None), None)
    pairs = next((restored.side_by_side for restored in restores if restored.side_by_side), ())
    length = next((restored.schedule_steps for restored in restores if restored.schedule_steps is not None), None)
    return {
        "tiers": {tier: tiers[tier] for tier in sorted(tiers) if tiers[tier]},
        "bytes": tiers.total(),
        "fidelity": "exact" if bound is None else "bounded",
        "bound": bound,
        "reseeded_ranks": sum(restored.reseeded for restored in restores),
        "proof": None if proof is None else _proof_fields(proof),
        "side_by_side": [[pair.name, pair.saved, pair.restored] for pair in pairs],
        **({} if length is None else {"schedule_steps": list(length)}),
    }


def _proof_fields(proof: ProofReport) -> dict[str, Any]:
    return {"skipped": proof.skipped} if proof.skipped is not None else asdict(proof)


def restored_words(event: Event) -> str:
    """E.g. ``3.0 MB from local-disk, bit for bit, the probe's loss is 5.213 again``."""
    tiers = event.get("tiers")
    read = [f"{size(count)} from {tier}" for tier, count in tiers.items()] if isinstance(tiers, dict) else []
    bound = event.get("bound")
    how = f"rounded within {bound:g} of the next update" if isinstance(bound, int | float) else "bit for bit"
    words = f"{' and '.join(read) or 'nothing read'}, {how}{_proof_words(event.get('proof'))}"
    length = event.get("schedule_steps")
    if isinstance(length, list) and len(length) == 2:
        words += f"; the learning rate follows a schedule of {length[1]} steps from here, before it was {length[0]}"
    return words


def _proof_words(proof: object) -> str:
    if not isinstance(proof, Mapping):
        return ""
    if proof.get("skipped") is not None:
        return f", not probed ({proof['skipped']})"
    found, expected = proof.get("found"), proof.get("expected")
    exact = "to the bit" if not proof.get("tolerance") else f"recorded {expected:.6g}"
    return f", the probe's loss is {found:.6g} again ({exact})"

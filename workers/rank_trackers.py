"""State that differs from rank to rank: named, stored and found again under the rank it belongs to.

Its tensors carry the rank in their name, its plain values lie in the rank's own part of the Manifest, so no rank's is
ever taken for another's. Trackers that are equal on all ranks leave a digest there, which tells whether they were.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
import xxhash
from pydantic import JsonValue
from torch.distributed.tensor import DTensor

from storage.manifest import Manifest
from workers.plain_state import NotPlain, to_plain
from workers.state import Tracker

__all__ = [
    "capture_rank_trackers",
    "differing_trackers",
    "plain_digests",
    "rank_tracker_prefix",
    "saved_rank_trackers",
]

_OWN = "trackers"
_DIGESTS = "tracker_digests"


def rank_tracker_prefix(rank: int) -> str:
    """What the names of one rank's own tracker tensors start with."""
    return f"rank_tracker.rank-{rank:05d}."


def capture_rank_trackers(
    trackers: Mapping[str, Tracker], rank: int, tensors: dict[str, torch.Tensor]
) -> dict[str, JsonValue]:
    """The plain state of ``trackers`` for the rank's own part of the Manifest; their tensors go into ``tensors``.

    Raises NotPlain for what cannot be stored, a sharded tensor included: it is no rank's own.
    """
    own: dict[str, torch.Tensor] = {}
    prefix = rank_tracker_prefix(rank)
    plain: dict[str, JsonValue] = {
        name: to_plain(tracker.state_dict(), f"{prefix}{name}", own) for name, tracker in trackers.items()
    }
    for name, tensor in own.items():
        if isinstance(tensor, DTensor):
            raise NotPlain(name, "a tensor that is sharded over the ranks (its tracker belongs in make_trackers)")
    tensors.update(own)
    return {_OWN: plain} if plain else {}


def saved_rank_trackers(manifest: Manifest, rank: int) -> dict[str, JsonValue]:
    """What the Checkpoint holds of ``rank``'s own trackers, by name; empty when it has none."""
    if rank >= len(manifest.rank_states):
        return {}
    saved = manifest.rank_states[rank].get(_OWN)
    return saved if isinstance(saved, dict) else {}


def plain_digests(trackers: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """A digest of the plain state of each tracker, for the rank's own part of the Manifest."""
    if not trackers:
        return {}
    return {
        _DIGESTS: {
            name: xxhash.xxh3_64_hexdigest(json.dumps(plain, sort_keys=True).encode())
            for name, plain in trackers.items()
        }
    }


def differing_trackers(manifest: Manifest) -> dict[str, int]:
    """Trackers whose plain state was not equal on all ranks, each with the first rank that differs from rank 0."""
    found: dict[str, int] = {}
    digests = [state.get(_DIGESTS) for state in manifest.rank_states]
    first = digests[0] if digests else None
    if not isinstance(first, dict):
        return found
    for rank, own in enumerate(digests):
        if isinstance(own, dict):
            for name, digest in first.items():
                if name in own and own[name] != digest:
                    found.setdefault(name, rank)
    return found

"""Fills trackers from a Checkpoint: those that are equal on all ranks, and each rank's own.

A rank's own state comes back to the same rank. A World that has grown gives its new ranks none, one that has shrunk
drops the state of the ranks it no longer has; both are said. What belongs to which rank is `rank_trackers`' to say.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from pydantic import JsonValue

from storage.manifest import Level, Manifest
from workers.plain_state import from_plain, tensor_names, to_plain
from workers.rank_trackers import differing_trackers, rank_tracker_prefix, saved_rank_trackers
from workers.restore_match import section
from workers.snapshot import TRACKER
from workers.state import Tracker, TrainingState
from workers.stored_tensors import StoredTensors

__all__ = ["restore_rank_trackers", "restore_trackers"]


def restore_trackers(
    state: TrainingState, manifest: Manifest, stored: StoredTensors, levels: Collection[Level] | None, rank: int
) -> list[str]:
    """Fill the trackers; returns a line for each that stays fresh because part of it is of another Level, and on rank 0
    for each that was not what it is meant to be, equal on all ranks."""
    saved = section(manifest, "trackers")
    lines = []
    for name, tracker in state.trackers.items():
        if name in saved:
            lines += _filled(tracker, saved[name], f"{TRACKER}{name}", stored, levels)
    if rank == 0:
        lines += [
            f"tracker {name} was not equal on all ranks when it was saved (rank {other} differs): every rank gets that "
            "of rank 0; state of a rank's own belongs in make_rank_trackers"
            for name, other in differing_trackers(manifest).items()
        ]
    return lines


def restore_rank_trackers(
    state: TrainingState,
    manifest: Manifest,
    stored: StoredTensors,
    levels: Collection[Level] | None,
    *,
    rank: int,
    world_size: int,
) -> list[str]:
    """Fill this rank's own trackers from its own state; returns what is to be said."""
    lines = []
    names = ", ".join(sorted(saved_rank_trackers(manifest, 0)))
    if names and rank == 0 and world_size < manifest.world_size:
        gone = range(world_size, manifest.world_size)
        ranks = f"rank {gone[0]} is" if len(gone) == 1 else f"ranks {gone[0]} to {gone[-1]} are"
        lines.append(
            f"rank trackers ({names}) of {ranks} dropped: step {manifest.step} was saved by {manifest.world_size} "
            f"ranks, here are {world_size}"
        )
    if rank >= manifest.world_size:
        if state.rank_trackers:
            lines.append(
                f"rank {rank}: rank trackers ({names}) start fresh: step {manifest.step} was saved by "
                f"{manifest.world_size} ranks"
            )
        return lines
    saved = saved_rank_trackers(manifest, rank)
    for name, tracker in state.rank_trackers.items():
        if name in saved:
            lines += _filled(tracker, saved[name], f"{rank_tracker_prefix(rank)}{name}", stored, levels)
    return lines


def _filled(
    tracker: Tracker, saved: JsonValue, path: str, stored: StoredTensors, levels: Collection[Level] | None
) -> list[str]:
    """Fill one tracker: tensors in the form it has them in now, sharded where they are sharded."""
    names = tensor_names(saved)
    if levels is not None and any(stored.layouts[name].level not in levels for name in names):
        return [f"{path} stays fresh: not all of it is of {', '.join(sorted(levels))}"]
    here: dict[str, torch.Tensor] = {}
    to_plain(tracker.state_dict(), path, here)
    values: dict[str, torch.Tensor] = {}
    for name in names:
        like = here.get(name)
        fits = like is not None and tuple(like.shape) == stored.layouts[name].shape
        values[name] = torch.zeros_like(like) if like is not None and fits else stored.empty(name)
    stored.load(values)
    tracker.load_state_dict(from_plain(saved, values))
    return []

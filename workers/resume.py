"""Puts a Checkpoint back into a training state: model, optimizer, scheduler, scaler, trackers, progress, RNG, in this
order.

The RestorePlan says which Checkpoint; nothing is chosen here. Objects that the loop holds are filled, never replaced.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from pydantic import JsonValue

from storage.dcp_reader import ManifestReader
from storage.disk_source import NearestSource
from storage.errors import ManifestMismatch, StorageError
from storage.manifest import Level, Manifest, Tier
from storage.memory_source import MemoryReach, MemoryShardSource
from storage.object_source import ObjectStoreSource
from storage.object_store import ObjectStore
from storage.restore import read_manifest
from storage.sources import RestorePlan
from workers.models import assert_all_filled
from workers.plain_state import from_plain
from workers.restore_match import Match, compare, restricted, section
from workers.restore_optimizer import restore_optimizer
from workers.restore_trackers import restore_rank_trackers, restore_trackers
from workers.rng import restore_rng, rng_prefix, seed_rng
from workers.schedule import restore_schedule
from workers.snapshot import SCALER, SCHEDULER
from workers.state import Progress, TrainingState
from workers.stored_tensors import StoredTensors

__all__ = ["RestoreReport", "read_manifest", "restore"]

logger = logging.getLogger(__name__)

_LATER_PROGRESS = frozenset({"skipped", "ledger"})  # Checkpoints of older releases do not have it


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """What one rank took from the Checkpoint, and from where. ``reseeded``: it had no RNG state of its own there.

    ``bound``: the largest that a rounded tensor among them promises; None when all are exact. ``shared_state``: the
    plain state as it stands in the Manifest. ``saved_run_steps``: run.steps of the driver that saved it, where known.
    """

    step: int
    bytes_by_tier: Mapping[Tier, int]
    reseeded: bool
    lines: tuple[str, ...]
    bound: float | None = None
    shared_state: Mapping[str, JsonValue] = field(default_factory=dict)
    saved_run_steps: int | None = None

    @property
    def bytes_read(self) -> int:
        return sum(self.bytes_by_tier.values())


def restore(
    state: TrainingState,
    plan: RestorePlan,
    store: ObjectStore | None,
    *,
    rank: int,
    world_size: int,
    seed: int = 0,
    deadline_s: float = 120.0,
    local_directory: Path | None = None,
    reach: MemoryReach | None = None,
) -> RestoreReport:
    """Fill ``state`` from the Checkpoint that ``plan`` names; ``local_directory`` may hold copies of its Shards.

    ``store`` None and ``reach`` are for a plan from memory. Raises ManifestMismatch before anything is changed,
    CorruptCheckpoint, MemoryUnreadable, or StoreUnavailable.
    """
    manifest = read_manifest(plan, store, deadline_s=deadline_s)
    match = compare(state, manifest, rank)
    if not plan.allow_partial:
        match.require_exact(plan.step)
    _require_same_progress(manifest)
    lines = [*_partial_lines(match)]
    if plan.levels is not None:
        match, fresh = restricted(match, manifest, plan.levels)
        lines.append(_fresh_line(fresh, plan, rank))
    with _open_source(plan, manifest, store, local_directory, reach, deadline_s) as source:
        stored = StoredTensors(ManifestReader(manifest, plan.shards, source), manifest)
        stored.load(match.model)
        lines += restore_optimizer(state, manifest, match, stored)
        if SCHEDULER not in match.left_out:
            restore_schedule(state.scheduler, manifest.shared_state[SCHEDULER], match.groups.order)
        if state.scaler is not None and section(manifest, SCALER):
            state.scaler.load_state_dict(from_plain(manifest.shared_state[SCALER], {}))
        lines += restore_trackers(state, manifest, stored, plan.levels, rank)
        lines += restore_rank_trackers(state, manifest, stored, plan.levels, rank=rank, world_size=world_size)
        _restore_progress(state.progress, manifest)
        reseeded = _restore_rng(manifest, stored, rank=rank, seed=seed, lines=lines)
    assert_all_filled(state.model)
    read = source.bytes_by_tier
    lines.append(
        f"rank {rank} of {world_size}: restored step {manifest.step} (saved by {manifest.world_size} ranks), "
        f"{sum(read.values())} of {manifest.stored_bytes} bytes read, source: "
        f"{', '.join(f'{tier} {count}' for tier, count in read.items() if count) or 'none'}"
    )
    for line in lines:
        logger.info("%s", line)
    bound = _warn_of_rounding(manifest, plan.levels, rank)
    return RestoreReport(
        step=manifest.step,
        bytes_by_tier=read,
        reseeded=reseeded,
        lines=tuple(lines),
        bound=bound,
        shared_state=manifest.shared_state,
        saved_run_steps=_run_steps(manifest),
    )


def _run_steps(manifest: Manifest) -> int | None:
    """None for a Checkpoint that no driver saved."""
    value: object = manifest.metadata
    for key in ("config", "run", "steps"):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, int) else None


def _open_source(
    plan: RestorePlan,
    manifest: Manifest,
    store: ObjectStore | None,
    local_directory: Path | None,
    reach: MemoryReach | None,
    deadline_s: float,
) -> NearestSource | MemoryShardSource:
    if plan.memory is not None and reach is not None:
        return MemoryShardSource(plan.memory, plan.source, reach)
    if store is None:
        raise StorageError(f"step {plan.step}: neither a store nor a way into memory to read the plan's Shards from")
    return NearestSource(ObjectStoreSource(store, deadline_s=deadline_s), local_directory, manifest.shards)


def _warn_of_rounding(manifest: Manifest, levels: tuple[Level, ...] | None, rank: int) -> float | None:
    """Say once that this resume is not bit for bit, and by how much; the largest bound of any tensor restored."""
    restored = [layout for layout in manifest.tensors.values() if levels is None or layout.level in levels]
    bounds = [layout.bound for layout in restored if layout.bound is not None]
    if not bounds:
        return None
    if rank == 0:
        logger.warning(
            "resume with fidelity: bounded: %d tensors of step %d were rounded within %g of the next update; "
            "%d blocks could not be and are exact",
            len(bounds),
            manifest.step,
            max(bounds),
            manifest.lossless_fallbacks,
        )
    return max(bounds)


def _partial_lines(match: Match) -> list[str]:
    parts = (("missing", match.missing), ("unexpected", match.unexpected), ("reshaped", match.reshaped))
    return [f"partial restore, {title}, left as it was: {', '.join(names)}" for title, names in parts if names]


def _fresh_line(fresh: tuple[str, ...], plan: RestorePlan, rank: int) -> str:
    """Say loudly, once, that this is no full resume."""
    line = (
        f"resume with {', '.join(plan.levels or ())} ALONE: the optimizer state of {len(fresh)} parameters starts at "
        f"zero at step {plan.step}; expect a bump in the loss"
    )
    if rank == 0:
        logger.warning("%s", line)
    return line


def _require_same_progress(manifest: Manifest) -> None:
    saved = section(manifest, "progress")
    known = {field.name for field in fields(Progress)}
    if known - set(saved) - _LATER_PROGRESS or set(saved) - known:
        raise ManifestMismatch(
            manifest.step,
            missing=tuple(sorted(f"progress.{name}" for name in known - set(saved) - _LATER_PROGRESS)),
            unexpected=tuple(sorted(f"progress.{name}" for name in set(saved) - known)),
        )


def _restore_progress(progress: Progress, manifest: Manifest) -> None:
    """Fill the very object the loop holds: a replaced one would leave it counting from the start."""
    for name, value in section(manifest, "progress").items():
        setattr(progress, name, from_plain(value, {}))


def _restore_rng(manifest: Manifest, stored: StoredTensors, *, rank: int, seed: int, lines: list[str]) -> bool:
    prefix = rng_prefix(rank)
    names = [name for name in stored.layouts if name.startswith(prefix)]
    if not names:
        seed_rng(seed, rank, manifest.step)
        lines.append(f"rank {rank} reseeded: step {manifest.step} holds no random state of this rank")
        return True
    states = {name: stored.empty(name) for name in names}
    stored.load(states)
    unknown = restore_rng(rank, states, seed=seed, step=manifest.step)
    if unknown:
        lines.append(f"rank {rank}: {', '.join(unknown)} reseeded: step {manifest.step} holds no random state of it")
    return False

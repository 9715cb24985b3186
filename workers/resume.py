"""Puts a Checkpoint back into a training state: model, optimizer, scheduler, trackers, progress, RNG, in this order.

The RestorePlan says which Checkpoint; nothing is chosen here. Objects that the loop holds are filled, never replaced.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from storage.dcp_calls import load_tensors
from storage.dcp_reader import ManifestReader
from storage.dcp_writer import named_dtype
from storage.disk_source import NearestSource
from storage.errors import ManifestMismatch, StorageError
from storage.manifest import Level, Manifest, TensorLayout, Tier
from storage.memory_source import MemoryReach, MemoryShardSource
from storage.object_source import ObjectStoreSource
from storage.object_store import ObjectStore
from storage.restore import read_manifest
from storage.sources import RestorePlan
from workers.models import assert_all_filled
from workers.names import named_parameters, optimizer_names
from workers.plain_state import from_plain, tensor_names, to_plain
from workers.restore_match import Match, compare, restricted, saved_groups, section
from workers.rng import restore_rng, rng_prefix, seed_rng
from workers.snapshot import OPTIM, TRACKER
from workers.state import Progress, TrainingState

__all__ = ["RestoreReport", "read_manifest", "restore"]

logger = logging.getLogger(__name__)

# How a step is computed, not what: these follow the machine that resumes, not the one that saved.
_LATER_PROGRESS = frozenset({"skipped", "ledger"})  # Checkpoints of older releases do not have it
_LOCAL_SETTINGS = frozenset({"foreach", "fused", "capturable", "differentiable"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """What one rank took from the Checkpoint, and from where. ``reseeded``: it had no RNG state of its own there.

    ``bound``: the largest that a rounded tensor among them promises; None when all are exact.
    """

    step: int
    bytes_by_tier: Mapping[Tier, int]
    reseeded: bool
    lines: tuple[str, ...]
    bound: float | None = None

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
    match = compare(state, manifest)
    if not plan.allow_partial:
        match.require_exact(plan.step)
        _require_same_groups(state, manifest, plan.step)
    _require_same_progress(manifest)
    lines = [*_partial_lines(match)]
    if plan.levels is not None:
        match, fresh = restricted(match, manifest, plan.levels)
        lines.append(_fresh_line(fresh, plan, rank))
    with _open_source(plan, manifest, store, local_directory, reach, deadline_s) as source:
        loader = _Loader(ManifestReader(manifest, plan.shards, source), manifest)
        loader.load(match.model)
        lines.append(_restore_optimizer(state, manifest, match, loader))
        _restore_scheduler(state, manifest)
        lines += _restore_trackers(state, manifest, loader, plan.levels)
        _restore_progress(state.progress, manifest)
        reseeded = _restore_rng(manifest, loader, rank=rank, seed=seed, lines=lines)
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
    return RestoreReport(step=manifest.step, bytes_by_tier=read, reseeded=reseeded, lines=tuple(lines), bound=bound)


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


class _Loader:
    """Fills tensors by stored name, this rank's parts only."""

    def __init__(self, reader: ManifestReader, manifest: Manifest) -> None:
        self._reader = reader
        self.layouts: Mapping[str, TensorLayout] = manifest.tensors

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if tensors:
            planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            load_tensors(tensors, self._reader, planner)

    def empty(self, name: str) -> torch.Tensor:
        """A whole tensor on the CPU as the Checkpoint describes ``name``."""
        layout = self.layouts[name]
        return torch.zeros(layout.shape, dtype=named_dtype(layout.dtype), device="cpu")


def _partial_lines(match: Match) -> list[str]:
    parts = (("missing", match.missing), ("unexpected", match.unexpected), ("reshaped", match.reshaped))
    return [f"partial restore, {title}, left as it was: {', '.join(names)}" for title, names in parts if names]


def _require_same_groups(state: TrainingState, manifest: Manifest, step: int) -> None:
    """Each param group must lie inside one saved group, or its settings would have no single source."""
    groups = saved_groups(manifest)
    for index, names in enumerate(optimizer_names(state.model, state.optimizer)):
        if names and not any(set(names) <= set(group["names"]) for group in groups):
            raise ManifestMismatch(step, reshaped=(f"{OPTIM}group-{index} (its parameters were in several groups)",))


def _restore_optimizer(state: TrainingState, manifest: Manifest, match: Match, loader: _Loader) -> str:
    """Make state tensors straight from the Checkpoint: no dummy step, and frozen parameters like all others."""
    optimizer = state.optimizer
    parameters = dict(named_parameters(state.model))
    plain = section(manifest, "optimizer").get("state")
    targets: dict[str, torch.Tensor] = {}
    groups = list(zip(optimizer.param_groups, optimizer_names(state.model, optimizer), strict=True))
    if match.is_exact:
        optimizer.state.clear()
    for group, names in groups:
        on_device = bool(group.get("capturable") or group.get("fused"))
        for name in names:
            if name not in match.optimizer:
                continue
            parameter = parameters[name]
            entries: dict[str, Any] = {}
            for key, layout in match.optimizer[name].items():
                entries[key] = _state_tensor(parameter, key, layout, on_device)
                targets[f"{OPTIM}{name}.{key}"] = entries[key]
            if isinstance(plain, dict) and name in plain:
                entries.update(from_plain(plain[name], {}))
            optimizer.state[parameter] = entries
    loader.load(targets)
    for group, names in groups:
        _restore_settings(group, names, manifest)
    saved = section(manifest, "optimizer").get("num_tensors")
    return f"optimizer state tensors: saved {saved}, restored {len(targets)}"


def _state_tensor(parameter: torch.Tensor, key: str, layout: TensorLayout, on_device: bool) -> torch.Tensor:
    dtype = named_dtype(layout.dtype)
    if key == "step" or layout.shape != tuple(parameter.shape):
        return torch.zeros(layout.shape, dtype=dtype, device=parameter.device if on_device else "cpu")
    return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)


def _restore_settings(group: dict[str, Any], names: list[str], manifest: Manifest) -> None:
    for saved in saved_groups(manifest):
        if names and set(names) & set(saved["names"]):
            for key, value in from_plain(saved["settings"], {}).items():
                if key in _LOCAL_SETTINGS:
                    continue
                if isinstance(group.get(key), torch.Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = value
            return


def _restore_scheduler(state: TrainingState, manifest: Manifest) -> None:
    state.scheduler.load_state_dict(from_plain(manifest.shared_state["scheduler"], {}))


def _fresh_line(fresh: tuple[str, ...], plan: RestorePlan, rank: int) -> str:
    """Say loudly, once, that this is no full resume."""
    line = (
        f"resume with {', '.join(plan.levels or ())} ALONE: the optimizer state of {len(fresh)} parameters starts at "
        f"zero at step {plan.step}; expect a bump in the loss"
    )
    if rank == 0:
        logger.warning("%s", line)
    return line


def _restore_trackers(
    state: TrainingState, manifest: Manifest, loader: _Loader, levels: tuple[Level, ...] | None
) -> list[str]:
    """Fill the trackers; returns a line for each that stays fresh because part of it is of another Level."""
    saved = section(manifest, "trackers")
    lines: list[str] = []
    for name, tracker in state.trackers.items():
        if name not in saved:
            continue
        here: dict[str, torch.Tensor] = {}
        to_plain(tracker.state_dict(), f"{TRACKER}{name}", here)
        values: dict[str, torch.Tensor] = {}
        if levels is not None and any(loader.layouts[one].level not in levels for one in tensor_names(saved[name])):
            lines.append(f"tracker {name} stays fresh: not all of it is of {', '.join(levels)}")
            continue
        for tensor_name in tensor_names(saved[name]):
            like = here.get(tensor_name)
            fits = like is not None and tuple(like.shape) == loader.layouts[tensor_name].shape
            values[tensor_name] = torch.zeros_like(like) if like is not None and fits else loader.empty(tensor_name)
        loader.load(values)
        tracker.load_state_dict(from_plain(saved[name], values))
    return lines


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


def _restore_rng(manifest: Manifest, loader: _Loader, *, rank: int, seed: int, lines: list[str]) -> bool:
    prefix = rng_prefix(rank)
    names = [name for name in loader.layouts if name.startswith(prefix)]
    if not names:
        seed_rng(seed, rank, manifest.step)
        lines.append(f"rank {rank} reseeded: step {manifest.step} holds no random state of this rank")
        return True
    states = {name: loader.empty(name) for name in names}
    loader.load(states)
    unknown = restore_rng(rank, states)
    if unknown:
        lines.append(f"rank {rank}: no random state was saved for {', '.join(unknown)}")
    return False

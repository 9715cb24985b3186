"""Builds the TrainingState of one rank for an Attempt: from the RestorePlan, or from scratch.

Order: model on meta, sharding, memory, optimizer, scheduler, trackers, then the restore that fills them all. Reading
and checking a Checkpoint is `resume`'s work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from storage.memory_source import MemoryReach
from storage.open_store import open_store
from storage.spool_files import spool_directory
from workers.contract import AttemptSpec, Restored
from workers.dataset_mix import TokenRows
from workers.errors import LoopMisused
from workers.invariance import begin_process, require_invariant_optimizer, require_same_kernels
from workers.loss_scaling import build_scaler
from workers.models import ModelTemplate, instantiate, materialize
from workers.optim import build_optimizer, build_scheduler, warn_of_new_length
from workers.parallelize import parallelize
from workers.probe import ProbeRows
from workers.resume import RestoreReport, restore
from workers.rng import seed_rng
from workers.settings import WorkerSettings
from workers.snapshot import capture
from workers.staging import Stager
from workers.state import Tracker, TrainingState

__all__ = ["Makers", "WarmParts", "load_state"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Makers:
    """What a user's loop may make itself; None stands for the built-in. ``model`` is called on the meta device.

    ``rank_trackers`` are each rank's own. ``scaler`` None: the built-in's where the settings ask for one.
    """

    model: Callable[[], nn.Module] | None = None
    optimizer: Callable[[nn.Module], Optimizer] | None = None
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    trackers: Callable[[nn.Module], Mapping[str, Tracker]] | None = None
    rank_trackers: Callable[[nn.Module], Mapping[str, Tracker]] | None = None
    scaler: Callable[[], GradScaler] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmParts:
    """What a worker process keeps between Attempts. ``template`` is None where the loop makes its own model,
    ``validation`` when there is nothing to evaluate on."""

    device: torch.device
    template: ModelTemplate | None
    dataset: TokenRows
    validation: TokenRows | None
    stager: Stager
    probe_rows: ProbeRows = field(default_factory=ProbeRows)


def load_state(
    makers: Makers,
    *,
    settings: WorkerSettings,
    spec: AttemptSpec,
    parts: WarmParts,
    own_trackers: Mapping[str, Tracker],
    mesh: DeviceMesh,
    on_restored: Callable[[Restored, RestoreReport], None] = lambda *_: None,
) -> TrainingState:
    """The state with which step ``progress.step + 1`` begins."""
    if settings.reproducible:
        begin_process(parts.device)
        require_same_kernels(spec.rank, parts.device)
    model = _meta_model(makers, parts.template)
    parallelize(model, settings.model, mesh, reproducible=settings.reproducible)
    materialize(model, parts.device, settings.seed, init_weights=spec.restore is None or spec.restore.allow_partial)
    optimizer = build_optimizer(model, settings.optim) if makers.optimizer is None else makers.optimizer(model)
    if settings.reproducible:
        require_invariant_optimizer(optimizer)
    if makers.scheduler is None:
        scheduler: LRScheduler = build_scheduler(optimizer, settings.optim, settings.total_steps)
    else:
        scheduler = makers.scheduler(optimizer)
    trackers = dict(own_trackers)
    for name, tracker in ({} if makers.trackers is None else makers.trackers(model)).items():
        if name in trackers:
            raise ValueError(f"a tracker may not be called {name!r}: the name is taken")
        trackers[name] = tracker
    scaler = build_scaler(settings.optim, settings.model, parts.device) if makers.scaler is None else makers.scaler()
    state = TrainingState(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        trackers=trackers,
        rank_trackers={} if makers.rank_trackers is None else dict(makers.rank_trackers(model)),
        scaler=scaler,
    )
    # What cannot be stored is refused now, by name, and not at the first save.
    capture(state, rank=spec.rank, world_size=spec.world.size, rng=False)
    if spec.restore is None:
        seed_rng(settings.seed, spec.rank, 0)
        return state
    # A step in memory is there while the store is away, and is not to wait for its first connection.
    is_in_memory = spec.restore.memory is not None
    began = time.monotonic()
    report = restore(
        state,
        spec.restore,
        None if is_in_memory else open_store(spec.restore.root_url, settings.checkpoint.store),
        rank=spec.rank,
        world_size=spec.world.size,
        seed=settings.seed,
        local_directory=_local_directory(settings, spec),
        reach=_reach(settings, spec),
    )
    on_restored(
        Restored(
            attempt=spec.attempt,
            step=report.step,
            bytes_by_tier=dict(report.bytes_by_tier),
            bound=report.bound,
            reseeded=report.reseeded,
            load_s=time.monotonic() - began,
            schedule_steps=None if makers.scheduler is not None else _new_length(settings, spec, report),
        ),
        report,
    )
    return state


def _new_length(settings: WorkerSettings, spec: AttemptSpec, report: RestoreReport) -> tuple[int, int] | None:
    saved, now = report.saved_run_steps, settings.total_steps
    return warn_of_new_length(saved, settings.optim, now, step=report.step, rank=spec.rank)


def _local_directory(settings: WorkerSettings, spec: AttemptSpec) -> Path | None:
    """Where the Keeper of this node may have left copies of Shards."""
    local_disk = settings.checkpoint.local_disk
    if local_disk.mode == "off":
        return None
    return spool_directory(local_disk, settings.run_id, spec.world.members[spec.rank].node_id)


def _reach(settings: WorkerSettings, spec: AttemptSpec) -> MemoryReach | None:
    if spec.restore is None or spec.restore.memory is None:
        return None
    node_id = spec.world.members[spec.rank].node_id
    return MemoryReach(node_id=node_id, run_id=settings.run_id, key=spec.restore.memory.key)


def _meta_model(makers: Makers, template: ModelTemplate | None) -> nn.Module:
    if makers.model is not None:
        with torch.device("meta"):
            return makers.model()
    if template is None:
        raise LoopMisused("there is no model: give session.build a make_model, or set model.config")
    return instantiate(template)

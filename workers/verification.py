"""Loads a Checkpoint in one process on the CPU, without groups, and takes its probe again: it can be resumed then.

Only for the built-in model and optimizer: nobody else's can be made outside of their loop. Nothing is written here, and
nothing is decided of what is found wrong.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from storage.errors import ManifestMismatch, ProofFailed, StorageError
from storage.object_store import ObjectStore
from storage.restore import read_manifest
from storage.sources import RestorePlan
from workers.data_errors import DataError
from workers.dataset_mix import TokenRows, open_rows
from workers.invariance import begin_process
from workers.load_finding import LoadFinding
from workers.loss import mean_token_loss
from workers.loss_scaling import build_scaler
from workers.models import ModelTemplate, instantiate, materialize, state_bytes
from workers.optim import build_optimizer, build_scheduler
from workers.probe import ProbeRows, environment_of, probe_loss
from workers.proof import agrees, read_record, tolerance_of
from workers.rank_trackers import saved_rank_trackers
from workers.restore_match import section
from workers.resume import RestoreReport, restore
from workers.settings import WorkerSettings
from workers.side_by_side import ResumeDiffers, Saved, differences, side_by_side
from workers.state import TrainingState

__all__ = ["LoadChecker"]

_CPU = torch.device("cpu")
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(slots=True)
class _AnyTracker:
    """Stands for a tracker of any kind: that its state can be read is all that is asked of it."""

    state: dict[str, Any] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


class LoadChecker:
    """One process's; the model's template and the data stay warm from one Checkpoint to the next."""

    def __init__(self, settings: WorkerSettings) -> None:
        torch.set_num_threads(1)
        if settings.reproducible:
            begin_process(_CPU)
        self._settings = settings
        self._template = ModelTemplate.build(settings.model)
        self._rows: TokenRows | None = None
        self._probe_rows = ProbeRows()

    @property
    def state_bytes(self) -> int:
        """What the whole state takes of memory."""
        return state_bytes(self._template.model)

    def check(self, plan: RestorePlan, store: ObjectStore) -> LoadFinding:
        """Load what ``plan`` names. Raises CorruptCheckpoint, ResumeDiffers, or an error of the store.

        A Checkpoint of another model than the settings' is not loaded, which says nothing against it.
        """
        try:
            return self._checked(plan, store)
        except ResumeDiffers:
            raise
        except ManifestMismatch as error:
            return LoadFinding(is_loaded=False, note=f"not loaded: {error}")
        finally:
            gc.collect()

    def _checked(self, plan: RestorePlan, store: ObjectStore) -> LoadFinding:
        state, manifest = self._empty_state(), read_manifest(plan, store)
        state.trackers.update({name: _AnyTracker() for name in section(manifest, "trackers")})
        state.rank_trackers.update({name: _AnyTracker() for name in saved_rank_trackers(manifest, 0)})
        report = restore(state, plan, store, rank=0, world_size=1)
        saved = Saved(step=report.step, shared_state=report.shared_state, is_built_in=True)
        found = differences(side_by_side(saved, state, position=state.progress.position))
        if found:
            raise ResumeDiffers(report.step, found)
        return self._probed(state, plan, report)

    def _empty_state(self) -> TrainingState:
        settings = self._settings
        model = instantiate(self._template)
        materialize(model, _CPU, settings.seed, init_weights=False)
        optimizer = build_optimizer(model, settings.optim)
        return TrainingState(
            model=model,
            optimizer=optimizer,
            scheduler=build_scheduler(optimizer, settings.optim, settings.total_steps),
            scaler=build_scaler(settings.optim, settings.model, _CPU),
        )

    def _probed(self, state: TrainingState, plan: RestorePlan, report: RestoreReport) -> LoadFinding:
        record = read_record(report.shared_state)
        if record.skipped is not None:
            return LoadFinding(note=f"loaded, but it has no probe: {record.skipped}")
        try:
            batch = self._probe_rows.batch(record.rows, self._open_rows().rows)
        except (DataError, StorageError) as error:  # of the data's store, which says nothing of the Checkpoint's
            return LoadFinding(note=f"loaded, but its probe could not be read: {error}")
        if batch.tokens_digest != record.tokens_digest:
            return LoadFinding(note="loaded, but the rows of its probe hold other tokens now")
        model = self._settings.model
        _cast(state.model, model.compute_dtype)
        loss = probe_loss(state.model, mean_token_loss, batch.leaf, rank=0, is_compiled=False)
        environment = environment_of(_CPU, compute_dtype=model.compute_dtype, is_causal_lm=True, wrapping="none")
        tolerance = tolerance_of(record, environment)
        if not agrees(record.loss, loss, tolerance):
            raise ProofFailed(
                plan.step,
                plan.manifest_key,
                f"loaded in one process, its probe gives the loss {loss!r}; {record.loss!r} was recorded by "
                f"{record.world_size} ranks, expected again within {tolerance:.0%}: these are not the weights that "
                "were saved",
            )
        return LoadFinding(loss=loss, expected=record.loss)

    def _open_rows(self) -> TokenRows:
        if self._rows is None:
            self._rows = open_rows(self._settings.data, "train", self._settings.checkpoint.store)
        return self._rows


def _cast(model: nn.Module, compute_dtype: str) -> None:
    """What FSDP2 computes with: parameters in the lower precision, buffers as they are."""
    dtype = _DTYPES.get(compute_dtype)
    if dtype is None:
        return
    for parameter in model.parameters():
        if parameter.ndim:
            parameter.data = parameter.data.to(dtype)

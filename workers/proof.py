"""The proof of resume: a probe's loss in every Checkpoint, and the same probe again after the load, before any step.

All ranks take part with the same batch and judge all ranks' losses alike, so they go on, or fail, together. A step in
memory has no probe: its digests, taken when it was sealed, say that these are the bytes.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from storage.errors import ProofFailed
from storage.sources import RestorePlan
from workers.contract import AttemptSpec, ProofReport
from workers.data_errors import DataError
from workers.data_patience import DataPatience
from workers.evaluation import move_leaf
from workers.loading import WarmParts
from workers.loss import LossOf, mean_token_loss
from workers.probe import ProbeBatch, environment_of, probe_loss, probe_rows
from workers.settings import WorkerSettings
from workers.snapshot import Capture
from workers.state import TrainingState

__all__ = [
    "PROOF",
    "TOLERANCE",
    "Proof",
    "ProofRecord",
    "agrees",
    "attach",
    "read_record",
    "tolerance_of",
]

_log = logging.getLogger(__name__)

PROOF: Final = "proof"
"""Its place in the plain state that all ranks share."""
TOLERANCE: Final = 0.01
"""Relative, where another machine, device or version computes; 0 where nothing but the weights decides the bits."""
_FLOOR: Final = 0.01  # below it a loss is compared as if it were this large: what is nearly 0 has no relative size


class ProofRecord(BaseModel):
    """What a Checkpoint says of its probe. ``skipped``: why it has none; ``seconds``: what it took, not stored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    version: int = 1
    loss: float = math.nan
    rows: tuple[int, ...] = Field((), max_length=1 << 16)
    tokens_digest: str = ""
    world_size: int = 0
    environment: dict[str, str] = {}
    seconds: float = 0.0
    skipped: str | None = None

    def as_plain(self) -> dict[str, JsonValue]:
        """As JSON that has no word for infinity: a loss is its shortest exact text. The same state gives the same JSON:
        how long it took is left out."""
        plain: dict[str, JsonValue] = self.model_dump(mode="json", exclude_none=True, exclude={"seconds"})
        return plain | {"loss": repr(self.loss)}


def read_record(shared_state: Mapping[str, JsonValue]) -> ProofRecord:
    """The record in a Checkpoint's shared state; without a loss, and saying why, where there is none to be had."""
    value = shared_state.get(PROOF)
    if value is None:
        return ProofRecord(skipped="it was saved without one")
    try:
        record = ProofRecord.model_validate(value)
    except ValidationError as error:
        return ProofRecord(skipped=f"its record cannot be read: {error.error_count()} problems")
    if record.version != 1:
        return ProofRecord(skipped=f"its record is of version {record.version}; this release reads version 1")
    return record


def tolerance_of(record: ProofRecord, environment: Mapping[str, str]) -> float:
    is_same = record.environment == dict(environment) and record.environment.get("device") == "cpu"
    return 0.0 if is_same else TOLERANCE


def agrees(expected: float, found: float, tolerance: float) -> bool:
    if math.isnan(expected) or math.isnan(found):
        return math.isnan(expected) and math.isnan(found)
    if expected == found:
        return True
    is_finite = math.isfinite(found) and math.isfinite(expected)
    return is_finite and abs(found - expected) <= tolerance * max(abs(expected), _FLOOR)


class Proof:
    """One rank's part in one Attempt. ``loss`` None: there is no probe, as nobody says how this model's loss is had."""

    def __init__(
        self,
        settings: WorkerSettings,
        spec: AttemptSpec,
        parts: WarmParts,
        *,
        loss: LossOf | None,
        is_causal_lm: bool,
    ) -> None:
        self._settings, self._spec, self._parts = settings, spec, parts
        self._loss, self._is_causal_lm = loss, is_causal_lm
        self._patience: DataPatience | None = None
        self._batch: ProbeBatch | None = None
        self._is_on = settings.checkpoint.proof and loss is not None
        if settings.checkpoint.proof and loss is None and spec.rank == 0 and not parts.probe_rows.is_lack_told:
            parts.probe_rows.is_lack_told = True
            _log.warning(
                "no probe goes into Checkpoints: the model is the loop's own, and session.build was given no loss; "
                "give it loss=, a function (model, leaf) that returns the mean loss"
            )

    @classmethod
    def of(
        cls,
        settings: WorkerSettings,
        spec: AttemptSpec,
        parts: WarmParts,
        *,
        loss: LossOf | None,
        has_own_model: bool,
    ) -> Proof:
        """For a loop that gave `session.build` this ``loss``, or none, and a model of its own or not."""
        is_ours = loss is None and not has_own_model
        return cls(settings, spec, parts, loss=mean_token_loss if is_ours else loss, is_causal_lm=not has_own_model)

    def prepare(self, patience: DataPatience | None, *, is_from_memory: bool = False) -> None:
        """Before the first step. Where the step comes from memory no probe is taken now, and recovery does not wait for
        the batch: `ready` reads it."""
        self._patience = patience
        if not is_from_memory:
            self.ready()

    def ready(self) -> None:
        """Read the batch, where that was not done, while the store of the data is needed anyway: a save must not have
        to wait for it."""
        if self._is_on and self._batch is None:
            data = self._settings.data
            ids = probe_rows(self._parts.dataset, seed=self._settings.seed, count=data.micro_batch)
            self._batch = self._read(ids)

    def take(self, state: TrainingState, step: int, *, is_pressed: bool) -> ProofRecord | None:
        """At a save to the store, all ranks. None: no probe is wanted. ``is_pressed``: a deadline leaves no time."""
        if not self._is_on:
            return None
        if is_pressed:
            _log.warning("rank %d: step %d is saved without a probe: a deadline presses", self._spec.rank, step)
            return ProofRecord(skipped="it was saved under a deadline")
        began = time.monotonic()
        self.ready()
        assert self._batch is not None  # read by now
        loss = self._measure(state, self._batch)
        record = ProofRecord(
            loss=loss,
            rows=tuple(self._batch.leaf.sample_ids.tolist()),
            tokens_digest=self._batch.tokens_digest,
            world_size=self._spec.world.size,
            environment=self._environment(),
            seconds=round(time.monotonic() - began, 6),
        )
        _log.info("rank %d: step %d: probe loss %r in %.3f s", self._spec.rank, step, loss, record.seconds)
        return record

    def confirm(
        self,
        state: TrainingState,
        plan: RestorePlan,
        shared_state: Mapping[str, JsonValue],
        start_sum: Callable[[torch.Tensor], dist.Work],
    ) -> ProofReport:
        """After the load, before the first step, all ranks. Raises ProofFailed on all of them alike."""
        record = read_record(shared_state)
        skipped = self._why_not(record, plan)
        batch = None
        if skipped is None:
            skipped, batch = self._batch_of(record)
        if batch is None:
            _log.info("rank %d: step %d is not probed: %s", self._spec.rank, plan.step, skipped)
            return ProofReport(skipped=skipped)
        began = time.monotonic()
        found = self._of_all_ranks(self._measure(state, batch), start_sum)
        tolerance = tolerance_of(record, self._environment())
        bad = {rank: loss for rank, loss in enumerate(found) if not agrees(record.loss, loss, tolerance)}
        if bad:
            raise ProofFailed(plan.step, plan.manifest_key or plan.source.stem, self._complaint(record, bad, tolerance))
        return ProofReport(
            expected=record.loss,
            found=found[self._spec.rank],
            tolerance=tolerance,
            seconds=time.monotonic() - began,
        )

    def _why_not(self, record: ProofRecord, plan: RestorePlan) -> str | None:
        if plan.memory is not None:
            return "the step comes from memory, where digests prove it"
        if plan.allow_partial:
            return "not all of the Checkpoint was loaded"
        if not self._settings.checkpoint.proof:
            return "checkpoint.proof is off"
        if self._loss is None:
            return "session.build was given no loss"
        return record.skipped

    def _batch_of(self, record: ProofRecord) -> tuple[str | None, ProbeBatch | None]:
        """The recorded batch, or why it cannot be had."""
        data, num_rows = self._settings.data, self._parts.dataset.num_rows
        may_differ = data.allow_changed or self._spec.data_override
        if not record.rows or max(record.rows) >= num_rows or min(record.rows) < 0:
            reason = f"its rows are not among the {num_rows} of this data"
        else:
            batch = self._read(record.rows)
            if batch.tokens_digest == record.tokens_digest:
                return None, batch
            reason = "its rows hold other tokens now"
        if not may_differ:
            raise DataError(
                f"the probe of the Checkpoint cannot be taken again: {reason}. The data was changed under an unchanged "
                "card; put back what it was, or allow it with data.allow_changed"
            )
        return f"the data was changed, which is allowed: {reason}", None

    def _read(self, ids: tuple[int, ...]) -> ProbeBatch:
        dataset, patience = self._parts.dataset, self._patience
        if patience is None:
            return self._parts.probe_rows.batch(ids, dataset.rows)
        return self._parts.probe_rows.batch(ids, lambda wanted: patience.call(partial(dataset.rows, wanted)))

    def _measure(self, state: TrainingState, batch: ProbeBatch) -> float:
        assert self._loss is not None  # asked for before
        leaf = move_leaf(batch.leaf, self._parts.device)
        is_compiled = self._settings.model.compile
        return probe_loss(state.model, self._loss, leaf, rank=self._spec.rank, is_compiled=is_compiled)

    def _environment(self) -> dict[str, str]:
        model = self._settings.model
        return environment_of(
            self._parts.device,
            compute_dtype=model.compute_dtype,
            is_causal_lm=self._is_causal_lm,
            wrapping=str(getattr(model, "parallelism", "fsdp")),
        )

    def _of_all_ranks(self, loss: float, start_sum: Callable[[torch.Tensor], dist.Work]) -> list[float]:
        losses = torch.zeros(self._spec.world.size, dtype=torch.float64, device=self._parts.device)
        losses[self._spec.rank] = loss
        start_sum(losses).wait()
        values: list[float] = losses.tolist()
        return values

    def _complaint(self, record: ProofRecord, bad: Mapping[int, float], tolerance: float) -> str:
        ranks = ", ".join(f"rank {rank}: {loss!r}" for rank, loss in list(bad.items())[:8])
        how = "exactly, as device, dtype and versions are the same" if not tolerance else f"within {tolerance:.0%}"
        return (
            f"the probe of rows {record.rows[0]} to {record.rows[-1]} gave the loss {record.loss!r} when it was saved "
            f"by {record.world_size} ranks, expected again {how}; {len(bad)} of {self._spec.world.size} ranks found "
            f"another ({ranks}). These are not the weights that were saved, or this program does not compute what "
            "that one did. The Checkpoint is taken out of use and the one before it tried; where the program was "
            "changed on purpose, put it back into use (raysume checkpoints quarantine --lift) and set "
            "checkpoint.proof: false"
        )


def attach(snapshot: Capture, record: ProofRecord | None) -> None:
    """Put the record into the state that rank 0 saves for all."""
    if record is not None and snapshot.shared_state is not None:
        snapshot.shared_state[PROOF] = record.as_plain()

"""What is looked at between the load and the first step of an Attempt: the plain state side by side, then the probe."""

from __future__ import annotations

import logging
from dataclasses import replace

from workers.contract import AttemptSpec, Restored
from workers.data_patience import DataPatience
from workers.groups import Groups
from workers.heartbeat import Pulse
from workers.proof import Proof
from workers.resume import RestoreReport
from workers.side_by_side import ResumeDiffers, Saved, differences, side_by_side, table
from workers.state import TrainingState

__all__ = ["ResumeCheck"]

_log = logging.getLogger(__name__)


class ResumeCheck:
    """One rank's, of one Attempt. ``is_built_in``: optimizer and schedule are ours."""

    def __init__(
        self,
        proof: Proof,
        spec: AttemptSpec,
        *,
        groups: Groups,
        patience: DataPatience,
        pulse: Pulse,
        is_built_in: bool,
    ) -> None:
        self.proof = proof
        self._spec, self._groups, self._patience, self._pulse = spec, groups, patience, pulse
        self._is_built_in = is_built_in
        self._loaded: tuple[Restored, RestoreReport] | None = None

    def take(self, restored: Restored, report: RestoreReport) -> None:
        """The state was loaded, if it was."""
        self._loaded = restored, report
        self._pulse.beat()

    def run(self, state: TrainingState, *, position: int) -> None:
        """All ranks, once, before the first step. Raises ResumeDiffers or ProofFailed; tells the driver else.

        ``position``: where the stream of samples stands.
        """
        plan, loaded = self._spec.restore, self._loaded
        self.proof.prepare(self._patience, is_from_memory=plan is not None and plan.memory is not None)
        if plan is None or loaded is None:
            return
        restored, report = loaded
        saved = Saved(step=report.step, shared_state=report.shared_state, is_built_in=self._is_built_in)
        pairs = side_by_side(saved, state, position=position)
        rank = self._spec.rank
        if rank == 0:
            _log.info("step %d, restored beside saved:\n%s", report.step, "\n".join(table(pairs)))
        found = differences(pairs)
        if found and plan.allow_partial:
            _log.warning("rank %d: a partial restore of step %d leaves other: %s", rank, report.step, "; ".join(found))
        elif found:
            raise ResumeDiffers(report.step, found)
        proven = self.proof.confirm(state, plan, report.shared_state, self._groups.start_sum)
        told = replace(restored, load_s=restored.load_s + proven.seconds, proof=proven)
        self._pulse.restored(replace(told, side_by_side=pairs) if rank == 0 else told)

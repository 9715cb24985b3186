"""The loss on the held-out split, when it is due: taken by all ranks, kept where it is the best, told to the driver.

How it is computed is `evaluation`'s part. One that an Order cuts short does not count.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from workers.contract import AttemptSpec, EvalReport, Phase
from workers.courier import Courier
from workers.data_patience import DataPatience
from workers.evaluation import evaluate
from workers.heartbeat import Pulse
from workers.leaf_rng import LeafRng
from workers.loading import WarmParts
from workers.settings import WorkerSettings
from workers.state import TrainingState
from workers.stream import Leaf
from workers.yielding import Yielding

__all__ = ["HeldOut"]


class HeldOut:
    """One rank's, of one Attempt. Collective: every rank asks for the same steps."""

    def __init__(
        self,
        settings: WorkerSettings,
        spec: AttemptSpec,
        parts: WarmParts,
        *,
        yielding: Yielding,
        patience: DataPatience,
        leaf_rng: LeafRng | None,
        courier: Courier | None,
        pulse: Pulse,
        start_sum: Callable[[torch.Tensor], dist.Work],
        check: Callable[[], None],
    ) -> None:
        self._settings, self._spec, self._parts = settings, spec, parts
        self._yielding, self._patience, self._leaf_rng = yielding, patience, leaf_rng
        self._courier, self._pulse, self._start_sum, self._check = courier, pulse, start_sum, check

    def take_if_due(self, step: int, state: TrainingState, loss_of: Callable[[Leaf], torch.Tensor]) -> None:
        """Every so many steps, where there is such a split. ``loss_of``: mean loss of a leaf."""
        config = self._settings.eval
        if config.every_steps is None or step % config.every_steps or self._parts.validation is None:
            return
        with self._pulse.during(Phase.EVALUATING):
            loss = evaluate(
                state.model,
                loss_of,
                self._parts.validation,
                num_leaves=config.num_leaves,
                micro_batch=self._settings.data.micro_batch,
                rank=self._spec.rank,
                world_size=self._spec.world.size,
                device=self._parts.device,
                start_sum=self._start_sum,
                check=self._check,
                must_stop=partial(self._yielding.must_stop, step),
                patience=self._patience,
                leaf_rng=self._leaf_rng,
                step=step,
            )
        if loss is None:
            self._yielding.say_cut_short(step)
            return
        progress = state.progress
        if progress.best_metric is None or loss < progress.best_metric:
            progress.best_metric, progress.best_step = loss, step
        if self._courier is not None:
            best, best_step = progress.best_metric, progress.best_step or step
            self._courier.report_eval(EvalReport(step=step, loss=loss, best=best, best_step=best_step))

"""Raysume's Checkpoints for transformers.Trainer: ``RaysumeCallback(url, every_steps=100).train(trainer)``.

It finds the newest usable Checkpoint, fills model, optimizer, schedule, scaler, random state and Trainer's own state
from it, has Trainer go on at the right batch, and saves at step boundaries without making training wait for the store.
A Checkpoint of step N is taken when step N + 1 is about to begin: log lines and evaluations of step N are part of it,
and the random state is put back at the same place. Neither Ray nor a driver is needed.
"""

# ruff: noqa: ARG002  # the signatures are Trainer's

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from storage.config import CheckpointConfig
from storage.errors import CorruptCheckpoint
from workers.errors import LoopMisused
from workers.hf_batches import FetchedBatches
from workers.hf_state import (
    BATCHES,
    LOOP,
    SUMMARY,
    TRAINER,
    LoopTracker,
    TrainerTracker,
    data_identity,
    saved_fields,
    write_state_file,
)
from workers.hf_support import (
    global_batch,
    inner_optimizer,
    require_same_data,
    require_supported,
    train_no_step,
    train_steps_again,
    trains_no_step,
)
from workers.loop_checkpoints import Found, LoopCheckpoints
from workers.loop_saves import LoopSaves, Taking
from workers.rng import capture_rng, restore_rng
from workers.save_trigger import EverySteps, SaveTrigger, StepFacts
from workers.state import Progress, TrainingState
from workers.unison import Ranks

__all__ = ["RaysumeCallback", "TrainingStopped"]

logger = logging.getLogger(__name__)

_STOPPED = 14
_GROUP_TIMEOUT_S = 1800.0


class TrainingStopped(SystemExit):
    """The process was told to end; the step is committed, and the same script goes on from it. Exit code 14."""

    def __init__(self, step: int) -> None:
        super().__init__(_STOPPED)
        self.step = step

    def __str__(self) -> str:
        return f"told to stop: step {self.step} is committed; run the same script again to go on"


class RaysumeCallback(TrainerCallback):
    """``url``: any store. Say when to save by ``every_steps`` or by a ``trigger`` (`orchestrator.dynamic_trigger`).

    ``keep``: Checkpoints kept, None: all. ``stop_signals``: each means save at the next step boundary, then end the
    process with `TrainingStopped`. ``allow_changed_data``: go on although other samples, another order or another
    global batch would follow than in the Run so far.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        every_steps: int | None = None,
        trigger: SaveTrigger | None = None,
        keep: int | None = 3,
        config: CheckpointConfig | None = None,
        stop_signals: Sequence[signal.Signals] = (signal.SIGTERM,),
        allow_changed_data: bool = False,
    ) -> None:
        if (every_steps is None) == (trigger is None):
            raise ValueError("say when to save: either every_steps=N or trigger=DynamicTrigger()")
        self._url = os.fspath(url)
        self._trigger: SaveTrigger = EverySteps(every_steps) if every_steps is not None else trigger  # type: ignore[assignment]
        self._keep, self._config = keep, config or CheckpointConfig()
        self._stop_signals, self._allow_changed_data = tuple(stop_signals), allow_changed_data
        self._trainer: Any = None
        self._ranks: Ranks | None = None
        self._found: Found | None = None
        self._told_to_stop = False
        self._stops_at_end = False
        self._batches = FetchedBatches()
        self._begin()

    def _begin(self) -> None:
        """Forget what belongs to one call of train()."""
        self._checkpoints: LoopCheckpoints | None = None
        self._saves: LoopSaves | None = None
        self._training: TrainingState | None = None
        self._tracker: TrainerTracker | None = None
        self._rng: dict[str, torch.Tensor] | None = None
        self._folder: Path | None = None
        self._global_batch = 0
        self._step_began_at_s = 0.0
        self._facts: StepFacts | None = None
        self._batches.detach()
        if self._trainer is not None:
            train_steps_again(self._trainer)

    # -- what a script calls ----------------------------------------------------------------------------------------

    def train(self, trainer: Any, **options: Any) -> Any:
        """Instead of ``trainer.train()``: from the newest usable Checkpoint, or from the start where there is none.

        One that proves corrupt while it is read is quarantined and the one before it is taken. Raises TrainingStopped
        where the process was told to end, be it in the last step.
        """
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        with self._listening():
            while True:
                try:
                    result = trainer.train(resume_from_checkpoint=self.resume(trainer), **options)
                    break
                except CorruptCheckpoint as error:
                    logger.warning("%s; trying the checkpoint before it", error)
        if self._stops_at_end or self._told_to_stop:  # the latter alone: told when all was done
            raise TrainingStopped(trainer.state.global_step)
        return result

    def resume(self, trainer: Any) -> str | None:
        """For ``trainer.train(resume_from_checkpoint=callback.resume(trainer))``: a folder that tells Trainer the step
        to go on from, None where there is no Checkpoint. All else is restored by the callback, which must be one of
        the Trainer's."""
        require_supported(trainer)
        if self._ranks is None:
            self._ranks = Ranks(_GROUP_TIMEOUT_S)
        self._begin()
        self._trainer = trainer
        self._batches.attach(trainer)
        self._checkpoints = LoopCheckpoints(self._url, self._ranks, keep=self._keep, config=self._config)
        self._found = found = self._checkpoints.newest()
        if found is None:
            return None
        saved = saved_fields(found.manifest, self._url)
        if not self._allow_changed_data:
            require_same_data(saved.get("data", {}), data_identity(trainer, global_batch(trainer)), found.step)
        # Trainer would look for weights in the folder, and they are not there: they come with all else.
        trainer._load_from_checkpoint = _load_nothing
        self._folder = Path(tempfile.mkdtemp(prefix="raysume-resume-"))
        write_state_file(self._folder, saved["state"])
        return str(self._folder)

    # -- what Trainer calls -----------------------------------------------------------------------------------------

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        lr_scheduler: LRScheduler | None = None,
        **kwargs: Any,
    ) -> None:
        """Everything is built and wrapped, and nothing was computed yet."""
        trainer, ranks, checkpoints = self._trainer, self._ranks, self._checkpoints
        if trainer is None or ranks is None or checkpoints is None:
            raise LoopMisused(
                "RaysumeCallback was not given its Trainer and would train from step 0: call callback.train(trainer) "
                "instead of trainer.train(), or give trainer.train resume_from_checkpoint=callback.resume(trainer)"
            )
        assert model is not None
        assert optimizer is not None
        assert lr_scheduler is not None
        self._require_same_beginning(state.global_step)
        self._let_trainer_load_again()
        self._global_batch = global_batch(trainer)
        self._tracker = TrainerTracker(trainer, data_identity(trainer, self._global_batch), self._trigger)
        self._training = TrainingState(
            model=model,
            optimizer=inner_optimizer(optimizer),
            scheduler=lr_scheduler,
            trackers={TRAINER: self._tracker},
            rank_trackers={LOOP: LoopTracker(trainer), BATCHES: self._batches},
            scaler=getattr(trainer.accelerator, "scaler", None),
        )
        if self._found is not None:
            checkpoints.restore(self._training, self._found, seed=args.seed)
            self._rng = capture_rng(ranks.rank)
            if not self._tracker.is_between_steps:
                self._batches.when_handed_out(self._restore_random_state)
        if ranks.rank != 0:
            self._training.trackers = {}  # rank 0's is saved for all; times in the others' log lines differ
        self._saves = LoopSaves(checkpoints, ranks, self._trigger, self._take, config=self._config)
        self._saves.begin(state.global_step, state.max_steps)
        if self._found is not None and state.global_step >= state.max_steps:
            train_no_step(trainer, control)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._batches.begin_epoch()
        if self._rng is None or self._tracker is None:
            return
        # Not all samplers inside are told of the epoch by a loader whose first batches are skipped.
        loader = kwargs.get("train_dataloader")
        if loader is not None and hasattr(loader, "set_epoch"):
            loader.set_epoch(int(state.epoch or 0))
        if not self._tracker.is_between_steps and float(state.epoch or 0).is_integer():
            self._restore_random_state()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        assert self._saves is not None  # made in on_train_begin
        assert self._tracker is not None
        self._restore_random_state()
        self._tracker.is_between_steps = True
        facts, self._facts = self._facts, None
        if self._saves.boundary(state.global_step, facts, told_to_stop=self._told_to_stop):
            raise TrainingStopped(state.global_step)
        self._step_began_at_s = time.monotonic()

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._batches.computed()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if trains_no_step(self._trainer):  # what is done at the end of an epoch was done
            control.should_log = control.should_evaluate = control.should_save = False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._batches.computed()
        self._facts = StepFacts(step=state.global_step, step_s=time.monotonic() - self._step_began_at_s)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs and SUMMARY in logs and args.load_best_model_at_end:
            self._finish(state)  # next Trainer puts the best weights in the place of those that were trained to here
        if logs and self._facts is not None and "loss" in logs:
            self._facts = replace(self._facts, loss=float(logs["loss"]), grad_norm=_number(logs.get("grad_norm")))

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        name = args.metric_for_best_model or "eval_loss"
        value = (metrics or {}).get(name if name.startswith("eval_") else f"eval_{name}")
        if value is not None and self._facts is not None:
            self._facts = replace(self._facts, metric=-float(value) if args.greater_is_better else float(value))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The last step is committed before train() returns."""
        if self._saves is not None and not args.load_best_model_at_end:
            self._finish(state)
        self._batches.detach()

    # -- parts ------------------------------------------------------------------------------------------------------

    def _finish(self, state: TrainerState) -> None:
        assert self._saves is not None
        assert self._tracker is not None
        train_steps_again(self._trainer)
        self._restore_random_state()  # where no step was left to train
        self._tracker.is_between_steps = False
        self._stops_at_end = self._saves.finish(state.global_step, self._facts, told_to_stop=lambda: self._told_to_stop)

    def _require_same_beginning(self, step: int) -> None:
        expected = 0 if self._found is None else self._found.step
        if step != expected:
            raise LoopMisused(
                f"Trainer begins at step {step}, but step {expected} is where {self._url} has it go on; call "
                "callback.train(trainer), or trainer.train(resume_from_checkpoint=callback.resume(trainer))"
            )

    def _let_trainer_load_again(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            del self._trainer._load_from_checkpoint  # what stood in the way of the class's own

    def _restore_random_state(self) -> None:
        """Once, where the Checkpoint's was taken: what was drawn to get here is drawn again in no other place."""
        rng, self._rng = self._rng, None
        if rng is not None:
            assert self._ranks is not None
            restore_rng(self._ranks.rank, rng, seed=self._trainer.args.seed, step=self._trainer.state.global_step)

    def _take(self, taking: Taking) -> TrainingState:
        """The state with its Progress at this step."""
        assert self._training is not None
        assert self._tracker is not None
        self._tracker.is_planned_end = taking.is_last
        state = self._trainer.state
        self._training.progress = Progress(
            step=taking.step,
            epoch=int(state.epoch or 0),
            position=taking.step * self._global_batch,
            tokens=int(state.num_input_tokens_seen),
            best_metric=state.best_metric,
            best_step=state.best_global_step,
        )
        return self._training

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Note stop signals; as they were before, after. Only the main thread may set that."""
        if threading.current_thread() is not threading.main_thread():
            logger.warning("not in the main thread: %s will end the process without a save", self._stop_signals)
            yield
            return
        self._told_to_stop = self._stops_at_end = False  # of this call: an earlier one was stopped by its own
        before = {number: signal.signal(number, self._note_stop) for number in self._stop_signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note_stop(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._told_to_stop = True


def _load_nothing(*args: Any, **kwargs: Any) -> None:
    """In the place of Trainer's own loading of weights."""


def _number(value: Any) -> float | None:
    return None if value is None else float(value)

"""What a training loop sees: the restored state, its steps, and the end of each step, where a Run is made to survive.

No step waits for its own sum over the ranks (`step_sums`) but one that a Snapshot is taken of, or the last. What is in
a Checkpoint and how it is stored is decided elsewhere.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping

import torch
from pydantic import JsonValue
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from workers.advance import begin
from workers.contract import AttemptSpec, Phase
from workers.courier import Courier
from workers.data_identity import DATA_TRACKER, DataIdentity
from workers.data_patience import DataPatience, wait_limit_s
from workers.errors import LoopMisused
from workers.groups import Groups
from workers.heartbeat import Pulse
from workers.held_out import HeldOut
from workers.leaf_rng import LeafRng
from workers.loading import Makers, WarmParts, load_state
from workers.loss import LossOf, mean_token_loss
from workers.order_desk import OrderDesk
from workers.proof import Proof
from workers.resume_check import ResumeCheck
from workers.save_share import ShareMeter
from workers.saving import Saving
from workers.settings import WorkerSettings
from workers.skipped_windows import skip_ahead
from workers.state import Tracker, TrainingState
from workers.step_sums import StepSums
from workers.stream import Leaf, LeafStream
from workers.train_step import TrainStep
from workers.yielding import Yielding

__all__ = ["Session"]


class Session:
    """One rank's part in one Attempt. ``loop_config`` is the user's own."""

    def __init__(
        self,
        settings: WorkerSettings,
        spec: AttemptSpec,
        parts: WarmParts,
        *,
        groups: Groups,
        courier: Courier | None,
        pulse: Pulse,
        check: Callable[[], None],
    ) -> None:
        self._settings, self._spec, self._parts = settings, spec, parts
        self._groups, self._courier, self._pulse, self._check = groups, courier, pulse, check
        self._leaf_rng = LeafRng(settings.seed) if settings.reproducible else None
        self._state: TrainingState | None = None
        self._loss: LossOf = mean_token_loss
        self._model: weakref.ref[nn.Module] | None = None
        self._stream: LeafStream | None = None
        self._orders: OrderDesk | None = None
        self._saver: Saving | None = None
        self._step_sums: StepSums | None = None
        self._yielding = Yielding(parts.device, start_sum=groups.start_sum, desk=lambda: self._desk)
        self._open_step: int | None = None
        self._finished_step = self._base_step = 0
        self._data_patience = DataPatience(
            limit_s=wait_limit_s(settings.checkpoint, world_size=spec.world.size, group_timeout_s=spec.group_timeout_s),
            pulse=pulse,
            check=check,
        )
        self._held_out = HeldOut(
            settings,
            spec,
            parts,
            yielding=self._yielding,
            patience=self._data_patience,
            leaf_rng=self._leaf_rng,
            courier=courier,
            pulse=pulse,
            start_sum=groups.start_sum,
            check=check,
        )

    @property
    def rank(self) -> int:
        return self._spec.rank

    @property
    def world_size(self) -> int:
        return self._spec.world.size

    @property
    def device(self) -> torch.device:
        return self._parts.device

    @property
    def loop_config(self) -> Mapping[str, JsonValue]:
        return self._settings.loop_config

    @property
    def finished_step(self) -> int:
        """The last optimizer step that `step_end` was called for, or the one that was restored."""
        return self._finished_step

    @property
    def model_reference(self) -> weakref.ref[nn.Module] | None:
        """A weak reference to the model once it was built: the proof, later, that nothing keeps it alive."""
        return self._model

    @property
    def is_leaving(self) -> bool:
        """Whether an Order that ends the Attempt has been carried out; `steps` then ends."""
        return self._saver is not None and self._saver.is_leaving

    @property
    def state(self) -> TrainingState:
        """The restored state, built with the built-in makers unless `build` was called before."""
        return self.build() if self._state is None else self._state

    def build(
        self,
        *,
        make_model: Callable[[], nn.Module] | None = None,
        make_optimizer: Callable[[nn.Module], Optimizer] | None = None,
        make_scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        make_trackers: Callable[[nn.Module], Mapping[str, Tracker]] | None = None,
        make_rank_trackers: Callable[[nn.Module], Mapping[str, Tracker]] | None = None,
        make_scaler: Callable[[], GradScaler] | None = None,
        loss: LossOf | None = None,
    ) -> TrainingState:
        """Build and restore the state with a model, optimizer, schedule or trackers of one's own; once, at the start.

        ``make_model`` runs on the meta device and gives an unsharded model. ``loss``: of a model and a leaf the mean
        loss, what `loss` then returns and the proof of a resume takes; left out: that of a Hugging Face causal LM.
        ``make_rank_trackers``: state that differs from rank to rank, each comes back to its own (`rank` says which).
        """
        if self._state is not None:
            raise LoopMisused("session.build must be the first call of a loop: the state has been built already")
        self._pulse.beat(Phase.LOADING)
        settings, spec = self._settings, self._spec
        identity = DataIdentity.of(
            self._parts.dataset,
            settings.data,
            seed=settings.seed,
            allow_changed=settings.data.allow_changed or spec.data_override,
        )
        self._loss = mean_token_loss if loss is None else loss
        check = ResumeCheck(
            Proof.of(settings, spec, self._parts, loss=loss, has_own_model=make_model is not None),
            spec,
            groups=self._groups,
            patience=self._data_patience,
            pulse=self._pulse,
            is_built_in=make_optimizer is None and make_scheduler is None,
        )
        state = load_state(
            Makers(
                model=make_model,
                optimizer=make_optimizer,
                scheduler=make_scheduler,
                trackers=make_trackers,
                rank_trackers=make_rank_trackers,
                scaler=make_scaler,
            ),
            settings=settings,
            spec=spec,
            parts=self._parts,
            own_trackers={DATA_TRACKER: identity},
            mesh=self._groups.mesh,
            on_restored=check.take,
        )
        self._state, self._model = state, weakref.ref(state.model)
        stream = self._begin(state, check.proof)
        check.run(state, position=stream.position)
        self._pulse.beat(Phase.COMPILING, step=state.progress.step)
        return state

    def steps(self) -> Iterator[TrainStep]:
        """Every step from where the Run stands to the last one; ends early once an Order to leave is carried out."""
        state = self.state
        assert self._stream is not None  # made together with the state
        for number in range(self._finished_step + 1, self._settings.total_steps + 1):
            self._check()
            self._open_step = number
            yield TrainStep(
                number,
                state=state,
                stream=self._stream,
                device=self.device,
                num_leaves=self._settings.data.num_leaves,
                rank=self.rank,
                world_size=self.world_size,
                clip_norm=self._settings.optim.clip_norm,
                measured=self._settings.signals.measures(number),
                check=self._check,
                leaf_rng=self._leaf_rng,
            )
            if self._finished_step != number:
                raise LoopMisused(f"rank {self.rank}: step {number} was not ended by session.step_end(step)")
            if self.is_leaving:
                return

    def loss(self, leaf: Leaf) -> torch.Tensor:
        """Mean loss of the leaf: by the ``loss`` that `build` was given, else by `workers.loss`."""
        return self._loss(self.state.model, leaf)

    def step_end(self, step: TrainStep) -> None:
        """Every rank, once a step, after `TrainStep.apply`: sum the vector, and carry out what is due."""
        if step.number != self._open_step or step.grad_norm is None:
            raise LoopMisused(f"rank {self.rank}: step_end({step.number}) needs step.apply() before it, once a step")
        self._open_step = None
        self._sums.begin(step)
        if self._finished_step == self._base_step:
            self._saving.warm_up(step.number)
        self._finished_step = step.number
        self._pulse.beat(Phase.TRAINING, step=step.number)
        if self._saving.is_due(step.number):
            self.drain()
            self._saving.carry_out(step.number)

    def evaluate_if_due(self, step: TrainStep) -> None:
        """Evaluate on the held-out split every so many steps. Before `step_end`, so that its save knows the metric."""
        self._held_out.take_if_due(step.number, self.state, self.loss)

    def should_yield(self) -> bool:
        """Whether an evaluation of the loop's own is to end at once, its result left out, as an Order ends the Attempt.
        Collective, and the same on all ranks: each asks once a batch. After True, go on to `step_end` as usual."""
        return self._yielding.must_stop(self._finished_step if self._open_step is None else self._open_step)

    def drain(self) -> None:
        """Read the vector that is still under way, if one is: Progress then stands at the last finished step."""
        if self._step_sums is not None:
            self._step_sums.settle()

    def release(self) -> None:
        """Let go of the model and all else that holds memory or a group; the Session is of no use after."""
        stream, self._stream = self._stream, None
        saver, self._saver = self._saver, None
        if saver is not None:
            saver.close()
        self._state = self._step_sums = None
        self._yielding.close()
        if stream is not None:
            stream.close()

    @property
    def _desk(self) -> OrderDesk:
        assert self._orders is not None  # made together with the state, before any step
        return self._orders

    @property
    def _saving(self) -> Saving:
        assert self._saver is not None  # made together with the state, before any step
        return self._saver

    @property
    def _sums(self) -> StepSums:
        assert self._step_sums is not None  # made together with the state, before any step
        return self._step_sums

    def _begin(self, state: TrainingState, proof: Proof) -> LeafStream:
        """Put stream, Orders and sums where the state stands; the stream."""
        settings, step = self._settings, state.progress.step
        progress = state.progress
        progress.skipped = skip_ahead(progress.skipped, progress.position, self._spec.skipped)
        stream = LeafStream(
            self._parts.dataset,
            settings.data,
            settings.seed,
            self.rank,
            self.world_size,
            self._data_patience,
            skipped=progress.skipped,
        )
        begin(progress, stream.order, self._spec.skipped, self._spec.world.attempt.number)
        stream.seek(step + 1, progress.position)
        self._stream = stream
        self._orders = OrderDesk(
            base_step=step,
            total_steps=settings.total_steps,
            every_steps=settings.checkpoint.every_steps,
            courier=self._courier,
        )
        self._saver = Saving(
            state,
            settings=settings,
            spec=self._spec,
            stager=self._parts.stager,
            desk=self._orders,
            pulse=self._pulse,
            check=self._check,
            share=ShareMeter(self.device, None if self._courier is None else self._courier.report_share),
            proof=proof,
        )
        self._step_sums = StepSums(
            state,
            settings=settings,
            spec=self._spec,
            parts=self._parts,
            desk=self._orders,
            saving=self._saver,
            courier=self._courier,
            start_sum=self._groups.start_sum,
        )
        self._finished_step = self._base_step = step
        return stream

"""A train loop whose restore leaves one part of the state out: that part stands as in a state that is new.

The real restore runs first, and what it brought is then taken away again, so nothing here depends on how it is done.
Processes import this file: it must not be a test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.amp.grad_scaler import GradScaler

from workers.rng import seed_rng
from workers.session import Session
from workers.state import TrainingState

__all__ = ["PARTS", "MutatedLoop", "Part"]

Part = Literal["moments", "step counters", "scheduler", "scaler", "rng", "data position"]
PARTS: tuple[Part, ...] = ("moments", "step counters", "scheduler", "scaler", "rng", "data position")


@dataclass(frozen=True, slots=True, kw_only=True)
class MutatedLoop:
    """The built-in loop. ``left_out`` None: the restore is whole."""

    left_out: Part | None

    def __call__(self, session: Session) -> None:
        state = session.build()
        if state.progress.step and self.left_out is not None:
            _leave_out(self.left_out, session, state)
        for step in session.steps():
            for leaf in step.leaves():
                step.backward(leaf, session.loss(leaf))
            step.apply()
            session.step_end(step)


def _leave_out(part: Part, session: Session, state: TrainingState) -> None:
    match part:
        case "moments":
            _zero(state, "exp_avg", "exp_avg_sq")
        case "step counters":
            _zero(state, "step")
        case "scheduler":
            state.scheduler.last_epoch = 0
        case "scaler":
            assert state.scaler is not None
            state.scaler.load_state_dict(GradScaler("cpu").state_dict())
        case "rng":
            seed_rng(0, session.rank, 0)
        case "data position":
            state.progress.position = 0
            assert session._stream is not None
            session._stream.seek(state.progress.step + 1, 0)


def _zero(state: TrainingState, *keys: str) -> None:
    tensors = [entry[key] for entry in state.optimizer.state.values() for key in keys]
    assert tensors, f"the optimizer has no {' or '.join(keys)}"
    with torch.no_grad():
        for tensor in tensors:
            tensor.zero_()

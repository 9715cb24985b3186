"""Digests of a whole training state at the end of a step, so that two Runs can be compared step by step.

Off unless asked for, and then costly: every sharded tensor is gathered. It changes nothing of what it looks at.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import xxhash
from pydantic import JsonValue
from torch.distributed.tensor import DTensor

from workers.names import named_parameters
from workers.rank_trackers import capture_rank_trackers
from workers.rng import capture_rng
from workers.snapshot import MODEL, OPTIM, RANK_TRACKER, SCALER, SCHEDULER, capture
from workers.state import TrainingState
from workers.weights_digest import weights_digest

__all__ = ["StepTrace", "StepTracer", "rng_digest"]

_SCHEDULE = frozenset({SCHEDULER, SCALER})
_ELSEWHERE = _SCHEDULE | {"optimizer", "progress"}  # steps, samples and tokens are in every report as they are


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """xxh3_64 of what a step left behind, as rank 0 has it.

    ``weights``: all parameters, as the digest at the end of a Run. ``optimizer``: moments, step counters and settings.
    ``schedule``: learning rate schedule and loss scale. ``rest``: buffers and trackers. ``rng``: the generators of
    rank 0; ``own``: its trackers of its own, None where it has none.
    """

    weights: str
    optimizer: str
    schedule: str
    rest: str
    rng: str
    own: str | None


class StepTracer:
    """Takes a `StepTrace` every ``every`` steps; None: never."""

    def __init__(self, every: int | None, *, rank: int) -> None:
        self._every, self._rank = every, rank

    def take(self, step: int, state: Callable[[], TrainingState]) -> StepTrace | None:
        """Collective where one is due: every rank calls it, at the end of ``step``. None on other ranks than 0."""
        if self._every is None or step % self._every:
            return None
        here = state()
        weights = weights_digest(here.model, rank=self._rank)
        held = capture(here, rank=self._rank, world_size=1, rng=False)
        weighty = {f"{MODEL}{name}" for name, _ in named_parameters(here.model)}
        moments, own, others = _parted({name: one for name, one in held.tensors.items() if name not in weighty})
        plain: Mapping[str, JsonValue] = held.shared_state or {}
        optimizer = self._digest(moments, plain.get("optimizer"))
        rest = self._digest(others, {name: plain[name] for name in plain.keys() - _ELSEWHERE})
        if weights is None or self._rank:
            return None
        plain_own = capture_rank_trackers(here.rank_trackers, self._rank, {})
        return StepTrace(
            weights=weights,
            optimizer=optimizer,
            schedule=self._digest({}, {name: plain[name] for name in plain.keys() & _SCHEDULE}),
            rest=rest,
            rng=rng_digest(self._rank),
            own=self._digest(own, plain_own) if here.rank_trackers else None,
        )

    def _digest(self, tensors: Mapping[str, torch.Tensor], plain: JsonValue) -> str:
        """One tensor at a time is gathered; ranks other than 0 only take part in that."""
        digest = xxhash.xxh3_64()
        with torch.no_grad():
            for name, tensor in sorted(tensors.items()):
                whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                if self._rank == 0:
                    _add(digest, name, whole)
        digest.update(json.dumps(plain, sort_keys=True).encode())
        return digest.hexdigest()


def _parted(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], ...]:
    """Optimizer state, what the rank keeps for itself, and all others."""
    parts: tuple[dict[str, torch.Tensor], ...] = ({}, {}, {})
    for name, tensor in tensors.items():
        parts[0 if name.startswith(OPTIM) else 1 if name.startswith(RANK_TRACKER) else 2][name] = tensor
    return parts


def rng_digest(rank: int) -> str:
    """Of every generator of this process: Python's, NumPy's, torch's."""
    digest = xxhash.xxh3_64()
    for name, state in sorted(capture_rng(rank).items()):
        _add(digest, name, state)
    return digest.hexdigest()


def _add(digest: xxhash.xxh3_64, name: str, tensor: torch.Tensor) -> None:
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    digest.update(tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8).numpy().data)

"""Digests of a whole training state at the end of a step, so that two Runs can be compared step by step.

Off unless asked for, and then costly: every sharded tensor is gathered. It changes nothing of what it looks at.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import xxhash
from pydantic import JsonValue
from torch.distributed.tensor import DTensor

from workers.names import named_parameters
from workers.rng import capture_rng
from workers.snapshot import MODEL, OPTIM, capture
from workers.state import TrainingState
from workers.weights_digest import weights_digest

__all__ = ["StepTrace", "StepTracer", "rng_digest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """xxh3_64 of what a step left behind, as rank 0 has it.

    ``weights``: all parameters, as the digest at the end of a Run. ``optimizer``: moments, step counters and settings.
    ``rest``: buffers, schedule, loss scale and trackers. ``rng``: the generators of rank 0.
    """

    weights: str
    optimizer: str
    rest: str
    rng: str


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
        parameters = {f"{MODEL}{name}" for name, _ in named_parameters(here.model)}
        names = sorted(held.tensors.keys() - parameters)
        plain: Mapping[str, JsonValue] = held.shared_state or {}
        optimizer = self._digest(
            ((name, held.tensors[name]) for name in names if name.startswith(OPTIM)), {"": plain.get("optimizer")}
        )
        rest = self._digest(
            ((name, held.tensors[name]) for name in names if not name.startswith(OPTIM)),
            {name: value for name, value in plain.items() if name not in ("optimizer", "progress")},
        )
        if weights is None or self._rank:
            return None
        return StepTrace(weights=weights, optimizer=optimizer, rest=rest, rng=rng_digest(self._rank))

    def _digest(self, tensors: Iterable[tuple[str, torch.Tensor]], plain: Mapping[str, JsonValue]) -> str:
        """One tensor at a time is gathered; ranks other than 0 only take part in that."""
        digest = xxhash.xxh3_64()
        with torch.no_grad():
            for name, tensor in tensors:
                whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                if self._rank == 0:
                    _add(digest, name, whole)
        digest.update(json.dumps(dict(plain), sort_keys=True).encode())
        return digest.hexdigest()


def rng_digest(rank: int) -> str:
    """Of every generator of this process: Python's, NumPy's, torch's."""
    digest = xxhash.xxh3_64()
    for name, state in sorted(capture_rng(rank).items()):
        _add(digest, name, state)
    return digest.hexdigest()


def _add(digest: xxhash.xxh3_64, name: str, tensor: torch.Tensor) -> None:
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    digest.update(tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8).numpy().data)

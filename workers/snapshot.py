"""Names everything a Checkpoint must hold: one rank's training state as tensors by name and plain JSON.

Nothing is copied, moved or gathered here: the tensors are the living ones, and `staging` copies them at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

import torch
from pydantic import JsonValue
from torch import nn
from torch.distributed.tensor import DTensor

from workers.loss_scaling import is_in_use
from workers.names import named_parameters, persistent_buffers
from workers.optimizer_state import OPTIM, capture_optimizer
from workers.plain_state import numbers, to_plain
from workers.rank_trackers import capture_rank_trackers, plain_digests
from workers.replica_digest import Replicas
from workers.replicated import Holding, deal, holding
from workers.rng import capture_rng
from workers.schedule import capture_schedule, schedule_kind
from workers.state import TrainingState

__all__ = ["MODEL", "OPTIM", "RANK_TRACKER", "RNG", "SCALER", "SCHEDULER", "TRACKER", "Capture", "capture"]

MODEL = "model."
TRACKER = "tracker."
RANK_TRACKER = "rank_tracker."
RNG = "rng."
SCHEDULER = "scheduler"
SCALER = "scaler"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """What one rank saves. ``tensors`` holds only what this rank must write: its part of sharded tensors, its own RNG,
    its share of the parameters that every rank holds whole, with what the optimizer keeps of them, and, on rank 0
    alone, whatever else is replicated. ``shared_state`` is None on other ranks. ``replicas``: what all ranks hold
    alike, for them to compare."""

    tensors: dict[str, torch.Tensor]
    shared_state: dict[str, JsonValue] | None
    rank_state: dict[str, JsonValue]
    replicas: Replicas = field(default_factory=dict)


def capture(state: TrainingState, *, rank: int, world_size: int, rng: bool = True) -> Capture:
    """The state of ``rank`` at this step boundary. Raises NotPlain for what cannot be stored.

    ``world_size`` 1: all that this rank holds, whoever else holds it.
    """
    tensors: dict[str, torch.Tensor] = {}
    parameters = list(named_parameters(state.model))
    for name, tensor in (*parameters, *persistent_buffers(state.model)):
        _add(tensors, f"{MODEL}{name}", tensor)
    trackers: dict[str, JsonValue] = {
        name: to_plain(tracker.state_dict(), f"{TRACKER}{name}", tensors) for name, tracker in state.trackers.items()
    }
    shared: dict[str, JsonValue] = {
        "optimizer": capture_optimizer(state, tensors),
        SCHEDULER: capture_schedule(state.scheduler),
        "scheduler_kind": schedule_kind(state.scheduler),
        "progress": to_plain(asdict(state.progress), "progress", {}),
        "trackers": trackers,
    }
    if state.scaler is not None and is_in_use(state.scaler):
        shared[SCALER] = to_plain(numbers(state.scaler.state_dict()), SCALER, None)
    units = _held_alike(state, parameters, rank, world_size)
    tensors = _share(tensors, units, rank)
    own = capture_rank_trackers(state.rank_trackers, rank, tensors)
    if rng:
        tensors.update(capture_rng(rank))
    return Capture(
        tensors=tensors,
        shared_state=shared if rank == 0 else None,
        rank_state={"rank": rank, "world_size": world_size, **own, **plain_digests(trackers)},
        replicas=_replicas(units),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """A parameter that several ranks hold alike, with what the optimizer keeps of it, by stored name."""

    held: Holding
    parts: dict[str, torch.Tensor]


def _held_alike(
    state: TrainingState, parameters: Iterable[tuple[str, nn.Parameter]], rank: int, world_size: int
) -> dict[str, _Unit]:
    """By name of the parameter. Buffers are not among them: running statistics, say, differ from rank to rank."""
    found: dict[str, _Unit] = {}
    if world_size == 1:
        return found
    for name, parameter in parameters:
        held = holding(parameter, rank=rank, world_size=world_size)
        if held is None:
            continue
        parts: dict[str, torch.Tensor] = {f"{MODEL}{name}": parameter}
        for key, value in state.optimizer.state.get(parameter, {}).items():
            # A plain tensor of a sharded parameter, its step say, is rank 0's like the rest of the plain state.
            if isinstance(value, torch.Tensor) and isinstance(value, DTensor) == isinstance(parameter, DTensor):
                parts[f"{OPTIM}{name}.{key}"] = value
        found[name] = _Unit(held=held, parts=parts)
    return found


def _share(tensors: dict[str, torch.Tensor], units: dict[str, _Unit], rank: int) -> dict[str, torch.Tensor]:
    """What ``rank`` writes of ``tensors``. What belongs to one parameter stays together."""
    others: set[str] = set()
    mine: set[str] = set()
    for label in {unit.held.label for unit in units.values()}:
        alike = {name: unit for name, unit in units.items() if unit.held.label == label}
        sizes = {name: sum(one.nbytes for one in unit.parts.values()) for name, unit in alike.items()}
        owners = deal(sizes, next(iter(alike.values())).held.count)
        for name, unit in alike.items():
            (mine if owners[name] == unit.held.index else others).update(unit.parts)
    return {
        key: tensor
        for key, tensor in tensors.items()
        if key in mine or (key not in others and (rank == 0 or isinstance(tensor, DTensor)))
    }


def _replicas(units: dict[str, _Unit]) -> Replicas:
    found: dict[str, dict[str, torch.Tensor]] = {}
    for unit in units.values():
        if unit.held.count > 1:
            own = {key: one.to_local() if isinstance(one, DTensor) else one for key, one in unit.parts.items()}
            found.setdefault(unit.held.label, {}).update(own)
    return found


def _add(tensors: dict[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
    if name in tensors:
        raise ValueError(f"two tensors of the training state are called {name}: rename one of the modules")
    tensors[name] = tensor

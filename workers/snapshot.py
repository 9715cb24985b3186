"""Names everything a Checkpoint must hold: one rank's training state as tensors by name and plain JSON.

Nothing is copied, moved or gathered here: the tensors are the living ones, and `staging` copies them at once.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

import torch
from pydantic import JsonValue
from torch.distributed.tensor import DTensor

from workers.loss_scaling import is_in_use
from workers.names import named_parameters, persistent_buffers
from workers.optimizer_state import OPTIM, capture_optimizer
from workers.plain_state import numbers, to_plain
from workers.rank_trackers import capture_rank_trackers, plain_digests
from workers.replica_digest import Replicas
from workers.replicated import deal
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
WHOLE = "whole"
"""Label of the replicas that every rank of the World holds."""


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
    """The state of ``rank`` at this step boundary. Raises NotPlain for what cannot be stored."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in (*named_parameters(state.model), *persistent_buffers(state.model)):
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
    whole = _whole_parameters(state)
    is_shared = bool(whole) and world_size > 1
    tensors = _share(tensors, whole, rank, world_size)
    own = capture_rank_trackers(state.rank_trackers, rank, tensors)
    if rng:
        tensors.update(capture_rng(rank))
    return Capture(
        tensors=tensors,
        shared_state=shared if rank == 0 else None,
        rank_state={"rank": rank, "world_size": world_size, **own, **plain_digests(trackers)},
        replicas={WHOLE: {key: one for parts in whole.values() for key, one in parts.items()}} if is_shared else {},
    )


def _whole_parameters(state: TrainingState) -> dict[str, dict[str, torch.Tensor]]:
    """The parameters that are not sharded, each with its optimizer state, by stored name. Buffers are not among them:
    running statistics, say, differ from rank to rank."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in named_parameters(state.model):
        if isinstance(parameter, DTensor):
            continue
        kept = state.optimizer.state.get(parameter, {}).items()
        found[name] = {f"{MODEL}{name}": parameter} | {
            f"{OPTIM}{name}.{key}": value for key, value in kept if isinstance(value, torch.Tensor)
        }
    return found


def _share(
    tensors: dict[str, torch.Tensor], whole: dict[str, dict[str, torch.Tensor]], rank: int, world_size: int
) -> dict[str, torch.Tensor]:
    """What ``rank`` writes of ``tensors``, among them the ``whole`` parameters. What belongs to one stays together."""
    owners = deal({name: sum(one.nbytes for one in parts.values()) for name, parts in whole.items()}, world_size)
    writers = {key: owners[name] for name, parts in whole.items() for key in parts}
    return {
        key: tensor for key, tensor in tensors.items() if isinstance(tensor, DTensor) or writers.get(key, 0) == rank
    }


def _add(tensors: dict[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
    if name in tensors:
        raise ValueError(f"two tensors of the training state are called {name}: rename one of the modules")
    tensors[name] = tensor

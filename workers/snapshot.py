"""Names everything a Checkpoint must hold: one rank's training state as tensors by name and plain JSON.

Nothing is copied, moved or gathered here: the tensors are the living ones, and `staging` copies them at once.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from pydantic import JsonValue
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from workers.names import named_parameters, optimizer_names, persistent_buffers
from workers.plain_state import to_plain
from workers.rng import capture_rng
from workers.state import TrainingState

__all__ = ["MODEL", "OPTIM", "RNG", "TRACKER", "Capture", "capture"]

MODEL = "model."
OPTIM = "optim."
TRACKER = "tracker."
RNG = "rng."


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """What one rank saves. ``tensors`` holds only what this rank must write: its part of sharded tensors, its own RNG
    and, on rank 0 alone, whatever is replicated. ``shared_state`` is None on other ranks."""

    tensors: dict[str, torch.Tensor]
    shared_state: dict[str, JsonValue] | None
    rank_state: dict[str, JsonValue]


def capture(state: TrainingState, *, rank: int, world_size: int, rng: bool = True) -> Capture:
    """The state of ``rank`` at this step boundary. Raises NotPlain for what cannot be stored."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in (*named_parameters(state.model), *persistent_buffers(state.model)):
        _add(tensors, f"{MODEL}{name}", tensor)
    shared: dict[str, JsonValue] = {
        "optimizer": _optimizer_state(state, tensors),
        "scheduler": to_plain(state.scheduler.state_dict(), "scheduler", {}),
        "progress": to_plain(asdict(state.progress), "progress", {}),
        "trackers": {
            name: to_plain(tracker.state_dict(), f"{TRACKER}{name}", tensors)
            for name, tracker in state.trackers.items()
        },
    }
    if rank != 0:
        tensors = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    if rng:
        tensors.update(capture_rng(rank))
    return Capture(
        tensors=tensors,
        shared_state=shared if rank == 0 else None,
        rank_state={"rank": rank, "world_size": world_size},
    )


def _add(tensors: dict[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
    if name in tensors:
        raise ValueError(f"two tensors of the training state are called {name}: rename one of the modules")
    tensors[name] = tensor


def _optimizer_state(state: TrainingState, tensors: dict[str, torch.Tensor]) -> JsonValue:
    """Param groups and plain state values by parameter name; state tensors of every parameter, frozen or not."""
    optimizer = state.optimizer
    names = optimizer_names(state.model, optimizer)
    plain: dict[str, JsonValue] = {}
    num_tensors = 0
    for group, group_names in zip(optimizer.param_groups, names, strict=True):
        for name, parameter in zip(group_names, group["params"], strict=True):
            entries = optimizer.state.get(parameter, {})
            own: dict[str, JsonValue] = {}
            for key, value in entries.items():
                if isinstance(value, torch.Tensor):
                    _add(tensors, f"{OPTIM}{name}.{key}", value)
                    num_tensors += 1
                else:
                    own[key] = to_plain(value, f"{OPTIM}{name}.{key}", {})
            if own:
                plain[name] = own
    return {"groups": _groups(optimizer, names), "state": plain, "num_tensors": num_tensors}


def _groups(optimizer: Optimizer, names: list[list[str]]) -> JsonValue:
    groups: list[JsonValue] = []
    for index, (group, group_names) in enumerate(zip(optimizer.param_groups, names, strict=True)):
        settings: dict[str, Any] = {
            key: value.item() if isinstance(value, torch.Tensor) and value.ndim == 0 else value
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        groups.append({"names": list(group_names), "settings": to_plain(settings, f"{OPTIM}group-{index}", {})})
    return groups

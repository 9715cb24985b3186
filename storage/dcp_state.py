"""What a DCP planner knows of one rank's state besides the tensors' bytes: plain values, paths and tied tensors.

Only looks; nothing is copied or written here, and no stored byte is ever unpickled.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping

import torch
from pydantic import JsonValue
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.tensor import DTensor

from storage.errors import StorageError
from storage.plain_values import NotPlainValue, value_to_plain

__all__ = ["aliases_of", "flat_state", "paths_of", "plain_values", "refuse_unstorable"]


def flat_state(planner: SavePlanner) -> dict[str, object]:
    """The whole flat state of this rank; empty for a planner that does not show it."""
    state = getattr(planner, "state_dict", None)
    return state if isinstance(state, dict) else {}


def paths_of(planner: SavePlanner) -> dict[str, list[str | int]]:
    """Where each flat name stood in the nested state."""
    mappings = getattr(planner, "mappings", None)
    if not isinstance(mappings, Mapping):
        return {}
    return {name: list(path) for name, path in mappings.items()}


def plain_values(plan: SavePlan, planner: SavePlanner, where: str) -> dict[str, JsonValue]:
    """Every value of this rank that is no tensor, also those that the plan leaves to another rank to write.

    Raises NotPlainValue, which names the key.
    """
    state = flat_state(planner)
    values = {name: value for name, value in state.items() if not isinstance(value, torch.Tensor)}
    for item in plan.items:
        if item.type == WriteItemType.BYTE_IO and item.index.fqn not in values:
            values[item.index.fqn] = _resolved(planner.resolve_data(item), item.index.fqn, where)
    return {name: value_to_plain(value, name, where) for name, value in values.items()}


def _resolved(data: torch.Tensor | io.BytesIO, name: str, where: str) -> object:
    """The value in bytes that a planner of this very process has just made."""
    if isinstance(data, torch.Tensor):
        raise NotPlainValue(name, "a tensor that the planner calls bytes", where)
    data.seek(0)
    try:
        return torch.load(data, weights_only=True)
    except pickle.UnpicklingError as error:
        raise NotPlainValue(name, f"bytes of no plain value ({error})", where) from error


def refuse_unstorable(state: Mapping[str, object], where: str) -> None:
    """Raises StorageError for a tensor that is not one dense block of elements, which names it."""
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            continue
        local = value.to_local() if isinstance(value, DTensor) else value
        found = (
            "nested"
            if local.is_nested
            else "quantized"
            if local.is_quantized
            else str(local.layout).removeprefix("torch.")
            if local.layout is not torch.strided
            else "on the meta device, without values"
            if local.is_meta
            else ""
        )
        if found:
            raise StorageError(
                f"{where}: {name} is a tensor that is {found}: a Checkpoint holds dense tensors; "
                "make it one, or store its parts under names of their own"
            )


def aliases_of(state: Mapping[str, object]) -> dict[str, str]:
    """Names of tied tensors, each with the first name (by sorting) of the same memory, which alone is stored."""
    first: dict[object, str] = {}
    aliases: dict[str, str] = {}
    for name in sorted(state):
        identity = _identity(state[name])
        if identity is not None and first.setdefault(identity, name) != name:
            aliases[name] = first[identity]
    return aliases


def _identity(value: object) -> object:
    """Equal for two names of the same elements; None for what holds no memory of its own here."""
    if not isinstance(value, torch.Tensor):
        return None
    local = value.to_local() if isinstance(value, DTensor) else value
    # An empty part of a sharded tensor has no address; another rank tells whether it is tied.
    if type(local) not in (torch.Tensor, torch.nn.Parameter) or local.is_meta or local.numel() == 0:
        return None
    placed = (value.device_mesh, value.placements) if isinstance(value, DTensor) else None
    pointer = local.untyped_storage().data_ptr()
    return pointer, local.storage_offset(), local.shape, local.stride(), local.dtype, local.device, value.shape, placed

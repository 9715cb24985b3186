"""An optimizer's state as tensors by parameter name and plain values; the settings of its groups with their names.

Frozen parameters are like all others, and one that has no state yet has none stored. What could not be given back to
another World, or has no name, is refused with its path. Filling an optimizer is `restore_optimizer`'s work.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import JsonValue
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from workers.names import optimizer_names
from workers.plain_state import NotPlain, numbers, to_plain
from workers.state import TrainingState

__all__ = ["OPTIM", "capture_optimizer", "optimizer_kind"]

OPTIM = "optim."


def optimizer_kind(optimizer: Optimizer) -> str:
    """The torch optimizer that its class is or derives from; its own name where it derives from none of them."""
    kinds = (kind.__name__ for kind in type(optimizer).__mro__ if kind.__module__.startswith("torch.optim."))
    name = next(kinds, "Optimizer")
    return type(optimizer).__name__ if name == "Optimizer" else name


def capture_optimizer(state: TrainingState, tensors: dict[str, torch.Tensor]) -> JsonValue:
    """The plain part; the tensors go into ``tensors`` by stored name."""
    optimizer = state.optimizer
    names = optimizer_names(state.model, optimizer)
    plain: dict[str, JsonValue] = {}
    found: dict[str, torch.Tensor] = {}
    num_entries = 0
    for group, group_names in zip(optimizer.param_groups, names, strict=True):
        for name, parameter in zip(group_names, group["params"], strict=True):
            entries = optimizer.state.get(parameter)
            if entries is None:
                continue
            num_entries += 1
            own = _named_entries(f"{OPTIM}{name}", parameter, entries, found)
            if own:
                plain[name] = own
    _require_all_named(optimizer, num_entries)
    tensors.update(found)
    return {
        "kind": optimizer_kind(optimizer),
        "groups": _groups(optimizer, names),
        "state": plain,
        "num_tensors": len(found),
    }


def _named_entries(
    path: str, parameter: torch.Tensor, entries: dict[str, Any], found: dict[str, torch.Tensor]
) -> dict[str, JsonValue]:
    """Plain entries of one parameter; its tensors go into ``found``."""
    own: dict[str, JsonValue] = {}
    is_spread = isinstance(parameter, DTensor) and parameter.device_mesh.size() > 1
    for key, value in entries.items():
        if isinstance(value, torch.Tensor):
            if is_spread:
                _require_restorable(f"{path}.{key}", value, parameter)
            found[f"{path}.{key}"] = value
        else:
            own[key] = to_plain(value, f"{path}.{key}", None)
    return own


def _require_restorable(path: str, value: torch.Tensor, parameter: torch.Tensor) -> None:
    """Refuse what another World could not be given of a parameter that several ranks share: how it lies over them is
    not known."""
    if isinstance(value, DTensor):
        if value.shape != parameter.shape:
            raise NotPlain(path, f"sharded in another shape, {tuple(value.shape)}, than its parameter")
    elif value.numel() != 1:
        raise NotPlain(path, f"a tensor of one rank, of shape {tuple(value.shape)}, beside a parameter that is sharded")


def _require_all_named(optimizer: Optimizer, num_entries: int) -> None:
    if len(optimizer.state) == num_entries:
        return
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for key in optimizer.state:
        if id(key) not in known:
            what = f"a tensor of shape {tuple(key.shape)}" if isinstance(key, torch.Tensor) else repr(key)
            raise NotPlain(f"{OPTIM}state", f"kept under a key that is no parameter of its groups ({what})")


def _groups(optimizer: Optimizer, names: list[list[str]]) -> JsonValue:
    groups: list[JsonValue] = []
    for index, (group, group_names) in enumerate(zip(optimizer.param_groups, names, strict=True)):
        settings: dict[str, Any] = {
            key: numbers(value) for key, value in group.items() if key not in ("params", "param_names")
        }
        groups.append({"names": list(group_names), "settings": to_plain(settings, f"{OPTIM}group-{index}", None)})
    return groups

"""Puts a Checkpoint's optimizer state into the optimizer that the loop holds, by parameter name.

No dummy step is taken to make state exist: every entry is made as the Checkpoint describes it, and only where it has
one, so that a partly initialised optimizer stays one. What fits was found before (`restore_match`).
"""

from __future__ import annotations

from typing import Any, Final

import torch

from storage.dcp_writer import named_dtype
from storage.manifest import Manifest, TensorLayout
from workers.group_match import LOCAL_SETTINGS, changed_settings
from workers.names import named_parameters, optimizer_names
from workers.plain_state import from_plain
from workers.restore_match import Match, saved_groups, section
from workers.snapshot import OPTIM
from workers.state import TrainingState
from workers.stored_tensors import StoredTensors

__all__ = ["restore_optimizer"]

_COUNTERS: Final = frozenset({"step", "mu_product", "eta", "mu"})  # numbers, kept on the CPU unless capturable


def restore_optimizer(state: TrainingState, manifest: Manifest, match: Match, stored: StoredTensors) -> list[str]:
    """Fill ``state.optimizer``; what is to be said of it."""
    optimizer = state.optimizer
    parameters = dict(named_parameters(state.model))
    plain = section(manifest, "optimizer").get("state")
    values = plain if isinstance(plain, dict) else {}
    targets: dict[str, torch.Tensor] = {}
    groups = list(zip(optimizer.param_groups, optimizer_names(state.model, optimizer), strict=True))
    if match.is_exact:
        optimizer.state.clear()
    for group, names in groups:
        on_device = bool(group.get("capturable") or group.get("fused"))
        for name in names:
            layouts = match.optimizer.get(name)
            if layouts is None:
                continue
            parameter = parameters[name]
            entries: dict[str, Any] = {}
            for key, layout in layouts.items():
                entries[key] = _state_tensor(parameter, key, layout, on_device)
                targets[f"{OPTIM}{name}.{key}"] = entries[key]
            entries.update(from_plain(values.get(name, {}), {}))
            optimizer.state[parameter] = entries
    stored.load(targets)
    lines = _restore_settings(optimizer.param_groups, manifest, match)
    saved = section(manifest, "optimizer").get("num_tensors")
    return [f"optimizer state tensors: saved {saved}, restored {len(targets)}", *lines]


def _state_tensor(parameter: torch.Tensor, key: str, layout: TensorLayout, on_device: bool) -> torch.Tensor:
    dtype = named_dtype(layout.dtype)
    if layout.shape == tuple(parameter.shape) and key not in _COUNTERS:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    is_number = layout.shape == ()
    return torch.zeros(layout.shape, dtype=dtype, device="cpu" if is_number and not on_device else parameter.device)


def _restore_settings(groups: list[dict[str, Any]], manifest: Manifest, match: Match) -> list[str]:
    saved = saved_groups(manifest)
    lines = []
    for position, (group, index) in enumerate(zip(groups, match.groups.order, strict=True)):
        if index is None:
            lines.append(f"optimizer group {position} keeps the settings it was built with: it continues no saved one")
            continue
        settings = saved[index]["settings"]
        lines += [
            f"optimizer group {position}: {key} {settings[key]} of the checkpoint goes on; {group[key]}, with which it "
            "was built, does not count"
            for key in changed_settings(settings, group)
        ]
        for key, value in settings.items():
            if key not in LOCAL_SETTINGS:
                group[key] = _as_here(value, group.get(key))
    return lines


def _as_here(value: Any, here: Any) -> Any:
    """A number goes into the tensor that is there, be it one; the object that a captured graph knows stays."""
    if isinstance(here, torch.Tensor) and isinstance(value, int | float):
        return here.fill_(value)
    if isinstance(here, tuple) and isinstance(value, tuple) and len(here) == len(value):
        return tuple(_as_here(item, own) for item, own in zip(value, here, strict=True))
    return value

"""Stable names of parameters and buffers, whatever wraps the model. The only place where wrapper parts are taken off.

Nothing here reads a value: names and references only.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

__all__ = ["clean_name", "named_parameters", "optimizer_names", "persistent_buffers", "unwrapped"]

_WRAPPER_PARTS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def clean_name(name: str) -> str:
    """``name`` without the parts that compile, FSDP and activation checkpointing put in."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_PARTS)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel; a module of the user's own that is called ``module`` keeps its name."""
    return unwrapped(model.module) if isinstance(model, DistributedDataParallel) else model


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter once (tied ones under their first name), frozen ones included."""
    for name, parameter in unwrapped(model).named_parameters():
        yield clean_name(name), parameter


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every buffer that belongs to the training state; non-persistent ones are recomputed, never stored."""
    seen: set[int] = set()
    for prefix, module in unwrapped(model).named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            yield clean_name(f"{prefix}.{name}" if prefix else name), buffer


def optimizer_names(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Names of the parameters of each param group. Raises ValueError for a parameter that the model does not own."""
    by_id = {id(parameter): name for name, parameter in named_parameters(model)}
    groups: list[list[str]] = []
    for index, group in enumerate(optimizer.param_groups):
        strangers = sum(id(parameter) not in by_id for parameter in group["params"])
        if strangers:
            raise ValueError(
                f"optimizer group {index} holds {strangers} parameters that are not the model's: "
                "build the optimizer after fully_shard and from the same model"
            )
        groups.append([by_id[id(parameter)] for parameter in group["params"]])
    return groups

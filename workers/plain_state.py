"""Splits any state dict into named tensors and plain JSON, and joins them again. Nothing else can be stored.

Refuses what JSON cannot carry, by name, instead of pickling or rounding it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import JsonValue
from torch.distributed.tensor import DTensor

from storage.plain_values import NotPlainValue, value_to_plain
from workers.errors import WorkersError

__all__ = ["NotPlain", "from_plain", "numbers", "tensor_names", "to_plain"]

_TENSOR = "__tensor__"


class NotPlain(WorkersError):
    """A value that is neither a tensor nor a plain type. ``name`` is its path in the training state."""

    def __init__(self, name: str, found: str) -> None:
        super().__init__(name, found)
        self.name, self.found = name, found

    def __str__(self) -> str:
        return (
            f"{self.name} is {self.found}: a Checkpoint holds tensors and plain types (None, bool, int, float, str, "
            "list, tuple, dict with text keys) only; return one of these from state_dict()"
        )


def to_plain(value: object, name: str, tensors: dict[str, torch.Tensor] | None) -> JsonValue:
    """``value`` as JSON; tensors in it are put into ``tensors`` under their path and referred to by it. None: there is
    no place for tensors here, and one is refused like anything else."""

    def reference(part: object, path: str) -> JsonValue | None:
        if not isinstance(part, torch.Tensor):
            return None
        if tensors is None:
            raise NotPlain(path, f"a tensor of shape {tuple(part.shape)} where only plain values are kept")
        tensors[path] = part
        return {_TENSOR: path}

    try:
        return value_to_plain(value, name, other=reference)
    except NotPlainValue as error:
        raise NotPlain(error.name, error.found) from None


def numbers(value: Any) -> Any:
    """``value`` with each tensor of one element as the number in it: a learning rate may be either."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not isinstance(value, DTensor):
        return value.item()
    if isinstance(value, list | tuple):
        items = [numbers(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if type(value) is dict:
        return {key: numbers(item) for key, item in value.items()}
    return value


def from_plain(value: JsonValue, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The inverse of `to_plain`, tensors taken from ``tensors``. Raises KeyError for a tensor that is not there."""
    if isinstance(value, list):
        return [from_plain(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"__tensor__": str(name)}:
            return tensors[name]
        case {"__float__": str(text)}:
            return float(text)
        case {"__tuple__": list(items)}:
            return tuple(from_plain(item, tensors) for item in items)
    return {key: from_plain(item, tensors) for key, item in value.items()}


def tensor_names(value: JsonValue) -> list[str]:
    """Names of all tensors that ``value`` refers to."""
    if isinstance(value, list):
        return [name for item in value for name in tensor_names(item)]
    if not isinstance(value, dict):
        return []
    match value:
        case {"__tensor__": str(name)}:
            return [name]
    return [name for item in value.values() for name in tensor_names(item)]

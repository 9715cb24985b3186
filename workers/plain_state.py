"""Splits any state dict into named tensors and plain JSON, and joins them again. Nothing else can be stored.

Refuses what JSON cannot carry, by name, instead of pickling or rounding it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from pydantic import JsonValue

from workers.errors import WorkersError

__all__ = ["NotPlain", "from_plain", "tensor_names", "to_plain"]

_TENSOR = "__tensor__"
_FLOAT = "__float__"
_TUPLE = "__tuple__"
_MARKS = frozenset({_TENSOR, _FLOAT, _TUPLE})


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


def to_plain(value: object, name: str, tensors: dict[str, torch.Tensor]) -> JsonValue:
    """``value`` as JSON; tensors in it are put into ``tensors`` under their path and referred to by it."""
    match value:
        case torch.Tensor():
            tensors[name] = value
            return {_TENSOR: name}
        case None | bool() | str():
            return value
        case int():
            return int(value)
        case float():
            return float(value) if math.isfinite(value) else {_FLOAT: repr(float(value))}
        case list():
            return [to_plain(item, f"{name}.{index}", tensors) for index, item in enumerate(value)]
        case tuple():
            return {_TUPLE: [to_plain(item, f"{name}.{index}", tensors) for index, item in enumerate(value)]}
        case Mapping():
            for key in value:
                if not isinstance(key, str) or key in _MARKS:
                    raise NotPlain(f"{name}.{key}", f"under a key of type {type(key).__name__} ({key!r})")
            return {key: to_plain(item, f"{name}.{key}", tensors) for key, item in value.items()}
        case _:
            raise NotPlain(name, f"a {type(value).__module__}.{type(value).__qualname__}")


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

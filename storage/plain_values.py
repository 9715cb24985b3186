"""Any plain value as JSON and back, without loss: the one encoding of what a Checkpoint holds besides tensors.

Refuses what JSON cannot carry, by name, instead of pickling or rounding it. Knows no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from pydantic import JsonValue

from storage.errors import StorageError

__all__ = ["FLOAT", "TUPLE", "NotPlainValue", "plain_to_value", "value_to_plain"]

FLOAT: Final = "__float__"
TUPLE: Final = "__tuple__"
_MARKS: Final = frozenset({FLOAT, TUPLE, "__tensor__"})


class NotPlainValue(StorageError):
    """A value that is no plain type. ``name`` is its path in the state."""

    def __init__(self, name: str, found: str, where: str = "") -> None:
        super().__init__(name, found, where)
        self.name, self.found, self.where = name, found, where

    def __str__(self) -> str:
        return (
            f"{self.where}{': ' if self.where else ''}{self.name} is {self.found}: a Checkpoint holds tensors and "
            "plain types (None, bool, int, float, str, list, tuple, dict with text keys); turn it into one of them"
        )


def value_to_plain(
    value: object, name: str, where: str = "", other: Callable[[object, str], JsonValue | None] | None = None
) -> JsonValue:
    """``value`` as JSON. ``where`` (rank, step) only begins the message of NotPlainValue.

    ``other`` gets what is no plain type, with its path, and may give JSON that stands for it.
    """
    match value:
        case None | bool() | str():
            return value
        case int():
            return int(value)
        case float():
            return float(value) if math.isfinite(value) else {FLOAT: repr(float(value))}
        case list():
            return [value_to_plain(item, f"{name}.{index}", where, other) for index, item in enumerate(value)]
        case tuple():
            return {TUPLE: [value_to_plain(item, f"{name}.{index}", where, other) for index, item in enumerate(value)]}
        case Mapping():
            for key in value:
                if not isinstance(key, str) or key in _MARKS:
                    raise NotPlainValue(f"{name}.{key}", f"under a key of type {type(key).__name__} ({key!r})", where)
            return {key: value_to_plain(item, f"{name}.{key}", where, other) for key, item in value.items()}
    stand_in = None if other is None else other(value, name)
    if stand_in is None:
        raise NotPlainValue(name, f"a {type(value).__module__}.{type(value).__qualname__}", where)
    return stand_in


def plain_to_value(value: JsonValue) -> Any:
    """The inverse of `value_to_plain`."""
    if isinstance(value, list):
        return [plain_to_value(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"__float__": str(text)}:
            return float(text)
        case {"__tuple__": list(items)}:
            return tuple(plain_to_value(item) for item in items)
    return {key: plain_to_value(item) for key, item in value.items()}

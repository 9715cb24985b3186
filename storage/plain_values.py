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
# What the JSON reader takes back with room to spare: it gives up at 200 levels and at 4300 digits.
_MAX_DEPTH: Final = 128
_MAX_BITS: Final = 8192


class NotPlainValue(StorageError):
    """A value that is no plain type, or one that JSON cannot carry. ``name`` is its path in the state."""

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

    ``other`` gets what is no plain type, with its path, and may give JSON that stands for it. Refused as well is what
    could be written but never be read again: text that is no Unicode, huge integers, deep nesting.
    """
    if not _is_unicode(name):
        raise NotPlainValue(ascii(name), "under a name with lone surrogates, which is no Unicode", where)
    return _to_plain(value, name, where, other, 0)


def _to_plain(
    value: object, name: str, where: str, other: Callable[[object, str], JsonValue | None] | None, depth: int
) -> JsonValue:
    if depth > _MAX_DEPTH:
        raise NotPlainValue(f"{name[:80]}...", f"nested more than {_MAX_DEPTH} levels deep, or inside itself", where)
    match value:
        case None | bool():
            return value
        case str():
            if not _is_unicode(value):
                raise NotPlainValue(name, f"text with lone surrogates ({value[:40]!a}), which is no Unicode", where)
            return value
        case int():
            if value.bit_length() > _MAX_BITS:
                raise NotPlainValue(name, f"an integer of {value.bit_length()} bits (at most {_MAX_BITS})", where)
            return int(value)
        case float():
            return float(value) if math.isfinite(value) else {FLOAT: repr(float(value))}
        case list():
            return [_to_plain(item, f"{name}.{index}", where, other, depth + 1) for index, item in enumerate(value)]
        case tuple():
            # Two levels of JSON: the mark and its list.
            items = [_to_plain(item, f"{name}.{index}", where, other, depth + 2) for index, item in enumerate(value)]
            return {TUPLE: items}
        case Mapping():
            for key in value:
                if not isinstance(key, str) or key in _MARKS or not _is_unicode(key):
                    shown = key if not isinstance(key, str) or _is_unicode(key) else ascii(key)
                    raise NotPlainValue(f"{name}.{shown}", f"under a key of type {type(key).__name__} ({key!r})", where)
            return {key: _to_plain(item, f"{name}.{key}", where, other, depth + 1) for key, item in value.items()}
    stand_in = None if other is None else other(value, name)
    if stand_in is None:
        raise NotPlainValue(name, f"a {type(value).__module__}.{type(value).__qualname__}", where)
    return stand_in


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


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

"""Reads fields of event lines by kind: what is absent, or of another kind, has a neutral value. Pure.

Event files live longer than the code that wrote them, and their last line may be torn, so nothing here raises.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

__all__ = ["Event", "float_of", "int_of", "number_of", "text_of", "texts_of"]

Event = Mapping[str, object]


def number_of(event: Event, key: str) -> float | None:
    """A finite number, else None."""
    value = event.get(key)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def int_of(event: Event, key: str) -> int:
    value = event.get(key)
    return int(value) if isinstance(value, int | float) and math.isfinite(value) else 0


def float_of(event: Event, key: str) -> float:
    """May be NaN or infinite, as a loss is."""
    value = event.get(key)
    return float(value) if isinstance(value, int | float) else 0.0


def text_of(event: Event, key: str) -> str:
    value = event.get(key)
    return value if isinstance(value, str) else ""


def texts_of(event: Event, key: str) -> list[str]:
    value = event.get(key)
    return [item for item in cast("list[object]", value) if isinstance(item, str)] if isinstance(value, list) else []

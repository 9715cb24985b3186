"""What the summary says of samples that were left out of the data. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

__all__ = ["SkippedSummary", "skipped_window"]


class SkippedSummary(TypedDict):
    """``step`` went wrong with the ``samples`` from ``place`` of the stream on."""

    step: int
    place: int
    samples: int


def skipped_window(event: Mapping[str, object]) -> SkippedSummary:
    """Of one ``window_skipped`` event."""
    step, place, samples = (_int(event.get(name)) for name in ("step", "place", "samples"))
    return SkippedSummary(step=step, place=place, samples=samples)


def _int(value: object) -> int:
    return int(value) if isinstance(value, int | float) else 0

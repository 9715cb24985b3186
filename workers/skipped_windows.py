"""Where samples stand in the stream once windows of it were left out. Pure arithmetic; no torch.

A position counts the samples that are trained on; a place counts all of the stream, those left out included. Without
skipped windows the two are the same. Windows are sorted, apart from each other, and counted in places.
"""

from __future__ import annotations

from collections.abc import Iterable

from workers.contract import SkippedWindow

__all__ = ["Windows", "merge", "place_of", "skip_ahead", "spans"]

Windows = tuple[tuple[int, int], ...]
"""First place and number of samples of each."""


def place_of(position: int, windows: Windows) -> int:
    """Where the sample at ``position`` stands in the stream."""
    place = position
    for first, count in windows:
        if first > place:
            break
        place += count
    return place


def spans(position: int, count: int, windows: Windows) -> Windows:
    """The places of ``count`` samples from ``position`` on, as runs without a gap."""
    found: list[tuple[int, int]] = []
    left, place = count, place_of(position, windows)
    for first, skipped in windows:
        if first < place:
            continue
        length = min(left, first - place)
        found.append((place, length))
        left -= length
        if not left:
            break
        place = first + skipped
    if left:
        found.append((place, left))
    return tuple(found)


def merge(windows: Windows, more: Iterable[tuple[int, int]]) -> Windows:
    """Both, sorted; what overlaps or touches becomes one."""
    joined: list[tuple[int, int]] = []
    for first, count in sorted((*windows, *more)):
        if joined and first <= sum(joined[-1]):
            before = joined.pop()
            first, count = before[0], max(sum(before), first + count) - before[0]
        joined.append((first, count))
    return tuple(joined)


def skip_ahead(windows: Windows, position: int, more: Iterable[SkippedWindow]) -> Windows:
    """``windows`` of a state that stands at ``position``, and those of ``more`` that still lie ahead of it: what lies
    behind was trained on, and its places are counted."""
    here = place_of(position, windows)
    return merge(windows, ((window.place, window.samples) for window in more if window.place >= here))

"""Joins byte ranges of one object that lie close together, so that one request serves many small reads.

Pure arithmetic: nothing is read here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Span", "affordable_gap", "join_ranges"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Bytes ``[start, stop)`` of an object; ``members`` are the positions, in the input, of the ranges inside."""

    start: int
    stop: int
    members: tuple[int, ...]


def affordable_gap(ranges: Sequence[tuple[int, int]], *, smallest: int, largest: int, spare_bytes: int) -> int:
    """The widest gap worth reading across: at least ``smallest``, at most ``largest``, as far as ``spare_bytes`` go.

    These are what all gaps up to the answer may hold together.
    """
    gaps: list[int] = []
    reached = None
    for start, stop in sorted(ranges):
        if reached is not None and start > reached:
            gaps.append(start - reached)
        reached = stop if reached is None else max(reached, stop)
    answer = smallest
    for gap in sorted(gaps):
        spare_bytes -= gap
        if gap > largest or spare_bytes < 0:
            break
        answer = max(answer, gap)
    return answer


def join_ranges(ranges: Sequence[tuple[int, int]], *, largest_gap: int, largest_span: int) -> list[Span]:
    """Spans that cover every ``(start, stop)`` whole, in rising order.

    Ranges at most ``largest_gap`` bytes apart share a span while it stays within ``largest_span`` bytes; a range longer
    than that is a span of its own.
    """
    spans: list[Span] = []
    members: list[int] = []
    start = stop = 0
    for position in sorted(range(len(ranges)), key=lambda position: ranges[position]):
        first, last = ranges[position]
        end = max(stop, last)
        if members and (first > stop + largest_gap or end - start > largest_span):
            spans.append(Span(start=start, stop=stop, members=tuple(members)))
            members = []
        if not members:
            start, end = first, last
        members.append(position)
        stop = end
    if members:
        spans.append(Span(start=start, stop=stop, members=tuple(members)))
    return spans

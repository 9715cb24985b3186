"""Joining of byte ranges."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from storage.spans import Span, affordable_gap, join_ranges


def test_near_ranges_share_a_span_and_far_ones_do_not() -> None:
    spans = join_ranges([(100, 110), (0, 10), (15, 20), (500, 501)], largest_gap=80, largest_span=1000)
    assert spans == [
        Span(start=0, stop=110, members=(1, 2, 0)),
        Span(start=500, stop=501, members=(3,)),
    ]


def test_a_span_ends_where_it_would_grow_too_long() -> None:
    spans = join_ranges([(0, 10), (10, 20), (20, 90)], largest_gap=0, largest_span=20)
    assert [(span.start, span.stop) for span in spans] == [(0, 20), (20, 90)]


def test_gaps_are_read_across_while_the_spare_bytes_pay_for_them() -> None:
    ranges = [(300, 400), (0, 10), (20, 100), (150, 200)]  # gaps of 10, 50 and 100
    assert affordable_gap(ranges, smallest=1, largest=1000, spare_bytes=5) == 1
    assert affordable_gap(ranges, smallest=1, largest=1000, spare_bytes=60) == 50
    assert affordable_gap(ranges, smallest=1, largest=1000, spare_bytes=160) == 100
    assert affordable_gap(ranges, smallest=1, largest=60, spare_bytes=1000) == 50
    assert affordable_gap(ranges, smallest=7, largest=60, spare_bytes=0) == 7


_RANGES = st.lists(st.tuples(st.integers(0, 200), st.integers(1, 60)).map(lambda pair: (pair[0], sum(pair))))


@given(_RANGES, st.integers(0, 30), st.integers(1, 100))
def test_every_range_lies_in_exactly_one_span(ranges: list[tuple[int, int]], gap: int, longest: int) -> None:
    spans = join_ranges(ranges, largest_gap=gap, largest_span=longest)
    assert sorted(member for span in spans for member in span.members) == list(range(len(ranges)))
    for span in spans:
        assert span.start == min(ranges[member][0] for member in span.members)
        assert span.stop == max(ranges[member][1] for member in span.members)
        assert len(span.members) == 1 or span.stop - span.start <= longest

"""Which row comes at which place: mixes of sources and shuffles, as pure functions of the place."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from workers.mix_weights import MAX_CYCLE, whole_weights
from workers.permutation import permuted, place_in
from workers.sample_order import SampleOrder, Shuffle, SourceRows, sample_ids


def order_of(
    *sizes_and_weights: tuple[int, int],
    seed: int = 0,
    shuffle: Shuffle = "rows",
    block_rows: int = 4,
    window_blocks: int = 3,
) -> SampleOrder:
    sources = tuple(
        SourceRows(name=f"s{number}", num_rows=size, weight=weight, block_rows=block_rows)
        for number, (size, weight) in enumerate(sizes_and_weights)
    )
    return SampleOrder(seed=seed, sources=sources, shuffle=shuffle, window_blocks=window_blocks)


orders = st.builds(
    order_of,
    st.tuples(st.integers(1, 60), st.integers(1, 6)),
    st.tuples(st.integers(1, 60), st.integers(1, 6)),
    st.tuples(st.integers(1, 9), st.integers(1, 6)),
    seed=st.integers(0, 1 << 60),
    shuffle=st.sampled_from(["rows", "blocks"]),
    block_rows=st.integers(1, 9),
    window_blocks=st.integers(1, 5),
)


@settings(max_examples=50, deadline=None)
@given(size=st.integers(1, 5000), value=st.integers(0, 4999), seed=st.integers(0, 1 << 40))
def test_the_place_of_a_value_is_found_without_a_search(size: int, value: int, seed: int) -> None:
    value %= size
    place = place_in(f"a label {seed}", size, value)
    assert permuted(f"a label {seed}", size, np.array([place])).tolist() == [value]


def test_one_source_shuffled_by_rows_keeps_the_order_it_always_had() -> None:
    order = order_of((20, 7), window_blocks=9)
    pinned = [10, 12, 4, 8, 17, 15, 16, 1, 7, 0, 14, 2, 9, 5, 6, 11, 13, 3, 19, 18]
    assert order.ids(0, 20).tolist() == pinned
    assert order.ids(13, 100).tolist() == sample_ids(0, 20, 13, 100).tolist()


def test_the_order_of_a_mix_and_of_blocks_is_pinned_for_ever() -> None:
    """A change here makes every saved position point at other rows."""
    assert order_of((6, 2), (3, 1)).ids(0, 12).tolist() == PINNED_MIX
    assert order_of((22, 1), shuffle="blocks").ids(0, 22).tolist() == PINNED_BLOCKS


PINNED_MIX = [1, 8, 2, 5, 7, 4, 0, 6, 3, 4, 6, 1]
PINNED_BLOCKS = [5, 6, 0, 7, 4, 1, 21, 2, 20, 3, 18, 11, 13, 16, 10, 8, 14, 19, 17, 15, 9, 12]


@settings(max_examples=25, deadline=None)
@given(order=orders, cycle=st.integers(0, 1000))
def test_every_cycle_holds_exactly_the_weights(order: SampleOrder, cycle: int) -> None:
    ids = order.ids(cycle * order.cycle, order.cycle)
    numbers = np.searchsorted([order.first_id(number) for number in range(3)], ids, side="right") - 1
    assert tuple(np.bincount(numbers, minlength=3)) == order.weights


@settings(max_examples=25, deadline=None)
@given(order=orders, num_cycles=st.integers(1, 12))
def test_every_source_has_whole_epochs_of_its_own(order: SampleOrder, num_cycles: int) -> None:
    count = num_cycles * order.cycle
    seen = Counter(zip(order.epochs(0, count).tolist(), order.ids(0, count).tolist(), strict=True))
    assert max(seen.values()) == 1
    for number, taken in enumerate(order.taken(count)):
        size, first = order.sources[number].num_rows, order.first_id(number)
        for epoch in range(taken // size):
            assert all(seen[epoch, row] for row in range(first, first + size))


@settings(max_examples=25, deadline=None)
@given(order=orders, start=st.integers(0, 1 << 40), cuts=st.lists(st.integers(0, 30), min_size=1, max_size=3))
def test_how_a_span_of_places_is_cut_changes_nothing(order: SampleOrder, start: int, cuts: list[int]) -> None:
    firsts = [start + int(first) for first in np.cumsum([0, *cuts])]
    parts = [order.ids(first, cut) for first, cut in zip(firsts, cuts, strict=False)]
    assert np.array_equal(order.ids(start, sum(cuts)), np.concatenate(parts))
    epochs = [order.epochs(first, cut) for first, cut in zip(firsts, cuts, strict=False)]
    assert np.array_equal(order.epochs(start, sum(cuts)), np.concatenate(epochs))


@settings(max_examples=25, deadline=None)
@given(order=orders, start=st.integers(0, 10_000), count=st.integers(0, 80))
def test_rows_taken_before_a_place_are_those_that_were_given_out(order: SampleOrder, start: int, count: int) -> None:
    ids = order.ids(start, count)
    ends = [order.first_id(number) + source.num_rows for number, source in enumerate(order.sources)]
    given_out = np.bincount(np.searchsorted(ends, ids, side="right"), minlength=3)
    assert [after - before for before, after in zip(order.taken(start), order.taken(start + count), strict=True)] == (
        given_out.tolist()
    )


@settings(max_examples=40, deadline=None)
@given(
    num_rows=st.integers(1, 300), block_rows=st.integers(1, 9), window=st.integers(1, 6), seed=st.integers(0, 1 << 60)
)
def test_blocks_come_once_an_epoch_and_one_window_at_a_time(
    num_rows: int, block_rows: int, window: int, seed: int
) -> None:
    order = order_of((num_rows, 1), seed=seed, shuffle="blocks", block_rows=block_rows, window_blocks=window)
    for epoch in range(2):
        ids = order.ids(epoch * num_rows, num_rows)
        assert sorted(ids.tolist()) == list(range(num_rows))
        blocks = (ids // block_rows).tolist()
        first_seen = {block: place for place, block in reversed(list(enumerate(blocks)))}
        met = sorted(first_seen, key=first_seen.__getitem__)
        window_of = {block: number // window for number, block in enumerate(met)}
        assert [window_of[block] for block in blocks] == sorted(window_of[block] for block in blocks)


def test_rows_within_a_window_and_windows_within_an_epoch_are_shuffled() -> None:
    order = order_of((400, 1), shuffle="blocks", block_rows=10, window_blocks=4)
    first, second = order.ids(0, 400), order.ids(400, 400)
    assert first.tolist() != second.tolist()
    window = first[:40]
    assert len(set((window // 10).tolist())) == 4
    assert window.tolist() != sorted(window.tolist())
    assert np.count_nonzero(np.diff(window // 10)) > 10  # rows of the blocks are mixed, not one block after the other


def test_sources_of_one_size_are_not_permuted_alike() -> None:
    ids = order_of((50, 1), (50, 1)).ids(0, 100)
    assert ids[ids < 50].tolist() != (ids[ids >= 50] - 50).tolist()


def test_weights_count_by_their_ratio_alone() -> None:
    assert order_of((9, 2), (5, 4)).ids(0, 50).tolist() == order_of((9, 10), (5, 20)).ids(0, 50).tolist()
    assert order_of((9, 10), (5, 20)).as_fields() == order_of((9, 1), (5, 2)).as_fields()


@settings(max_examples=30, deadline=None)
@given(order=orders)
def test_an_order_comes_back_from_its_fields(order: SampleOrder) -> None:
    back = SampleOrder.from_fields(order.as_fields())
    assert back.as_fields() == order.as_fields()
    assert back.ids(17, 60).tolist() == order.ids(17, 60).tolist()


@pytest.mark.parametrize("change", [{"version": 2}, {"seed": "1"}, {"sources": []}, {"shuffle": "none"}, {"more": 1}])
def test_fields_of_no_order_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        SampleOrder.from_fields(order_of((5, 1)).as_fields() | change)  # type: ignore[arg-type]


def test_an_order_over_an_empty_source_or_with_a_cycle_without_end_is_refused() -> None:
    with pytest.raises(ValueError, match="none in \\['s1'\\]"):
        order_of((5, 1), (0, 1))
    with pytest.raises(ValueError, match=f"expected at most {MAX_CYCLE}: use rounder weights"):
        order_of((5, 99_991), (5, 10_007))


@pytest.mark.parametrize(
    ("weights", "whole"),
    [((0.7, 0.3), (7, 3)), ((3,), (1,)), ((0.1, 0.2, 0.7), (1, 2, 7)), ((1e-3, 1), (1, 1000)), ((6, 4.0), (3, 2))],
)
def test_weights_become_the_smallest_whole_numbers(weights: tuple[float, ...], whole: tuple[int, ...]) -> None:
    assert whole_weights(weights) == whole

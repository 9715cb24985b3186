"""Regular cuts become a rule, others stay a list, and both say the same. What is absurd is refused before it costs."""

from __future__ import annotations

import math
import random
import re
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.layout import LayoutFold, cover_problem, layout_problem
from storage.manifest import ChunkPlace, RowBlocks, TensorLayout

Place = tuple[int, tuple[int, ...], tuple[int, ...]]


def layout(shape: tuple[int, ...], places: list[Place] | RowBlocks) -> TensorLayout:
    chunks = (
        places
        if isinstance(places, RowBlocks)
        else tuple(ChunkPlace(rank=rank, offsets=offsets, sizes=sizes) for rank, offsets, sizes in places)
    )
    return TensorLayout(dtype="float32", shape=shape, level="L1", chunks=chunks)


def cut(shape: tuple[int, ...], dim: int, num: int) -> list[Place]:
    """As torch.chunk cuts: equal blocks, the last smaller, ranks beyond the rows without any."""
    size = max(1, -(-shape[dim] // num))
    places = []
    for rank in range(num):
        start, stop = min(rank * size, shape[dim]), min((rank + 1) * size, shape[dim])
        offsets = tuple(start if axis == dim else 0 for axis in range(len(shape)))
        places.append((rank, offsets, (*shape[:dim], stop - start, *shape[dim + 1 :])))
    return places


def fold(shape: tuple[int, ...], places: list[Place], max_blocks: int = 100_000) -> TensorLayout | str:
    folded = LayoutFold(0, layout(shape, []))
    for place in places:
        problem = folded.add(place[0], layout(shape, [place]), max_blocks)
        if problem is not None:
            return problem
    return folded.finish()


def held(stored: TensorLayout) -> set[Place]:
    return {(chunk.rank, chunk.offsets, chunk.sizes) for chunk in stored.chunks}


@settings(deadline=None)
@given(
    shape=st.lists(st.integers(1, 300), min_size=1, max_size=3).map(tuple),
    num=st.integers(1, 300),
    copies=st.integers(1, 3),
    seed=st.randoms(use_true_random=False),
    data=st.data(),
)
def test_a_regular_cut_comes_back_whole_whatever_the_order_and_the_copies(
    shape: tuple[int, ...], num: int, copies: int, seed: random.Random, data: st.DataObject
) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    places = cut(shape, dim, num)
    expected = {place for place in places if prod(place[2])}
    told = [(rank + copy * num, offsets, sizes) for copy in range(copies) for rank, offsets, sizes in places]
    seed.shuffle(told)
    stored = fold(shape, told)
    assert isinstance(stored, TensorLayout)
    assert held(stored) == expected
    assert isinstance(stored.chunks, RowBlocks) == (len(expected) >= 64)
    read = TensorLayout.model_validate_json(stored.model_dump_json())
    assert held(read) == expected
    assert layout_problem(read, num * copies) is None


@settings(deadline=None)
@given(num=st.integers(64, 200), gone=st.integers(0, 199))
def test_one_missing_block_is_a_gap(num: int, gone: int) -> None:
    places = cut((num * 3, 2), 0, num)
    del places[gone % num]
    assert "has a gap" in str(fold((num * 3, 2), places))


@settings(deadline=None)
@given(num=st.integers(64, 200), twice=st.integers(0, 199))
def test_one_block_that_reaches_into_the_next_is_an_overlap(num: int, twice: int) -> None:
    places = cut((num * 3, 2), 0, num)
    start = (twice % num) * 3 + 1
    if start + 3 > num * 3:
        start -= 3
    places.append((num, (start, 0), (3, 2)))
    assert "overlap" in str(fold((num * 3, 2), places))


def test_one_block_shifted_sideways_reaches_outside() -> None:
    places = cut((128, 2), 0, 128)
    places[5] = (5, (5, 1), (1, 2))
    assert "reaches outside" in str(fold((128, 2), places))


def test_ranks_that_do_not_follow_each_other_evenly_are_listed_one_by_one() -> None:
    places = [(rank ^ 1, offsets, sizes) for rank, offsets, sizes in cut((128, 2), 0, 128)]
    stored = fold((128, 2), places)
    assert isinstance(stored, TensorLayout)
    assert isinstance(stored.chunks, tuple)
    assert held(stored) == set(places)


def test_every_second_rank_is_a_rule_too() -> None:
    places = [(3 + 2 * rank, offsets, sizes) for rank, offsets, sizes in cut((128, 2), 0, 128)]
    stored = fold((128, 2), places)
    assert isinstance(stored, TensorLayout)
    assert stored.chunks == RowBlocks(shape=(128, 2), dim=0, size=1, first_rank=3, rank_step=2)


def test_a_cut_finer_than_any_world_is_not_given_memory_for_its_blocks() -> None:
    folded = LayoutFold(0, layout((1 << 40,), []))
    assert folded.add(0, layout((1 << 40,), [(0, (0,), (1,))]), 128) is None
    assert "has a gap: 1 of" in str(folded.finish())


def test_a_receipt_may_not_bring_a_rule_or_the_chunk_of_another() -> None:
    rule = RowBlocks(shape=(4,), dim=0, size=1, first_rank=0, rank_step=1)
    assert "a Receipt lists its chunks" in str(LayoutFold(0, layout((4,), [])).add(0, layout((4,), rule), 64))
    assert "with a chunk of rank 7" in str(LayoutFold(0, layout((4,), [])).add(0, layout((4,), [(7, (0,), (4,))]), 64))


def rule(shape: tuple[int, ...], /, **changes: object) -> TensorLayout:
    blocks = {"shape": shape, "dim": 0, "size": 1, "first_rank": 0, "rank_step": 1}
    return layout(shape, RowBlocks.model_validate(blocks | changes))


@pytest.mark.parametrize(
    ("stored", "complaint"),
    [
        (rule((10**9, 4)), "is cut into 1000000000 chunks, at most"),
        (rule((1 << 61,) * 16, size=1 << 61), "elements, at most"),
        (layout((1 << 61, 1 << 61), [(0, (0, 0), (1 << 61, 1 << 61))]), "elements, at most"),
        (rule((8, 4), shape=(4, 4)), r"of shape \(8, 4\) is cut along dimension 0 of \(4, 4\)"),
        (rule((8, 4), dim=5), "is cut along dimension 5"),
        (rule((8, 4), rank_step=2), "has a chunk of rank 14, the world size is 8"),
        (rule((8, 4), first_rank=1), "has a chunk of rank 8, the world size is 8"),
        (layout((4,), [(8, (0,), (4,))]), "has a chunk of rank 8, the world size is 8"),
        (layout((4,), [(0, (0,), (3,)), (1, (2,), (2,))]), "overlap"),
        (layout((4,), [(0, (2,), (4,))]), "reaches outside"),
        (layout((4,), [(0, (0,), (3,))]), "has a gap: 3 of 4"),
        (layout((4,), [(0, (0, 0), (3,))]), "2 offsets and 1 sizes"),
    ],
)
def test_a_stored_layout_that_cannot_be_is_named(stored: TensorLayout, complaint: str) -> None:
    problem = layout_problem(stored, 8)
    assert problem is not None
    assert re.search(complaint, problem), problem


def test_a_chunk_before_the_beginning_cannot_even_be_said() -> None:
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        layout((4,), [(0, (-1,), (4,))])


def test_volumes_are_counted_without_overflow() -> None:
    shape = (1 << 20, 1 << 20)
    assert math.prod(shape) == 1 << 40
    assert cover_problem(shape, [ChunkPlace(rank=0, offsets=(0, 0), sizes=shape)]) is None

"""The order of samples and the leaves made from it, without loader processes. Datasets live in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.token_datasets import write_numbered_rows
from workers.config import DataConfig
from workers.data_errors import DataError
from workers.dataset import TokenDataset
from workers.sample_order import permute
from workers.skipped_windows import Windows
from workers.state import EMPTY_CHAIN
from workers.stream import Leaf, LeafStream, chain, leaf_digest, leaves_per_rank, sample_ids, validation_leaves


def dataset_of(rows: int, validation_rows: int = 0) -> tuple[TokenDataset, TokenDataset]:
    url = f"memory://stream-{rows}-{validation_rows}"
    try:
        train = TokenDataset.open(url, "train")
    except DataError:
        write_numbered_rows(url, rows, validation_rows=validation_rows)
        train = TokenDataset.open(url, "train")
    return train, TokenDataset.open(url, "validation")


def config_of(global_batch: int, micro_batch: int) -> DataConfig:
    return DataConfig(url="memory://", sequence_length=4, global_batch=global_batch, micro_batch=micro_batch)


def run_steps(
    dataset: TokenDataset,
    config: DataConfig,
    world_size: int,
    steps: range,
    *,
    seed: int = 0,
    skipped: Windows = (),
) -> dict[int, list[Leaf]]:
    """Every rank's leaves of ``steps`` in one World: by step, in leaf order, without surplus."""
    by_step: dict[int, list[Leaf]] = {step: [] for step in steps}
    counts = set()
    for rank in range(world_size):
        with LeafStream(dataset, config, seed, rank, world_size, skipped=skipped) as stream:
            stream.seek(steps.start)
            for step in steps:
                leaves = list(stream.leaves(step))
                counts.add(len(leaves))
                by_step[step] += [leaf for leaf in leaves if not leaf.is_surplus]
    assert counts <= {leaves_per_rank(config.num_leaves, world_size)}
    return {step: sorted(leaves, key=lambda leaf: leaf.index) for step, leaves in by_step.items()}


def ids_of(by_step: dict[int, list[Leaf]]) -> list[int]:
    return [int(row) for leaves in by_step.values() for leaf in leaves for row in leaf.sample_ids]


@settings(max_examples=150, deadline=None)
@given(num_rows=st.integers(1, 3000), epoch=st.integers(0, 1 << 40), seed=st.integers(0, (1 << 63) - 1))
def test_each_epoch_is_a_permutation_of_all_rows(num_rows: int, epoch: int, seed: int) -> None:
    ids = permute(seed, epoch, num_rows, np.arange(num_rows))
    assert np.array_equal(np.sort(ids), np.arange(num_rows))


@settings(max_examples=50, deadline=None)
@given(
    num_rows=st.integers(1, 50),
    start=st.integers(0, 1 << 50),
    cuts=st.lists(st.integers(0, 40), min_size=1, max_size=5),
)
def test_how_a_span_of_positions_is_cut_does_not_change_its_ids(num_rows: int, start: int, cuts: list[int]) -> None:
    whole = sample_ids(3, num_rows, start, sum(cuts))
    firsts = np.cumsum([0, *cuts])
    parts = [sample_ids(3, num_rows, start + int(first), cut) for first, cut in zip(firsts, cuts, strict=False)]
    assert np.array_equal(whole, np.concatenate(parts))


def test_ids_of_a_huge_dataset_need_no_memory_for_its_rows() -> None:
    num_rows = (1 << 60) + 12345
    ids = sample_ids(0, num_rows, num_rows - 500, 1000)
    assert len(set(ids[:500].tolist())) == 500
    assert ids.min() >= 0
    assert ids.max() < num_rows


def test_the_order_is_pinned_for_ever() -> None:
    """A change here makes every saved position point at other rows."""
    assert sample_ids(0, 20, 0, 20).tolist() == PINNED_EPOCH_0
    assert sample_ids(0, 10**12, 5, 3).tolist() == PINNED_LARGE


PINNED_EPOCH_0 = [10, 12, 4, 8, 17, 15, 16, 1, 7, 0, 14, 2, 9, 5, 6, 11, 13, 3, 19, 18]
PINNED_LARGE = [317915299241, 676484429386, 52833303537]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {tuple(sample_ids(seed, 20, epoch * 20, 20)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_every_row_comes_first_about_equally_often() -> None:
    firsts = Counter(int(permute(0, epoch, 10, np.array([0]))[0]) for epoch in range(4000))
    expected = 400
    chi_square = sum((firsts[row] - expected) ** 2 / expected for row in range(10))
    assert chi_square < 27.9  # 99.9 % of true shuffles lie below; the draw is fixed


@pytest.mark.parametrize("worlds", [(4, 2), (2, 4), (2, 1, 2), (3, 5, 1)])
def test_after_every_change_of_the_world_each_row_of_the_epoch_is_seen_once(worlds: tuple[int, ...]) -> None:  # B29
    dataset, _ = dataset_of(24)
    config = config_of(global_batch=8, micro_batch=2)
    steps = np.array_split(np.arange(1, 4), len(worlds))
    seen: list[int] = []
    for world_size, part in zip(worlds, steps, strict=True):
        seen += ids_of(run_steps(dataset, config, world_size, range(int(part[0]), int(part[-1]) + 1)))
    assert sorted(seen) == list(range(24))
    assert seen == sample_ids(0, 24, 0, 24).tolist()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_leaves_and_their_chain_do_not_depend_on_the_world_size(world_size: int) -> None:
    dataset, _ = dataset_of(24)
    config = config_of(global_batch=8, micro_batch=2)

    def chained(size: int) -> str:
        value = EMPTY_CHAIN
        for leaves in run_steps(dataset, config, size, range(1, 6)).values():
            assert [leaf.index for leaf in leaves] == [0, 1, 2, 3]
            value = chain(value, [leaf_digest(leaf.sample_ids) for leaf in leaves])
        return value

    assert chained(world_size) == chained(1)


def test_surplus_leaves_are_flagged_and_repeat_the_data_of_leaf_0() -> None:
    dataset, _ = dataset_of(24)
    with LeafStream(dataset, config_of(8, 2), 0, rank=2, world_size=3) as stream:
        stream.seek(1)
        first, surplus = stream.leaves(1)
    assert (first.index, first.is_surplus) == (2, False)
    assert (surplus.index, surplus.is_surplus) == (5, True)
    assert surplus.sample_ids.tolist() == sample_ids(0, 24, 0, 2).tolist()
    assert surplus.input_ids.shape == first.input_ids.shape


def test_a_resume_inside_epoch_1_goes_on_in_that_epochs_order() -> None:  # case B48
    dataset, _ = dataset_of(20)
    config = config_of(global_batch=1, micro_batch=1)
    unbroken = ids_of(run_steps(dataset, config, 1, range(1, 61)))
    resumed = ids_of(run_steps(dataset, config, 1, range(1, 28))) + ids_of(run_steps(dataset, config, 1, range(28, 61)))
    assert resumed == unbroken
    epochs = [unbroken[start : start + 20] for start in (0, 20, 40)]
    assert [len(set(epoch)) for epoch in epochs] == [20, 20, 20]
    assert epochs[0] != epochs[1] != epochs[2]


def test_batches_that_straddle_epochs_lose_and_repeat_nothing() -> None:
    dataset, _ = dataset_of(10)
    seen = ids_of(run_steps(dataset, config_of(4, 2), 2, range(1, 11)))
    assert Counter(seen) == dict.fromkeys(range(10), 4)


def test_inputs_and_labels_are_the_row_shifted_by_one() -> None:
    dataset, _ = dataset_of(24)
    dataset.rows = lambda _ids: np.arange(10).reshape(2, 5)  # type: ignore[method-assign,assignment]
    with LeafStream(dataset, config_of(2, 2), 0, 0, 1) as stream:
        stream.seek(1)
        (leaf,) = stream.leaves(1)
    assert leaf.input_ids.tolist() == [[0, 1, 2, 3], [5, 6, 7, 8]]
    assert leaf.labels.tolist() == [[1, 2, 3, 4], [6, 7, 8, 9]]
    assert leaf.input_ids.dtype == leaf.labels.dtype == torch.int64


def test_seek_can_begin_a_step_at_another_position() -> None:
    dataset, _ = dataset_of(24)
    with LeafStream(dataset, config_of(2, 2), 0, 0, 1) as stream:
        stream.seek(3, position=10)
        ids = [leaf.sample_ids.tolist() for step in (3, 4) for leaf in stream.leaves(step)]
    assert ids == [sample_ids(0, 24, 10, 2).tolist(), sample_ids(0, 24, 12, 2).tolist()]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_skipped_windows_are_cut_out_of_the_stream_and_of_nothing_else(world_size: int) -> None:
    dataset, _ = dataset_of(24)
    config, windows = config_of(6, 2), ((3, 4), (12, 6), (30, 1))
    skipped = {place for first, count in windows for place in range(first, first + count)}
    expected = [row for place, row in enumerate(sample_ids(0, 24, 0, 47).tolist()) if place not in skipped]
    assert ids_of(run_steps(dataset, config, world_size, range(1, 7), skipped=windows)) == expected


def test_steps_out_of_turn_and_half_read_steps_are_refused_until_a_seek() -> None:
    dataset, _ = dataset_of(24)
    with LeafStream(dataset, config_of(4, 2), 0, 0, 1) as stream:
        with pytest.raises(RuntimeError, match=r"seek\(1\) first"):
            stream.leaves(1)
        stream.seek(1)
        with pytest.raises(RuntimeError, match="stands at step 1 after 0 of 2 leaves"):
            stream.leaves(2)
        next(stream.leaves(1))
        with pytest.raises(RuntimeError, match="stands at step 1 after 1 of 2 leaves"):
            stream.leaves(1)
        stream.seek(1)
        assert [leaf.index for leaf in stream.leaves(1)] == [0, 1]


def test_making_and_reading_a_stream_leaves_the_random_state_alone() -> None:
    dataset, _ = dataset_of(24)
    before = torch.get_rng_state()
    run_steps(dataset, config_of(4, 2), 1, range(1, 3))
    assert torch.equal(before, torch.get_rng_state())


def test_a_stream_over_data_of_another_sequence_length_is_refused() -> None:
    dataset, _ = dataset_of(24)
    config = config_of(4, 2).model_copy(update={"sequence_length": 8})
    with pytest.raises(DataError, match=r"packed to sequence_length 4, data\.sequence_length is 8"):
        LeafStream(dataset, config, 0, 0, 1)


def test_digests_fit_a_float64_exactly_and_tell_orders_apart() -> None:
    digests = [leaf_digest(np.array(ids)) for ids in ([1, 2], [2, 1], [1, 2, 3])]
    assert len(set(digests)) == 3
    assert all(0 <= digest < 1 << 48 and int(float(digest)) == digest for digest in digests)


def test_the_chain_depends_on_history_and_on_order() -> None:
    one = chain(EMPTY_CHAIN, [1, 2])
    assert len(one) == 32
    assert len({one, chain(EMPTY_CHAIN, [2, 1]), chain(one, [1, 2]), chain(EMPTY_CHAIN, [1])}) == 4


def validation_ids(dataset: TokenDataset, num_leaves: int, micro_batch: int, world_size: int) -> list[list[int]]:
    def leaves() -> Iterator[Leaf]:
        for rank in range(world_size):
            part = list(validation_leaves(dataset, num_leaves, micro_batch, rank, world_size))
            lengths.add(len(part))
            yield from (leaf for leaf in part if not leaf.is_surplus)

    lengths: set[int] = set()
    ordered = sorted(leaves(), key=lambda leaf: leaf.index)
    assert len(lengths) == 1
    return [leaf.sample_ids.tolist() for leaf in ordered]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_the_validation_set_is_the_same_at_any_world_size(world_size: int) -> None:
    _, validation = dataset_of(8, validation_rows=9)
    assert validation_ids(validation, 3, 2, world_size) == [[0, 1], [2, 3], [4, 5]]
    assert validation_ids(validation, 100, 2, world_size) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_validation_split_smaller_than_one_leaf_repeats_its_rows_and_an_empty_one_is_refused() -> None:
    _, small = dataset_of(8, validation_rows=3)
    assert validation_ids(small, 8, 4, 1) == [[0, 1, 2, 0]]
    _, empty = dataset_of(8)
    with pytest.raises(DataError, match="no validation rows"):
        next(validation_leaves(empty, 8, 4, 0, 1))

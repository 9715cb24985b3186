"""Receipts to Manifest: every rank once, every tensor covered once, quick at 10,000 ranks."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.errors import CommitRefused
from storage.keys import StepKey, shard_key
from storage.manifest import AttemptRecord, ChunkPlace, Manifest, Receipt, ShardRecord, TensorLayout
from storage.merge import merge_receipts
from tests.fakes.checkpoints import RUN, TIME, attempt, prepare

KEY = StepKey(step=7, attempt=attempt())
Box = tuple[tuple[int, ...], tuple[int, ...]]


def receipt(rank: int, world_size: int, shape: tuple[int, ...], boxes: list[Box], **changes: object) -> Receipt:
    chunks = tuple(ChunkPlace(rank=rank, offsets=offsets, sizes=sizes) for offsets, sizes in boxes)
    shard = ShardRecord(
        rank=rank, key=shard_key(KEY, rank), size=100, digest="0" * 32, index_bytes=10, index_digest="0" * 32
    )
    fields: dict[str, object] = {
        "run_id": RUN,
        "step": KEY.step,
        "attempt": AttemptRecord.of(KEY.attempt),
        "world_size": world_size,
        "shard": shard,
        "tensors": {"w": TensorLayout(dtype="float32", shape=shape, level="L1", chunks=chunks)},
        "shared_state": {} if rank == 0 else None,
        "rank_state": {"rank": rank},
    }
    return Receipt.model_validate(fields | changes)


def merge(*receipts: Receipt) -> Manifest:
    return merge_receipts(receipts, time_utc=TIME, metadata={}, ledger=None)


def test_ranks_are_merged_in_order_whatever_the_order_of_arrival() -> None:
    parts = prepare(7, world_size=3)
    manifest = merge_receipts(parts.receipts[::-1], time_utc=TIME, metadata={"note": "x"}, ledger=None)
    assert [shard.rank for shard in manifest.shards] == [0, 1, 2]
    assert manifest.rank_states == ({"rank": 0}, {"rank": 1}, {"rank": 2})
    assert manifest.shared_state == {"step": 7}
    assert manifest.metadata == {"note": "x"}
    assert [chunk.offsets for chunk in manifest.tensors["w"].chunks] == [(0, 0), (8, 0), (16, 0)]


def test_empty_chunks_are_dropped() -> None:
    manifest = merge(receipt(0, 2, (3, 4), [((0, 0), (3, 4))]), receipt(1, 2, (3, 4), [((3, 0), (0, 4))]))
    assert [chunk.rank for chunk in manifest.tensors["w"].chunks] == [0]


def test_a_tensor_without_elements_needs_no_chunks() -> None:
    manifest = merge(receipt(0, 1, (0, 4), [((0, 0), (0, 4))]))
    assert manifest.tensors["w"].chunks == ()


def test_replicated_chunks_are_kept_from_the_lowest_rank() -> None:
    manifest = merge(*(receipt(rank, 3, (), [((), ())]) for rank in (2, 0, 1)))
    assert [chunk.rank for chunk in manifest.tensors["w"].chunks] == [0]


@pytest.mark.parametrize(
    ("boxes", "complaint"),
    [
        ([((0, 0), (2, 4)), ((3, 0), (1, 4))], r"tensor w .*has a gap: 12 of 16"),
        ([((0, 0), (3, 4)), ((2, 0), (2, 4))], r"tensor w is covered twice: .*overlap"),
        # as large as the tensor together, yet an overlap and a gap
        ([((0, 0), (2, 4)), ((1, 0), (2, 4))], r"tensor w is covered twice: .*overlap"),
        ([((0, 0), (4, 4)), ((4, 0), (1, 4))], r"tensor w .*reaches outside"),
        ([((0,), (4,))], r"tensor w has 2 dimensions"),
        ([], r"tensor w .*has a gap"),
    ],
)
def test_a_tensor_not_covered_exactly_once_is_refused_by_name(boxes: list[Box], complaint: str) -> None:
    with pytest.raises(CommitRefused, match=complaint):
        merge(receipt(0, 1, (4, 4), boxes))


def test_a_zero_dim_tensor_is_covered_by_its_one_chunk() -> None:
    assert len(merge(receipt(0, 1, (), [((), ())])).tensors["w"].chunks) == 1


@settings(deadline=None)
@given(cuts=st.lists(st.sets(st.integers(1, 9), max_size=3), min_size=3, max_size=3), drop=st.booleans())
def test_a_grid_is_accepted_whole_and_refused_with_a_cell_missing(cuts: list[set[int]], drop: bool) -> None:
    edges = [[0, *sorted(cut), 10] for cut in cuts]
    spans = [list(itertools.pairwise(edge)) for edge in edges]
    cells: list[Box] = [
        (tuple(low for low, _ in cell), tuple(high - low for low, high in cell)) for cell in itertools.product(*spans)
    ]
    if not drop:
        assert len(merge(receipt(0, 1, (10, 10, 10), cells)).tensors["w"].chunks) == len(cells)
        return
    with pytest.raises(CommitRefused, match="gap"):
        merge(receipt(0, 1, (10, 10, 10), cells[1:]))


WHOLE: list[Box] = [((0,), (4,))]


@pytest.mark.parametrize(
    ("second", "complaint"),
    [
        (receipt(1, 3, (4,), WHOLE), "world size 3"),
        (receipt(0, 2, (4,), WHOLE), "missing: rank 1; twice: rank 0"),
        (receipt(2, 2, (4,), WHOLE), "missing: rank 1; unknown: rank 2"),
        (receipt(1, 2, (4,), WHOLE, step=8), "Receipt of step-0000000008"),
        (receipt(1, 2, (4,), WHOLE, attempt=AttemptRecord.of(attempt(2))), "two attempts never make one Checkpoint"),
        (receipt(1, 2, (4,), WHOLE, run_id="other"), "of run other"),
        (receipt(1, 2, (5,), []), r"\(5,\) L1 on rank 1 but float32 \(4,\)"),
    ],
)
def test_receipts_that_do_not_belong_together_are_refused(second: Receipt, complaint: str) -> None:
    with pytest.raises(CommitRefused, match=complaint):
        merge(receipt(0, 2, (4,), WHOLE), second)


def test_a_missing_rank_is_named() -> None:
    with pytest.raises(CommitRefused, match="missing: rank 1"):
        merge(receipt(0, 2, (4,), WHOLE))


def test_a_shard_under_a_foreign_name_is_refused() -> None:
    good = receipt(0, 1, (4,), WHOLE)
    moved = good.shard.model_copy(update={"key": "shards/step-0000000007/elsewhere"})
    with pytest.raises(CommitRefused, match="not its name"):
        merge(good.model_copy(update={"shard": moved}))


def test_rank_zero_must_bring_the_shared_state() -> None:
    with pytest.raises(CommitRefused, match="rank 0 carries no shared state"):
        merge(receipt(0, 1, (4,), WHOLE, shared_state=None))


def test_nothing_cannot_be_committed() -> None:
    with pytest.raises(CommitRefused, match="no Receipts"):
        merge()


@pytest.mark.timeout(60)
def test_ten_thousand_ranks_are_merged() -> None:
    num, side = 10_000, 100
    receipts = [
        receipt(rank, num, (side * 8, side * 8), [((rank // side * 8, rank % side * 8), (8, 8))]) for rank in range(num)
    ]
    manifest = merge(*receipts)
    assert len(manifest.shards) == num
    assert len(manifest.tensors["w"].chunks) == num


def test_the_largest_bound_of_any_rank_and_all_fallbacks_reach_the_manifest() -> None:
    receipts = []
    for rank, bound in enumerate((None, 1e-4, 1e-3, 1e-5)):
        one = receipt(rank, 4, (8, 4), [((2 * rank, 0), (2, 4))], lossless_fallbacks=rank)
        layouts = {"w": one.tensors["w"].model_copy(update={"bound": bound})}
        receipts.append(one.model_copy(update={"tensors": layouts}))
    manifest = merge(*receipts)
    assert (manifest.tensors["w"].bound, manifest.lossless_fallbacks) == (1e-3, 6)
    assert merge(receipt(0, 1, (1,), [((0,), (1,))])).tensors["w"].bound is None

"""The Shard object: round trips, reading only what is needed, and every kind of damage found and named."""

from __future__ import annotations

import re
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.config import CheckpointConfig
from storage.errors import CorruptCheckpoint
from storage.frames import (
    TRAILER_BYTES,
    EncodedShard,
    RawChunk,
    check_index,
    encode_shard,
    itemsize_of,
    num_rows,
    read_index,
    read_rows,
    row_bytes,
)
from storage.keys import Attempt
from storage.manifest import ChunkIndex

ATTEMPT = Attempt(number=3, nonce="0123abcd")
KEY = "shards/step-0000000007/a000003-0123abcd/rank-00002.shard"


def chunk_of(data: bytes, sizes: tuple[int, ...], dtype: str = "float32", name: str = "w") -> RawChunk:
    return RawChunk(
        name=name,
        dtype=dtype,
        offsets=(0,) * len(sizes),
        sizes=sizes,
        level="L1",
        itemsize=itemsize_of(dtype),
        data=memoryview(data),
    )


def shard_of(*chunks: RawChunk, config: CheckpointConfig | None = None) -> EncodedShard:
    return encode_shard(chunks, step=7, attempt=ATTEMPT, rank=2, config=config or CheckpointConfig())


class Object:
    """A stored Shard object that counts what is read of it."""

    def __init__(self, shard: EncodedShard) -> None:
        self.content = bytearray(shard.data)
        self.reads: list[tuple[int, int]] = []

    def fetch(self, offset: int, length: int) -> bytes:
        self.reads.append((offset, length))
        return bytes(self.content[offset : offset + length])

    def rows(self, chunk: ChunkIndex, start: int, stop: int) -> bytes:
        return read_rows(chunk, start, stop, self.fetch, step=7, key=KEY, rank=2)


@settings(deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), max_size=4),
    dtype=st.sampled_from(["float32", "bfloat16", "int64", "bool", "complex128"]),
    encoding=st.sampled_from(["raw", "zstd", "shuffle-zstd", "planes-zstd"]),
    data=st.data(),
)
def test_any_rows_of_any_chunk_come_back(
    shapes: list[tuple[int, ...]], dtype: str, encoding: str, data: st.DataObject
) -> None:
    width = itemsize_of(dtype)
    rng = np.random.default_rng(1)
    raws = [rng.integers(0, 4, prod(shape) * width, np.uint8).tobytes() for shape in shapes]
    config = CheckpointConfig.model_validate({"encoding": encoding, "frame_bytes": 1 << 16})
    chunks = [chunk_of(raw, shape, dtype, f"t{i}") for i, (raw, shape) in enumerate(zip(raws, shapes, strict=True))]
    shard = shard_of(*chunks, config=config)
    stored = Object(shard)
    index = read_index(stored.fetch, shard.record(KEY), step=7)
    assert index == shard.index
    for chunk, raw in zip(index.chunks, raws, strict=True):
        stop = data.draw(st.integers(0, num_rows(chunk.sizes)))
        start = data.draw(st.integers(0, stop))
        row = row_bytes(chunk.sizes, width)
        assert stored.rows(chunk, start, stop) == raw[start * row : stop * row]


def test_a_zero_dim_tensor_is_one_row_and_an_empty_one_has_no_frames() -> None:
    index = shard_of(chunk_of(b"abcd", (), name="step"), chunk_of(b"", (0, 8)), chunk_of(b"", (8, 0))).index
    assert [frame.rows for frame in index.chunks[0].frames] == [(0, 1)]
    assert index.chunks[1].frames == ()
    assert index.chunks[2].frames == ()


@pytest.mark.parametrize(
    ("total", "expected"), [(100 << 10, 100 << 10), (1 << 20, 256 << 10), (8 << 20, 512 << 10), (64 << 20, 1 << 20)]
)
def test_frames_grow_with_the_chunk_between_a_quarter_and_one_mebibyte(total: int, expected: int) -> None:
    shard = shard_of(chunk_of(bytes(total), (total // 1024, 256)))
    assert shard.index.chunks[0].frames[0].raw_bytes == expected


def test_only_the_frames_that_are_needed_are_read_and_in_one_request() -> None:
    raw = np.random.default_rng(0).bytes(8 << 20)
    shard = shard_of(chunk_of(raw, (8192, 256)))
    stored, chunk = Object(shard), shard.index.chunks[0]
    assert stored.rows(chunk, 1000, 1100) == raw[1000 * 1024 : 1100 * 1024]
    assert len(stored.reads) == 1
    assert stored.reads[0][1] < 1.2 * (1 << 20)


def test_a_chunk_that_does_not_shrink_comes_back_all_the_same() -> None:
    raw = np.random.default_rng(0).bytes(300 << 10)
    shard = shard_of(chunk_of(raw, (300 << 10,), "uint8"))
    assert shard.index.chunks[0].encoding == "planes-zstd"
    assert Object(shard).rows(shard.index.chunks[0], 0, 300 << 10) == raw


@pytest.mark.parametrize(("sizes", "length"), [((4, 4), 60), ((4, 4), 68), ((0,), 4), ((), 8)])
def test_a_chunk_whose_bytes_do_not_match_its_sizes_is_refused(sizes: tuple[int, ...], length: int) -> None:
    with pytest.raises(ValueError, match="must hold"):
        shard_of(chunk_of(bytes(length), sizes))


def test_an_unknown_dtype_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="float12"):
        itemsize_of("float12")


@settings(deadline=None)
@given(position=st.integers(0, 10**9), bit=st.integers(0, 7))
def test_one_flipped_bit_anywhere_is_found_and_named(position: int, bit: int) -> None:
    raw = np.random.default_rng(0).bytes(1 << 12)
    shard = shard_of(chunk_of(raw, (1024,)), chunk_of(raw, (32, 32), name="v"))
    stored = Object(shard)
    stored.content[position % shard.size] ^= 1 << bit

    def read_everything() -> None:
        index = read_index(stored.fetch, shard.record(KEY), step=7)
        for chunk in index.chunks:
            stored.rows(chunk, 0, num_rows(chunk.sizes))

    with pytest.raises(CorruptCheckpoint) as caught:
        read_everything()
    assert (caught.value.step, caught.value.key, caught.value.rank) == (7, KEY, 2)


def test_damage_names_the_frame_and_its_tensor() -> None:
    raw = np.random.default_rng(0).bytes(1 << 20)
    shard = shard_of(chunk_of(raw, (1024, 256), name="layers.0.weight"))
    stored = Object(shard)
    stored.content[shard.index.chunks[0].frames[2].offset + 5] ^= 1
    assert stored.rows(shard.index.chunks[0], 0, 512) == raw[: 512 * 1024]
    with pytest.raises(CorruptCheckpoint, match=r"frame 2 \(rows 512 to 768\) of layers.0.weight: hash mismatch"):
        stored.rows(shard.index.chunks[0], 0, 1024)


def test_a_truncated_object_is_found() -> None:
    shard = shard_of(chunk_of(bytes(4096), (1024,)))
    stored = Object(shard)
    del stored.content[-1:]
    with pytest.raises(CorruptCheckpoint):
        read_index(stored.fetch, shard.record(KEY), step=7)


def test_an_index_larger_than_the_object_is_refused_before_it_is_fetched() -> None:
    shard = shard_of(chunk_of(bytes(4096), (1024,)))
    stored = Object(shard)
    record = shard.record(KEY).model_copy(update={"index_bytes": 1 << 50})
    with pytest.raises(CorruptCheckpoint, match="does not fit"):
        read_index(stored.fetch, record, step=7)
    assert stored.reads == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rows": (0, 200)}, "expected them from|bytes for"),
        ({"rows": (5, 5)}, "expected them from"),
        ({"raw_bytes": 1 << 60}, "bytes for"),
        ({"offset": 1}, "starts at"),
    ],
)
def test_frames_that_do_not_tile_are_refused(change: dict[str, object], reason: str) -> None:
    shard = shard_of(chunk_of(bytes(1 << 20), (1024, 256)))
    chunk = shard.index.chunks[0]
    frames = (chunk.frames[0], chunk.frames[1].model_copy(update=change), *chunk.frames[2:])
    index = shard.index.model_copy(update={"chunks": (chunk.model_copy(update={"frames": frames}),)})
    found = check_index(index, shard.size - shard.index_bytes - TRAILER_BYTES)
    assert found is not None
    assert re.search(reason, found)


def test_missing_rows_are_refused_when_read() -> None:
    shard = shard_of(chunk_of(bytes(1 << 20), (1024, 256)))
    chunk = shard.index.chunks[0]
    short = chunk.model_copy(update={"frames": chunk.frames[:-1]})
    with pytest.raises(CorruptCheckpoint, match="hold 768 rows"):
        Object(shard).rows(short, 0, 1024)


def test_a_shard_of_another_step_or_rank_is_refused() -> None:
    shard = shard_of(chunk_of(bytes(4), (1,)))
    with pytest.raises(CorruptCheckpoint, match="step 7, rank 2"):
        read_index(Object(shard).fetch, shard.record(KEY), step=8)
    with pytest.raises(CorruptCheckpoint, match="step 7, rank 2"):
        read_index(Object(shard).fetch, shard.record(KEY).model_copy(update={"rank": 1}), step=7)

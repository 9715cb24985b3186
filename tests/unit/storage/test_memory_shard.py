from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import xxhash

from storage.errors import CorruptCheckpoint, StorageError
from storage.frames import read_index
from storage.keeper_protocol import BufferLease, SealedSnapshot
from storage.manifest import Receipt, ShardIndex
from storage.memory_shard import FILLER, index_snapshot, read_receipt
from storage.shipping import tensor_layouts
from storage.snapshot_format import SnapshotHeader, StagedChunk, assign_offsets, read_header, write_header
from storage.transport import ReplicaRef
from tests.fakes.memory_bench import FIRST, SECOND, arrays, read_arrays
from tests.fakes.snapshot_writer import fill, make_header, sealed

CONTENT = arrays(3.0)


def snapshot_of(header: SnapshotHeader, buffer: bytearray, digest: str) -> SealedSnapshot:
    return sealed(header, BufferLease(lease_id="x", path="x", num_bytes=len(buffer)), digest)


def whole(rank: int = 1) -> tuple[bytes, ReplicaRef]:
    """A raw Shard object and its name."""
    header, num_bytes = make_header(CONTENT, attempt=FIRST, step=7, rank=rank)
    buffer = bytearray(np.random.default_rng(1).bytes(num_bytes))  # what an earlier Snapshot left between the chunks
    digest = fill(buffer, header, CONTENT)
    shard = index_snapshot(snapshot_of(header, buffer, digest), memoryview(buffer))
    content = bytes(buffer) + shard.tail
    assert (shard.num_bytes, shard.digest) == (len(content), xxhash.xxh3_128_hexdigest(content))
    ref = ReplicaRef(
        run_id="run", attempt=FIRST, step=7, rank=rank, world_size=2, num_bytes=len(content), digest=shard.digest
    )
    return content, ref


def receipt_of(content: bytes, ref: ReplicaRef) -> Receipt:
    return read_receipt(ref, memoryview(content))


def test_any_reader_of_shards_reads_the_tensors_from_it() -> None:
    content, ref = whole()
    receipt = receipt_of(content, ref)
    found = read_arrays(content, receipt)
    assert sorted(found) == ["bias", "weight"]
    for name, array in found.items():
        np.testing.assert_array_equal(array, CONTENT[name])
    assert receipt.tensors == tensor_layouts(read_header(content), index_of(content, receipt))


def index_of(content: bytes, receipt: Receipt) -> ShardIndex:
    return read_index(lambda offset, length: content[offset : offset + length], receipt.shard, step=receipt.step)


def test_no_byte_is_without_a_digest() -> None:
    content, ref = whole()
    receipt = receipt_of(content, ref)
    index = index_of(content, receipt)
    assert sum(frame.stored_bytes for chunk in index.chunks for frame in chunk.frames) == (
        len(content) - receipt.shard.index_bytes - 24
    )
    for chunk in index.chunks:
        raw = content[chunk.frames[0].offset : chunk.frames[-1].offset + chunk.frames[-1].stored_bytes]
        assert chunk.raw_digest == xxhash.xxh3_64_hexdigest(raw)
        for frame in chunk.frames:
            stored = content[frame.offset : frame.offset + frame.stored_bytes]
            assert frame.digest == xxhash.xxh3_64_hexdigest(stored)
            assert frame.stored_bytes <= 1 << 20
    assert FILLER in {chunk.name for chunk in index.chunks}


@pytest.mark.parametrize("position", [-30, 500_000])
def test_a_changed_byte_is_found_by_the_reader(position: int) -> None:
    content, ref = whole()
    receipt = receipt_of(content, ref)
    changed = bytearray(content)
    changed[position] ^= 1
    with pytest.raises(CorruptCheckpoint):
        read_arrays(bytes(changed), receipt)


@pytest.mark.parametrize(
    "change",
    [{"run_id": "other"}, {"attempt": SECOND}, {"step": 8}, {"rank": 0}, {"world_size": 3}, {"num_bytes": 100}],
)
def test_it_is_refused_under_another_name(change: dict[str, object]) -> None:
    content, ref = whole()
    with pytest.raises(StorageError, match="in memory: its header says"):
        receipt_of(content, replace(ref, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize("trailer", [bytes(24), b"\xff" * 8 + b"\x01\0\0\0" + bytes(4) + b"RAYSUME\n"])
def test_it_is_refused_without_a_trailer_that_fits(trailer: bytes) -> None:
    content, ref = whole()
    with pytest.raises(StorageError, match="does not end as"):
        receipt_of(content[:-24] + trailer, ref)


def test_a_buffer_that_was_not_sealed_so_is_refused() -> None:
    header, num_bytes = make_header(CONTENT, attempt=FIRST, step=7)
    buffer = bytearray(num_bytes)
    digest = fill(buffer, header, CONTENT)
    with pytest.raises(StorageError, match="written after it was sealed"):
        index_snapshot(replace(snapshot_of(header, buffer, digest), step=8), memoryview(buffer))


def test_elements_of_another_width_than_their_type_are_refused() -> None:
    chunk = StagedChunk(name="w", dtype="int64", shape=(4,), offsets=(0,), sizes=(4,), level="L1", num_bytes=16)
    header, num_bytes = assign_offsets(
        SnapshotHeader(
            run_id="run",
            attempt=FIRST,
            step=1,
            rank=0,
            world_size=1,
            chunks=(chunk,),
            shared_state={},
            rank_state={},
        )
    )
    buffer = bytearray(num_bytes)
    digest = write_header(buffer, header)
    with pytest.raises(StorageError, match="w of int64 has elements of 4 bytes"):
        index_snapshot(snapshot_of(header, buffer, digest), memoryview(buffer))


def test_names_and_scalars_of_every_kind_survive() -> None:
    names = ('quo"te', "back\\slash", "u\u0308mlaut", "a.b")
    chunks = tuple(
        StagedChunk(name=name, dtype="int64", shape=(), offsets=(), sizes=(), level="L1", num_bytes=8) for name in names
    )
    header = SnapshotHeader(
        run_id="run", attempt=FIRST, step=1, rank=0, world_size=1, chunks=chunks, shared_state={}, rank_state={}
    )
    header, num_bytes = assign_offsets(header)
    buffer = bytearray(num_bytes)
    for number, chunk in enumerate(header.chunks):
        buffer[chunk.data_offset : chunk.data_offset + 8] = number.to_bytes(8, "little")
    digest = write_header(buffer, header)
    shard = index_snapshot(snapshot_of(header, buffer, digest), memoryview(buffer))
    content = bytes(buffer) + shard.tail
    ref = ReplicaRef(
        run_id="run", attempt=FIRST, step=1, rank=0, world_size=1, num_bytes=len(content), digest=shard.digest
    )
    receipt = receipt_of(content, ref)
    assert tuple(receipt.tensors) == names
    index = index_of(content, receipt)
    found = {chunk.name: content[chunk.frames[0].offset] for chunk in index.chunks if chunk.name != FILLER}
    assert found == {name: number for number, name in enumerate(names)}

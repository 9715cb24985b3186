from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from storage.arena import Arena, arena_directory, process_incarnation
from storage.buffer_map import BufferMap, map_buffer
from storage.errors import StorageError
from storage.keeper_protocol import BufferLease, LeaseRequest, SealedSnapshot
from storage.keys import Attempt
from storage.snapshot_format import (
    SnapshotHeader,
    StagedChunk,
    assign_offsets,
    header_digest,
    read_header,
    write_header,
)
from tests.fakes.snapshot_writer import fill, make_header

FIRST = Attempt(number=1, nonce="00000001")
SECOND = Attempt(number=2, nonce="00000002")
ARRAYS = {
    "weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "empty": np.zeros((0, 4), dtype=np.float32),
    "scale": np.full((1,), 7, dtype=np.float32),
}


class Processes:
    """Stands for the process table: pid to incarnation; what is not in it is gone."""

    def __init__(self) -> None:
        self.alive = {os.getpid(): 1, 100: 1, 200: 1}

    def __call__(self, pid: int) -> int | None:
        return self.alive.get(pid)


@pytest.fixture
def processes() -> Processes:
    return Processes()


@pytest.fixture
def arena(tmp_path: Path, processes: Processes) -> Iterator[Arena]:
    arena = Arena(tmp_path / "arena", "run", 1 << 20, processes)
    yield arena
    arena.close()


def request(
    step: int = 1, rank: int = 0, pid: int = 100, num_bytes: int = 1 << 16, attempt: Attempt = FIRST
) -> LeaseRequest:
    return LeaseRequest(run_id="run", attempt=attempt, step=step, rank=rank, pid=pid, num_bytes=num_bytes)


def seal(arena: Arena, lease: BufferLease | None, asked: LeaseRequest) -> BufferLease:
    assert lease is not None
    arena.seal(
        SealedSnapshot(
            lease_id=lease.lease_id,
            run_id=asked.run_id,
            attempt=asked.attempt,
            step=asked.step,
            rank=asked.rank,
            world_size=2,
            num_bytes=asked.num_bytes,
            header_digest="0" * 16,
            stall_s=0.0,
        )
    )
    return lease


def written() -> tuple[bytearray, SnapshotHeader, str]:
    header, num_bytes = make_header(ARRAYS, attempt=FIRST, step=7)
    buffer = bytearray(num_bytes)
    return buffer, header, fill(buffer, header, ARRAYS)


def test_header_and_chunk_bytes_come_back_as_written() -> None:
    buffer, header, digest = written()
    read = read_header(buffer)
    assert read == header
    assert header_digest(buffer) == digest
    for chunk in read.chunks:
        assert chunk.data_offset % 64 == 0
        data = np.frombuffer(buffer, np.float32, int(np.prod(chunk.sizes)), chunk.data_offset)
        np.testing.assert_array_equal(data.reshape(chunk.sizes), ARRAYS[chunk.name])


def test_zero_dim_and_non_finite_plain_state_survive() -> None:
    scalar = StagedChunk(name="s", dtype="int64", shape=(), offsets=(), sizes=(), level="L1", num_bytes=8)
    header, num_bytes = assign_offsets(
        SnapshotHeader(
            run_id="run",
            attempt=FIRST,
            step=0,
            rank=0,
            world_size=1,
            chunks=(scalar,),
            shared_state={"best": float("inf"), "big": 2**70},
            rank_state={"text": "\u00e9"},
        )
    )
    buffer = bytearray(num_bytes)
    write_header(buffer, header)
    assert read_header(buffer) == header
    assert header.chunks[0].itemsize == 8


def test_any_changed_header_byte_is_refused() -> None:
    buffer, _, _ = written()
    (length,) = struct.unpack("<Q", buffer[12:20])
    for position in range(20 + length + 8):
        tampered = bytearray(buffer)
        tampered[position] ^= 0x10
        with pytest.raises(StorageError):
            read_header(tampered)


@pytest.mark.parametrize("length", [0, 10, 27, 200])
def test_a_cut_buffer_is_refused(length: int) -> None:
    buffer, _, _ = written()
    with pytest.raises(StorageError):
        read_header(buffer[:length])


def test_a_header_length_beyond_the_buffer_is_refused() -> None:
    buffer, _, _ = written()
    buffer[12:20] = struct.pack("<Q", 1 << 60)
    with pytest.raises(StorageError, match="claims"):
        read_header(buffer)


def test_another_format_version_is_refused_by_number() -> None:
    buffer, _, _ = written()
    buffer[8:12] = struct.pack("<I", 9)
    with pytest.raises(StorageError, match="version 9"):
        read_header(buffer)


@pytest.mark.parametrize(
    "change",
    [
        {"data_offset": 1 << 40},
        {"data_offset": 0},
        {"num_bytes": 1 << 40},
        {"num_bytes": 47},
        {"num_bytes": -4},
        {"offsets": (4, 0)},
        {"offsets": (-1, 0)},
        {"sizes": (3,)},
    ],
)
def test_a_chunk_outside_its_place_or_tensor_is_refused(change: dict[str, object]) -> None:
    buffer, header, _ = written()
    bad = replace(header, chunks=(replace(header.chunks[0], **change), *header.chunks[1:]))  # type: ignore[arg-type]
    with pytest.raises(StorageError, match="weight"):
        write_header(buffer, bad)


def test_overlapping_chunks_are_refused() -> None:
    buffer, header, _ = written()
    weight, empty, scale = header.chunks
    bad = replace(header, chunks=(weight, empty, replace(scale, data_offset=weight.data_offset + 8)))
    with pytest.raises(StorageError, match="scale"):
        write_header(buffer, bad)


def test_a_lease_is_a_whole_allocated_file_of_the_owner_alone(arena: Arena) -> None:
    lease = arena.lease(request())
    assert lease is not None
    stat = os.stat(lease.path)
    assert stat.st_size >= lease.num_bytes
    assert stat.st_blocks * 512 >= lease.num_bytes
    assert stat.st_mode & 0o777 == 0o600
    assert arena.directory.stat().st_mode & 0o777 == 0o700


def test_what_the_worker_writes_is_what_the_keeper_reads(arena: Arena) -> None:
    asked = request()
    lease = arena.lease(asked)
    assert lease is not None
    with map_buffer(lease.path, lease.num_bytes) as buffer:
        buffer[:4] = b"abcd"
    seal(arena, lease, asked)
    view = arena.open(lease.lease_id, lease.num_bytes)
    assert (bytes(view[:4]), len(view), view.readonly) == (b"abcd", lease.num_bytes, True)


def test_a_rank_holds_two_buffers_and_no_third(arena: Arena) -> None:
    for step in (1, 2):
        seal(arena, arena.lease(request(step)), request(step))
    assert arena.lease(request(3)) is None
    assert arena.lease(request(3, rank=1, pid=200)) is not None


def test_a_released_buffer_is_the_next_one_leased(arena: Arena) -> None:
    first = seal(arena, arena.lease(request(1)), request(1))
    other = seal(arena, arena.lease(request(1, rank=1, pid=200)), request(1, rank=1, pid=200))
    assert arena.release(other.lease_id)
    assert arena.release(first.lease_id)
    again = arena.lease(request(2))
    assert again is not None
    assert again.path == first.path
    assert again.lease_id != first.lease_id
    assert arena.release(first.lease_id) is False


def test_asking_again_for_the_same_step_gives_the_same_lease(arena: Arena) -> None:
    assert arena.lease(request()) == arena.lease(request())


def test_a_lease_whose_answer_got_lost_does_not_block_the_rank_for_ever(arena: Arena) -> None:
    lost = [arena.lease(request(step)) for step in (1, 2)]
    third = arena.lease(request(3))
    assert third is not None
    assert lost[0] is not None
    assert third.path != lost[0].path
    with pytest.raises(StorageError, match="not open any more"):
        seal(arena, lost[0], request(1))


def test_an_unsealed_buffer_is_leased_again_only_when_its_process_is_gone(arena: Arena, processes: Processes) -> None:
    held = arena.lease(request(pid=100))
    while_alive = arena.lease(request(rank=1, pid=200))
    assert held is not None
    assert while_alive is not None
    assert while_alive.path != held.path
    del processes.alive[100]
    after = arena.lease(request(2, rank=1, pid=200))
    assert after is not None
    assert after.path == held.path


def test_a_pid_used_by_another_process_counts_as_gone(arena: Arena, processes: Processes) -> None:
    held = arena.lease(request(pid=100))
    processes.alive[100] = 2
    after = arena.lease(request(rank=1, pid=200))
    assert held is not None
    assert after is not None
    assert after.path == held.path


def test_a_sealed_buffer_outlives_its_process(arena: Arena, processes: Processes) -> None:
    held = seal(arena, arena.lease(request(pid=100)), request(pid=100))
    del processes.alive[100]
    other = arena.lease(request(rank=1, pid=200))
    assert other is not None
    assert other.path != held.path
    assert len(arena.open(held.lease_id, 10)) == 10


def test_a_buffer_left_over_from_an_older_attempt_is_never_given_out_again(arena: Arena) -> None:
    left_over = arena.lease(request(pid=100))
    new = arena.lease(request(attempt=SECOND, pid=100))
    assert left_over is not None
    assert new is not None
    assert new.path != left_over.path
    assert not Path(left_over.path).exists()


def test_a_process_that_is_not_seen_gets_no_buffer(arena: Arena) -> None:
    with pytest.raises(StorageError, match="999 is not seen"):
        arena.lease(request(pid=999))


def test_over_the_budget_a_first_buffer_is_an_error_and_a_second_is_none(arena: Arena) -> None:
    big = 700_000
    assert arena.lease(request(1, num_bytes=big)) is not None
    assert arena.lease(request(2, num_bytes=big)) is None
    with pytest.raises(StorageError, match="rank 1 step 1: a Snapshot needs 720896 bytes"):
        arena.lease(request(1, rank=1, pid=200, num_bytes=big))
    assert arena.used_bytes <= 1 << 20


def test_free_buffers_make_room_for_a_bigger_one(arena: Arena) -> None:
    small = arena.lease(request(1, num_bytes=400_000))
    assert small is not None
    assert arena.give_back(small.lease_id)
    big = arena.lease(request(2, rank=1, pid=200, num_bytes=900_000))
    assert big is not None
    assert not Path(small.path).exists()
    assert arena.used_bytes <= 1 << 20


def test_a_sealed_buffer_is_not_given_back_by_its_worker(arena: Arena) -> None:
    lease = seal(arena, arena.lease(request()), request())
    assert arena.give_back(lease.lease_id) is False
    assert len(arena.open(lease.lease_id, 1)) == 1


def test_sealing_for_another_step_is_refused(arena: Arena) -> None:
    lease = arena.lease(request(1))
    with pytest.raises(StorageError, match="rank 0 step 2"):
        seal(arena, lease, request(2))


def test_close_removes_the_directory_and_refuses_further_leases(arena: Arena) -> None:
    arena.lease(request())
    arena.close()
    assert not arena.directory.exists()
    with pytest.raises(StorageError, match="closed"):
        arena.lease(request(2))


def test_a_directory_deleted_under_the_arena_is_an_error_not_a_crash(arena: Arena) -> None:
    lease = arena.lease(request())
    assert lease is not None
    arena.give_back(lease.lease_id)
    for file in arena.directory.iterdir():
        file.unlink()
    arena.directory.rmdir()
    with pytest.raises(StorageError, match="no buffer of 65536 bytes"):
        arena.lease(request(2))


def test_the_arena_of_a_living_keeper_is_not_taken(arena: Arena, processes: Processes) -> None:
    with pytest.raises(StorageError, match="living Keeper"):
        Arena(arena.directory, "run", 1 << 20, processes)


def test_what_a_dead_keeper_left_is_removed(tmp_path: Path) -> None:
    namespace = os.readlink("/proc/self/ns/pid")
    for node in ("mine", "other"):
        stale = tmp_path / f"raysume-run-{node}"
        stale.mkdir()
        (stale / "keeper.pid").write_text(f"{os.getpid()} 12 {namespace}")
        (stale / "buffer-0").write_bytes(b"old")
    arena = Arena(tmp_path / "raysume-run-mine", "run", 1 << 20)
    assert [file.name for file in arena.directory.iterdir()] == ["keeper.pid"]
    assert not (tmp_path / "raysume-run-other").exists()
    arena.close()


def test_the_arena_of_a_keeper_in_another_pid_namespace_is_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "raysume-run-other"
    other.mkdir()
    (other / "keeper.pid").write_text("1 12 pid:[1]")
    Arena(tmp_path / "raysume-run-mine", "run", 1 << 20).close()
    assert other.exists()


def test_a_mapping_is_kept_while_the_file_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "buffer"
    path.write_bytes(b"old" + bytes(5000))
    buffers = BufferMap()
    first = buffers.open(str(path), 4)
    second = buffers.open(str(path), 4000)
    assert first.obj is second.obj
    path.rename(tmp_path / "kept-so-that-its-inode-is-not-used-again")
    path.write_bytes(b"new" + bytes(5000))
    assert bytes(buffers.open(str(path), 3)) == b"new"
    buffers.close()


def test_a_file_that_is_gone_or_too_short_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"1234")
    buffers = BufferMap()
    with pytest.raises(StorageError, match="5 were expected"):
        buffers.open(str(tmp_path / "short"), 5)
    with pytest.raises(StorageError, match="cannot be mapped"):
        buffers.open(str(tmp_path / "gone"), 5)


def test_the_directory_names_run_and_node_and_nothing_outside() -> None:
    assert str(arena_directory("run-1", "ab12")) == "/dev/shm/raysume-run-1-ab12"
    with pytest.raises(ValueError, match="directory name"):
        arena_directory("../run", "ab12")


def test_this_process_is_alive_and_an_unused_pid_is_gone() -> None:
    assert process_incarnation(os.getpid()) is not None
    assert process_incarnation(2**22 + 1) is None

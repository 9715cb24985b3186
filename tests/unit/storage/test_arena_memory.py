"""Buffers of the arena that stay in memory: generations and replicas."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.arena import Arena, Hold, NoRoom
from storage.errors import StorageError
from storage.keeper_protocol import BufferLease, LeaseRequest, SealedSnapshot
from tests.fakes.memory_bench import FIRST

SIZE = 1 << 20


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    arena = Arena(tmp_path / "arena", "run", 1 << 24, generation_budget_bytes=1 << 23)
    yield arena
    arena.close()


def ask(step: int, *, is_generation: bool = True, num_bytes: int = SIZE) -> LeaseRequest:
    return LeaseRequest(
        run_id="run",
        attempt=FIRST,
        step=step,
        rank=0,
        pid=os.getpid(),
        num_bytes=num_bytes,
        is_generation=is_generation,
    )


def seal(arena: Arena, step: int, *, keep: bool, ship: bool = False) -> BufferLease | None:
    lease = arena.lease(ask(step, is_generation=keep))
    if lease is not None:
        arena.seal(
            SealedSnapshot(
                lease_id=lease.lease_id,
                run_id="run",
                attempt=FIRST,
                step=step,
                rank=0,
                world_size=1,
                num_bytes=SIZE,
                header_digest="",
                stall_s=0.0,
                ship=ship,
                keep=keep,
            )
        )
    return lease


def path_of(arena: Arena, lease_id: str) -> Path:
    path = arena.hold(lease_id, Hold.KEEP)
    assert path is not None
    return path


def test_three_generations_and_two_on_their_way_to_the_store_are_counted_apart(arena: Arena) -> None:
    assert all(seal(arena, step, keep=True) for step in (1, 2, 3))
    assert all(seal(arena, step, keep=False, ship=True) for step in (4, 5))
    assert seal(arena, 6, keep=True) is None
    assert seal(arena, 6, keep=False, ship=True) is None


def test_generations_that_are_only_being_shipped_any_more_are_bounded_too(arena: Arena) -> None:
    shipping = 0
    for step in range(1, 10):
        lease = seal(arena, step, keep=True, ship=True)
        if lease is None:
            break
        shipping += 1
        arena.release(lease.lease_id, Hold.KEEP)
    assert shipping == 5
    assert seal(arena, 20, keep=False, ship=True) is None


def test_a_buffer_is_free_after_its_last_hold_and_each_hold_ends_once(arena: Arena) -> None:
    lease = seal(arena, 1, keep=True, ship=True)
    assert lease is not None
    assert arena.hold(lease.lease_id, Hold.READ) is not None
    assert arena.release(lease.lease_id, Hold.KEEP)
    assert not arena.release(lease.lease_id, Hold.KEEP)
    assert arena.release(lease.lease_id, Hold.READ)
    assert len(arena.open(lease.lease_id, SIZE)) == SIZE
    assert arena.release(lease.lease_id, Hold.SHIP)
    assert arena.hold(lease.lease_id, Hold.READ) is None
    with pytest.raises(StorageError, match="no sealed buffer"):
        arena.open(lease.lease_id, SIZE)


def test_a_replica_never_takes_the_buffer_that_a_worker_has_mapped(arena: Arena) -> None:
    lease = seal(arena, 1, keep=True)
    assert lease is not None
    arena.release(lease.lease_id, Hold.KEEP)
    replica = arena.lease_for_replica(SIZE, "a replica")
    assert str(path_of(arena, replica)) != lease.path
    again = arena.lease(ask(2))
    assert again is not None
    assert again.path == lease.path


def test_a_room_for_a_replica_is_used_again_and_a_bigger_one_takes_its_place(arena: Arena) -> None:
    first = arena.lease_for_replica(SIZE, "a replica")
    path = path_of(arena, first)
    arena.release(first, Hold.KEEP)
    for _ in range(3):
        again = arena.lease_for_replica(SIZE - 100, "a replica")
        assert path_of(arena, again) == path
        arena.release(again, Hold.KEEP)
    for number in range(1, 6):
        arena.release(arena.lease_for_replica(SIZE + number * (1 << 16), "a replica"), Hold.KEEP)
    assert arena.used_bytes <= SIZE + 5 * (1 << 16)


def test_a_room_is_written_through_and_read_back(arena: Arena) -> None:
    replica = arena.lease_for_replica(SIZE, "a replica")
    arena.open(replica, SIZE, writable=True)[:4] = b"abcd"
    view = arena.open(replica, SIZE)
    assert (bytes(view[:4]), view.readonly) == (b"abcd", True)
    assert path_of(arena, replica).read_bytes()[:4] == b"abcd"


def test_generations_and_replicas_have_a_budget_of_their_own(arena: Arena) -> None:
    rooms = [arena.lease_for_replica(2 * SIZE, "a replica") for _ in range(4)]
    with pytest.raises(NoRoom, match=r"a replica needs 2097152 bytes .* 8388608 of 8388608 are in use"):
        arena.lease_for_replica(2 * SIZE, "a replica")
    with pytest.raises(NoRoom, match="rank 0 step 1: a Snapshot needs"):
        arena.lease(ask(1))
    assert arena.lease(ask(1, is_generation=False)) is not None
    arena.release(rooms[0], Hold.KEEP)
    assert arena.lease(ask(1)) is not None


def test_what_is_appended_stands_behind_the_snapshot_however_long_it_is(arena: Arena) -> None:
    lease = seal(arena, 1, keep=True)
    assert lease is not None
    before = arena.open(lease.lease_id, SIZE)
    for tail in (b"short", bytes(range(256)) * 4096):
        arena.append(lease.lease_id, SIZE, tail)
        assert bytes(arena.open(lease.lease_id, SIZE + len(tail))[SIZE:]) == tail
    assert len(before) == SIZE
    with pytest.raises(NoRoom, match="the index of"):
        arena.append(lease.lease_id, SIZE, bytes(8 * SIZE))

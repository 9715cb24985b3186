"""One driver per Run: on the in-memory store, with a fake clock whose sleeping lets other drivers act."""

# ruff: noqa: ARG002 - doubles of the store do not need every argument
from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest

from storage.errors import LeaseHeld, StoreUnavailable
from storage.keys import lease_key
from storage.lease import Lease, LeaseRecord, Owner, acquire, local_owner, process_is_alive
from storage.memory_store import MemoryStore
from storage.object_store import ObjectEntry

TTL_S = 15.0
SMALL, MIDDLE, LARGE = "00000001", "88888888", "ffffffff"


class World:
    """A store, a clock, and what happens while somebody sleeps."""

    def __init__(self, store: MemoryStore | None = None) -> None:
        self.store = store or MemoryStore()
        self.now_s = 0.0
        self.on_sleep: Callable[[], object] = lambda: None
        self.dead_pids: set[int] = set()

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.on_sleep()

    def acquire(self, nonce: str, host: str = "here", pid: int = 1, store: MemoryStore | None = None) -> Lease:
        return acquire(
            store or self.store,
            "run",
            nonce=nonce,
            ttl_s=TTL_S,
            owner=Owner(host=host, pid=pid, boot_id="boot"),
            clock=lambda: self.now_s,
            sleep=self.sleep,
            wall_clock=lambda: 0.0,
            is_alive=lambda pid: pid not in self.dead_pids,
        )

    def stored(self) -> list[str]:
        return [entry.key for entry in self.store.list("lease/")]

    def record(self, nonce: str) -> LeaseRecord:
        return LeaseRecord.model_validate_json(self.store.get(lease_key(nonce)))


@pytest.fixture
def world() -> World:
    return World()


def test_the_first_driver_gets_the_lease_without_waiting(world: World) -> None:
    lease = world.acquire(MIDDLE)
    assert lease.is_held()
    assert world.now_s == 0
    assert world.stored() == [lease_key(MIDDLE)]


def test_a_store_that_lists_late_gives_its_lease_to_the_only_driver() -> None:
    class Late(MemoryStore):
        def list(self, prefix: str, *, deadline_s: float = 60.0) -> list[ObjectEntry]:
            return []

    world = World(Late())
    lease = world.acquire(MIDDLE)
    lease.renew()
    assert lease.is_held()
    world.store.delete([lease_key(MIDDLE)])
    assert not lease.is_held(), "deleted by another driver, whatever the listing shows"


@pytest.mark.parametrize("newcomer", [SMALL, LARGE])
def test_a_second_driver_is_refused_and_leaves_nothing(world: World, newcomer: str) -> None:
    first = world.acquire(MIDDLE)
    before = world.store.get(lease_key(MIDDLE))
    world.on_sleep = first.renew
    with pytest.raises(LeaseHeld, match="pid 1 on here"):
        world.acquire(newcomer, pid=2)
    assert world.stored() == [lease_key(MIDDLE)]
    assert first.is_held()
    assert world.store.get(lease_key(MIDDLE)) != before


def test_a_refused_driver_writes_nothing_at_all(world: World) -> None:
    class ReadOnly(MemoryStore):
        def put(self, key: str, data: bytes | memoryview, *, deadline_s: float = 60.0) -> None:
            raise AssertionError(f"{key} was written")

        delete = put  # type: ignore[assignment]

    first = world.acquire(MIDDLE)
    world.on_sleep = first.renew
    view = ReadOnly()
    view._objects = world.store._objects
    with pytest.raises(LeaseHeld):
        world.acquire(SMALL, pid=2, store=view)


def test_a_driver_that_died_on_this_machine_is_replaced_at_once(world: World) -> None:
    world.acquire(MIDDLE, pid=7)
    world.dead_pids.add(7)
    lease = world.acquire(LARGE, pid=8)
    assert world.now_s == 0
    assert lease.is_held()
    assert world.stored() == [lease_key(LARGE)]
    assert world.record(LARGE).replaces == (MIDDLE,)


def test_the_pid_of_another_machine_says_nothing(world: World) -> None:
    first = world.acquire(MIDDLE, host="elsewhere", pid=7)
    world.dead_pids.add(7)
    world.on_sleep = first.renew
    with pytest.raises(LeaseHeld):
        world.acquire(LARGE, pid=8)


def test_a_driver_that_is_silent_for_a_whole_ttl_is_replaced(world: World) -> None:
    silent = world.acquire(MIDDLE, host="elsewhere")
    lease = world.acquire(LARGE)
    assert TTL_S <= world.now_s <= TTL_S + 2
    assert lease.is_held()
    assert not silent.is_held()


def test_a_driver_that_renews_late_but_within_the_ttl_keeps_its_lease(world: World) -> None:
    first = world.acquire(MIDDLE, host="elsewhere")

    def renew_once() -> None:
        if world.now_s == TTL_S - 1:
            first.renew()

    world.on_sleep = renew_once
    with pytest.raises(LeaseHeld):
        world.acquire(LARGE)


def test_a_driver_that_wakes_up_after_it_was_replaced_learns_it_and_stays_out(world: World) -> None:
    asleep = world.acquire(MIDDLE, host="elsewhere")
    lease = world.acquire(LARGE)
    for _ in range(2):
        with pytest.raises(LeaseHeld, match="took over"):
            asleep.renew()
        assert not asleep.is_held()
    assert world.stored() == [lease_key(LARGE)]
    assert lease.is_held()


def test_a_renewal_that_was_on_its_way_does_not_bring_a_lost_lease_back(world: World) -> None:
    asleep = world.acquire(MIDDLE, host="elsewhere")
    late = world.store.get(lease_key(MIDDLE))
    lease = world.acquire(LARGE)
    world.store.put(lease_key(MIDDLE), late)
    assert not asleep.is_held()
    assert lease.is_held()


def test_a_released_lease_is_free_at_once(world: World) -> None:
    first = world.acquire(MIDDLE, host="elsewhere")
    first.release()
    assert not first.is_held()
    assert world.stored() == []
    assert world.acquire(LARGE).is_held()
    assert world.now_s == 0


def test_renewal_changes_the_record_and_may_bring_a_new_attempt(world: World) -> None:
    lease = world.acquire(MIDDLE)
    counter = world.record(MIDDLE).counter
    lease.renew(attempt_number=4)
    lease.renew()
    assert world.record(MIDDLE).counter == counter + 2
    assert world.record(MIDDLE).attempt_number == 4


def test_a_record_of_another_version_is_respected_while_it_changes(world: World) -> None:
    key = lease_key(MIDDLE)
    world.store.put(key, b'{"version": 2, "counter": 0}')
    world.on_sleep = lambda: world.store.put(key, f'{{"version": 2, "counter": {world.now_s}}}'.encode())
    with pytest.raises(LeaseHeld, match=MIDDLE):
        world.acquire(LARGE)


def test_files_that_are_not_ours_are_neither_waited_for_nor_deleted(world: World) -> None:
    world.store.put("lease/readme.txt", b"hello")
    world.acquire(MIDDLE)
    assert world.now_s == 0
    assert "lease/readme.txt" in world.stored()


class _Paused(MemoryStore):
    """Runs ``meanwhile`` once, before its ``number``-th call: another driver acts while this one is held up."""

    def __init__(self, base: MemoryStore, number: int, meanwhile: Callable[[], object]) -> None:
        super().__init__()
        self._objects = base._objects
        self._left = number
        self._meanwhile = meanwhile

    def _count(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._meanwhile()

    def put(self, key: str, data: bytes | memoryview, *, deadline_s: float = 60.0) -> None:
        self._count()
        super().put(key, data, deadline_s=deadline_s)

    def get(self, key: str, *, deadline_s: float = 60.0) -> bytes:
        self._count()
        return super().get(key, deadline_s=deadline_s)

    def list(self, prefix: str, *, deadline_s: float = 60.0) -> list[ObjectEntry]:
        self._count()
        return super().list(prefix, deadline_s=deadline_s)

    def delete(self, keys: Sequence[str], *, deadline_s: float = 60.0) -> None:
        self._count()
        super().delete(keys, deadline_s=deadline_s)


@pytest.mark.parametrize("other", [SMALL, LARGE])
@pytest.mark.parametrize("number", range(1, 12))
def test_a_driver_overtaken_between_any_two_calls_never_shares_the_lease(world: World, other: str, number: int) -> None:
    winners: list[Lease] = []

    def overtake() -> None:
        try:
            winners.append(world.acquire(other, host="elsewhere"))
        except LeaseHeld:
            return

    with contextlib.suppress(LeaseHeld):
        winners.append(world.acquire(MIDDLE, store=_Paused(world.store, number, overtake)))
    holding = [lease for lease in winners if lease.is_held()]
    assert len(holding) == 1
    assert world.stored() == [lease_key(holding[0].nonce)]


@pytest.mark.parametrize("other", [SMALL, LARGE])
def test_of_two_newcomers_the_smaller_nonce_wins(world: World, other: str) -> None:
    """The other one has written its record and not yet looked when this one writes and looks."""
    candidate = LeaseRecord(
        run_id="run",
        nonce=other,
        host="elsewhere",
        pid=1,
        boot_id="boot",
        counter=1,
        renewed_at_utc="",
        attempt_number=0,
    )

    def appear() -> None:
        world.store.put(lease_key(other), candidate.model_dump_json().encode())

    # the other one gives way as soon as it looks, that is while this one sleeps
    world.on_sleep = lambda: world.store.delete([lease_key(other)])
    paused = _Paused(world.store, 2, appear)
    if other == SMALL:
        with pytest.raises(LeaseHeld):
            world.acquire(MIDDLE, store=paused)
        assert world.stored() == [lease_key(SMALL)]
    else:
        assert world.acquire(MIDDLE, store=paused).is_held()
        assert world.now_s == 1.0


def test_a_store_that_fails_is_not_a_free_lease(world: World) -> None:
    class Failing(MemoryStore):
        def list(self, prefix: str, *, deadline_s: float = 60.0) -> list[ObjectEntry]:
            raise StoreUnavailable("list", prefix, "no answer")

    with pytest.raises(StoreUnavailable):
        world.acquire(MIDDLE, store=Failing())


def test_a_process_is_alive_until_it_ends_even_if_nobody_waits_for_it() -> None:
    assert process_is_alive(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", "print(1)"], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.read()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not process_is_alive(child.pid)  # ended, not reaped
    child.wait(timeout=30)
    assert not process_is_alive(child.pid)


def test_this_process_knows_itself() -> None:
    assert local_owner() == local_owner()
    assert local_owner().pid == os.getpid()


def test_renewals_go_through_the_store_that_they_are_given(world: World) -> None:
    lease = world.acquire(MIDDLE)
    other = MemoryStore()
    other._objects = world.store._objects
    before = world.store.get(lease_key(MIDDLE))
    lease.renew_through(other)
    world.store = None  # type: ignore[assignment]
    lease.renew()
    assert other.get(lease_key(MIDDLE)) != before

"""Whether a driver lives, for someone who only looks: fake clock and process table, in-memory store."""

from __future__ import annotations

from collections.abc import Callable

from storage.keys import lease_key
from storage.lease import LeaseRecord, Owner
from storage.lease_watch import DriverSighting, watch_drivers
from storage.memory_store import MemoryStore

HERE = Owner(host="here", pid=1, boot_id="boot")
NONCE = "0000000a"


def record(*, host: str = "there", pid: int = 7, counter: int = 1) -> bytes:
    made = LeaseRecord(
        run_id="run", nonce=NONCE, host=host, pid=pid, boot_id="boot", counter=counter,
        renewed_at_utc="2026-01-01T00:00:00.000Z", attempt_number=3,
    )  # fmt: skip
    return made.model_dump_json().encode()


class Clock:
    """Moves only by sleeping; ``on_sleep`` is what happens meanwhile."""

    def __init__(self, on_sleep: Callable[[], None] = lambda: None) -> None:
        self.now_s = 0.0
        self.on_sleep = on_sleep

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.on_sleep()


def watch(store: MemoryStore, clock: Clock, *, ttl_s: float = 15.0, alive: bool = True) -> list[DriverSighting]:
    return watch_drivers(
        store, ttl_s=ttl_s, owner=HERE, clock=lambda: clock.now_s, sleep=clock.sleep, is_alive=lambda _: alive
    )


def test_no_record_means_no_driver_and_no_waiting() -> None:
    clock = Clock()
    assert watch(MemoryStore(), clock) == []
    assert clock.now_s == 0.0


def test_a_process_of_this_machine_is_known_at_once() -> None:
    store = MemoryStore()
    store.put(lease_key(NONCE), record(host="here"))
    for alive in (True, False):
        clock = Clock()
        (seen,) = watch(store, clock, alive=alive)
        assert seen.is_alive is alive
        assert clock.now_s == 0.0


def test_a_record_that_is_renewed_belongs_to_a_living_driver() -> None:
    store = MemoryStore()
    store.put(lease_key(NONCE), record())
    clock = Clock(lambda: store.put(lease_key(NONCE), record(counter=2)))
    (seen,) = watch(store, clock)
    assert seen.is_alive is True
    assert clock.now_s == 1.0
    assert "pid 7 on there, attempt 3" in str(seen)


def test_a_record_that_never_changes_is_stale_after_its_time_to_live() -> None:
    store = MemoryStore()
    store.put(lease_key(NONCE), record())
    clock = Clock()
    (seen,) = watch(store, clock)
    assert seen.is_alive is False
    assert clock.now_s == 15.0


def test_a_record_that_goes_away_meanwhile_is_no_driver() -> None:
    store = MemoryStore()
    store.put(lease_key(NONCE), record())
    (seen,) = watch(store, Clock(lambda: store.delete([lease_key(NONCE)])))
    assert seen.is_alive is False


def test_without_watching_nothing_is_claimed() -> None:
    store = MemoryStore()
    store.put(lease_key(NONCE), b"of another version")
    (seen,) = watch(store, Clock(), ttl_s=0.0)
    assert seen.is_alive is None
    assert seen.record is None


def test_files_that_are_no_leases_are_left_out() -> None:
    store = MemoryStore()
    store.put("lease/readme.txt", b"hello")
    assert watch(store, Clock()) == []

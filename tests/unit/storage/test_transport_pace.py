"""The bucket that a node's sends share, by a clock that moves only when told, and a real send through it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from storage.codec import digest128
from storage.errors import StoreUnavailable
from storage.keys import Attempt
from storage.transport import ReplicaRef
from storage.transport_client import Pace, send_replica
from storage.transport_server import TransportServer
from tests.fakes.replica_holder import FakeHolder
from tests.fakes.transport_peers import file_of

KEY = bytes(32)
FIRST = Attempt(number=1, nonce="00000001")


class Time:
    """Waiting moves it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def clock(self) -> float:
        return self.now_s

    def wait(self, wait_s: float) -> None:
        self.now_s += wait_s


def pace_of(time: Time, bytes_per_s: float) -> Pace:
    return Pace(bytes_per_s, clock=time.clock, wait=time.wait)


def test_what_goes_takes_as_long_as_the_cap_says() -> None:
    time = Time()
    pace = pace_of(time, 1000)
    for _ in range(100):
        pace.take(50, 60)
    assert time.now_s == pytest.approx(5.0)


def test_idle_time_is_saved_up_for_a_moment_only() -> None:
    time = Time()
    pace = pace_of(time, 1000)
    time.now_s = 3600.0
    for _ in range(10):
        pace.take(50, 60)
    assert time.now_s == pytest.approx(3600 + 0.45)


def test_what_cannot_go_in_time_is_not_taken() -> None:
    time = Time()
    pace = pace_of(time, 1000)
    with pytest.raises(TimeoutError, match="the deadline cannot be kept"):
        pace.take(5000, 4)
    assert time.now_s == 0.0
    pace.take(50, 60)
    assert time.now_s == pytest.approx(0.05)


def test_several_senders_share_one_cap() -> None:
    waits: list[float] = []
    pace = Pace(1000, clock=lambda: 0.0, wait=waits.append)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: pace.take(100, 60), range(40)))
    assert max(waits) == pytest.approx(4.0)


@pytest.mark.parametrize(("bytes_per_s", "expected"), [(0.5, 1), (100, 5), (1e9, 1 << 21)])
def test_pieces_are_small_enough_to_keep_moving(bytes_per_s: float, expected: int) -> None:
    assert Pace(bytes_per_s).piece_bytes == expected


@pytest.mark.parametrize("bytes_per_s", [0, -1.0, float("nan")])
def test_a_cap_of_nothing_is_refused(bytes_per_s: float) -> None:
    with pytest.raises(ValueError, match="nothing could ever be sent"):
        Pace(bytes_per_s)


def test_a_replica_goes_at_the_pace_or_not_at_all() -> None:
    holder, time, content = FakeHolder(), Time(), bytes(100_000)
    server = TransportServer(holder, run_id="run", node_id="n1", host="127.0.0.1", key=KEY)
    ref = ReplicaRef(
        run_id="run", attempt=FIRST, step=1, rank=0, world_size=1, num_bytes=len(content), digest=digest128(content)
    )
    try:
        with file_of(content) as source:
            with pytest.raises(StoreUnavailable, match="the deadline cannot be kept"):
                send_replica(server.address, KEY, ref, source, pace=Pace(0.01), deadline_s=20)
            assert holder.wait_dropped(1)
            assert send_replica(server.address, KEY, ref, source, pace=pace_of(time, 1000), deadline_s=20)
    finally:
        server.close()
    assert time.now_s == pytest.approx(100.0)
    assert holder.sealed[FIRST, 1, 0] == content

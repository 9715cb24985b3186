"""The asking end against peers that do the handshake and then misbehave, over real sockets: it never waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from storage.errors import StoreUnavailable
from storage.transport_client import ReplicaClient
from storage.transport_wire import Channel, Reply, Request
from tests.fakes.transport_peers import FIRST, KEY, RUN, WAIT_S, put, scripted_server, soon

LARGE = 64 << 20  # more than the buffers of a connection hold
STALL_S = 0.2


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"stall_s": STALL_S}, f"nothing moved for {STALL_S} s"), ({"deadline_s": STALL_S}, "the deadline passed")],
    ids=["stall", "deadline"],
)
def test_a_peer_that_stops_taking_bytes_is_unavailable(options: dict[str, Any], reason: str) -> None:
    is_over = threading.Event()

    def stop(channel: Channel) -> None:
        channel.receive(Request, soon())
        channel.send(Reply(verdict="go"), soon())
        assert is_over.wait(WAIT_S)

    with scripted_server(KEY, RUN, stop) as address:
        with pytest.raises(StoreUnavailable, match=reason):
            put(address, bytes(LARGE), **options)
        is_over.set()


def test_a_peer_that_takes_a_little_all_the_time_has_a_deadline_too() -> None:
    is_over = threading.Event()

    def trickle(channel: Channel) -> None:
        channel.receive(Request, soon())
        channel.send(Reply(verdict="go"), soon())
        while not is_over.wait(0.01):
            channel.sock.recv(4096)

    with scripted_server(KEY, RUN, trickle) as address:
        with pytest.raises(StoreUnavailable, match="the deadline passed"):
            put(address, bytes(LARGE), deadline_s=3 * STALL_S, stall_s=WAIT_S)
        is_over.set()


@pytest.mark.parametrize("num_answers", [0, 1])
def test_a_peer_that_never_answers_is_unavailable(num_answers: int) -> None:
    is_over = threading.Event()

    def keep_silent(channel: Channel) -> None:
        channel.receive(Request, soon())
        for _ in range(num_answers):
            channel.send(Reply(verdict="go"), soon())
        assert is_over.wait(WAIT_S)

    with scripted_server(KEY, RUN, keep_silent) as address:
        with pytest.raises(StoreUnavailable, match="the deadline passed"):
            put(address, b"short", deadline_s=STALL_S)
        is_over.set()


def test_an_answer_that_makes_no_sense_is_unavailable() -> None:
    def answer(channel: Channel) -> None:
        channel.receive(Request, soon())
        channel.send(Reply(verdict="missing"), soon())

    with scripted_server(KEY, RUN, answer) as address, pytest.raises(StoreUnavailable, match="missing"):
        put(address, b"short")


def part_of(content: bytes) -> Callable[[Channel], None]:
    """Promises the bytes, sends these and hangs up."""

    def send_part(channel: Channel) -> None:
        channel.receive(Request, soon())
        channel.send(Reply(verdict="bytes"), soon())
        channel.sock.sendall(content)

    return send_part


def test_a_fetch_is_tried_once_more_when_the_connection_breaks() -> None:
    with scripted_server(KEY, RUN, part_of(b"012"), part_of(b"0123456789")) as address:
        client = ReplicaClient(address, KEY, RUN, deadline_s=WAIT_S)
        assert client.fetch(FIRST, 3, 0, 0, 10) == b"0123456789"
        client.close()
    with scripted_server(KEY, RUN, part_of(b"012"), part_of(b"01")) as address:
        client = ReplicaClient(address, KEY, RUN, deadline_s=WAIT_S)
        with pytest.raises(StoreUnavailable, match=r"fetch .*rank-00000.*n9.*closed the connection"):
            client.fetch(FIRST, 3, 0, 0, 10)
        client.close()


def test_fetches_one_after_the_other_share_a_connection() -> None:
    def answer_thrice(channel: Channel) -> None:
        for _ in range(3):
            part_of(b"0123456789")(channel)

    with scripted_server(KEY, RUN, answer_thrice) as address:
        client = ReplicaClient(address, KEY, RUN, deadline_s=WAIT_S)
        for _ in range(3):
            assert client.fetch(FIRST, 3, 0, 0, 10) == b"0123456789"
        client.close()


def test_a_peer_that_stops_sending_is_unavailable() -> None:
    is_over = threading.Event()

    def stall(channel: Channel) -> None:
        part_of(b"012")(channel)
        assert is_over.wait(WAIT_S)

    with scripted_server(KEY, RUN, stall) as address:
        client = ReplicaClient(address, KEY, RUN, deadline_s=STALL_S)
        with pytest.raises(StoreUnavailable, match="nothing moved"):
            client.fetch(FIRST, 3, 0, 0, 10)
        client.close()
        is_over.set()

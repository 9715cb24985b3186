"""Transfers that go wrong, over real sockets: nothing is sealed, the room is dropped, the server goes on serving."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from storage.codec import digest128
from storage.errors import ObjectMissing, StorageError, StoreUnavailable
from storage.transport import ReplicaRef
from storage.transport_client import ReplicaClient, send_replica
from storage.transport_server import TransportLimits, TransportServer
from storage.transport_wire import Channel, Fetch, Put, Reply, Request
from tests.fakes.replica_holder import FakeHolder, FakeRoom
from tests.fakes.transport_peers import FIRST, KEY, RUN, WAIT_S, call, put, ref_of, soon, take

MIB = 1 << 20
LARGE = 64 * MIB  # more than the buffers of a connection hold
STALL_S = 0.2


@pytest.fixture
def holder() -> FakeHolder:
    return FakeHolder()


@pytest.fixture
def start(holder: FakeHolder) -> Iterator[Callable[..., TransportServer]]:
    started: list[TransportServer] = []

    def start(**changed: Any) -> TransportServer:
        limits = TransportLimits(**changed)
        started.append(TransportServer(holder, run_id=RUN, node_id="n1", host="127.0.0.1", key=KEY, limits=limits))
        return started[-1]

    yield start
    for server in started:
        server.close()


def begin(server: TransportServer, ref: ReplicaRef) -> Channel:
    """A replica is announced and welcome; its bytes are up to the test."""
    channel = call(server.address, KEY, RUN)
    channel.send(Request(body=Put.of(ref)), soon())
    assert channel.receive(Reply, soon()).verdict == "go"
    return channel


def serves_on(server: TransportServer, holder: FakeHolder) -> bool:
    return put(server.address, b"another", ref_of(b"another", step=99)) and not holder.open_rooms


def test_half_a_replica_is_dropped(holder: FakeHolder, start: Callable[..., TransportServer]) -> None:
    server = start()
    content = bytes(3 * MIB)
    channel = begin(server, ref_of(content))
    channel.sock.sendall(content[: 2 * MIB])
    channel.sock.close()
    assert holder.wait_dropped(1)
    assert not holder.sealed
    assert serves_on(server, holder)


def test_a_sender_that_stands_still_is_dropped(holder: FakeHolder, start: Callable[..., TransportServer]) -> None:
    server = start(stall_s=STALL_S)
    channel = begin(server, ref_of(bytes(3 * MIB)))
    channel.sock.sendall(bytes(MIB + 1))
    assert holder.wait_dropped(1)
    assert channel.sock.recv(1) == b""
    channel.sock.close()
    assert serves_on(server, holder)


def test_a_reader_that_stands_still_is_hung_up_on(holder: FakeHolder, start: Callable[..., TransportServer]) -> None:
    server = start(stall_s=STALL_S)
    holder.sealed[FIRST, 3, 0] = bytes(LARGE)
    channel = call(server.address, KEY, RUN)
    channel.send(Request(body=Fetch.of(FIRST, 3, 0, 0, LARGE)), soon())
    assert channel.receive(Reply, soon()).verdict == "bytes"
    for thread in [thread for thread in threading.enumerate() if thread.name == "transport-serve"]:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    channel.sock.close()
    assert serves_on(server, holder)


def test_a_connection_without_requests_is_closed(start: Callable[..., TransportServer]) -> None:
    channel = call(start(idle_s=0.1).address, KEY, RUN)
    assert channel.sock.recv(1) == b""
    channel.sock.close()


def test_what_arrives_changed_is_not_sealed(holder: FakeHolder, start: Callable[..., TransportServer]) -> None:
    server = start()
    content = bytearray(os.urandom(5 * MIB))
    ref = ref_of(bytes(content))
    content[4 * MIB] ^= 1
    with pytest.raises(StorageError, match=rf"digest {digest128(content)}, announced was {ref.digest}"):
        put(server.address, bytes(content), ref)
    assert holder.num_dropped == 1
    assert not holder.sealed
    assert serves_on(server, holder)


def test_what_is_larger_than_allowed_gets_no_room(holder: FakeHolder, start: Callable[..., TransportServer]) -> None:
    server = start(max_object_bytes=MIB)
    with pytest.raises(StorageError, match=f"{MIB + 1} bytes; at most {MIB} are taken"):
        put(server.address, bytes(MIB + 1))
    assert holder.num_rooms == 0
    assert serves_on(server, holder)


def test_a_replica_of_another_run_is_refused(holder: FakeHolder, start: Callable[..., TransportServer]) -> None:
    """Even from somebody with the key: he names it in the request, after a handshake for this one."""
    channel = call(start().address, KEY, RUN)
    other = Put.of(ref_of(b"x")).model_copy(update={"run_id": "another"})
    channel.send(Request(body=other), soon())
    reply = channel.receive(Reply, soon())
    assert (reply.verdict, reply.reason) == ("refused", "this is run run, not another")
    assert holder.num_rooms == 0
    channel.sock.close()


def test_a_seal_that_is_refused_is_told(
    holder: FakeHolder, start: Callable[..., TransportServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start()

    def refuse(_: FakeRoom) -> None:
        raise StorageError("a newer Attempt has begun")

    with monkeypatch.context() as patch:
        patch.setattr(FakeRoom, "seal", refuse)
        with pytest.raises(StorageError, match="a newer Attempt has begun"):
            put(server.address, b"late")
    assert not holder.sealed


@pytest.mark.parametrize("num_wrong", [-1, 1])
def test_a_holder_that_makes_wrong_room_harms_only_that_replica(
    holder: FakeHolder, start: Callable[..., TransportServer], monkeypatch: pytest.MonkeyPatch, num_wrong: int
) -> None:
    server = start()
    with monkeypatch.context() as patch:
        patch.setattr(FakeRoom, "view", property(lambda room: memoryview(bytearray(room.ref.num_bytes + num_wrong))))
        with pytest.raises(StoreUnavailable, match=r"closed the connection|reset by peer|Broken pipe"):
            put(server.address, b"some bytes")
    assert holder.num_dropped == 1
    assert serves_on(server, holder)


def test_a_range_outside_the_object_is_refused(holder: FakeHolder, start: Callable[..., TransportServer]) -> None:
    holder.sealed[FIRST, 3, 0] = b"0123456789"
    client = ReplicaClient(start().address, KEY, RUN, deadline_s=WAIT_S)
    for offset, length in ((0, 11), (10, 1), (1 << 61, 1)):
        with pytest.raises(StoreUnavailable, match=r"of an object of 10"):
            client.fetch(FIRST, 3, 0, offset, length)
    assert client.fetch(FIRST, 3, 0, 10, 0) == b""
    assert client.fetch(FIRST, 3, 0, 9, 1) == b"9"
    client.close()


def test_a_file_shorter_than_announced_is_said_so(
    holder: FakeHolder, start: Callable[..., TransportServer], tmp_path: Path
) -> None:
    server = start()
    (tmp_path / "buffer").write_bytes(b"12345")
    source = os.open(tmp_path / "buffer", os.O_RDONLY)
    with pytest.raises(StorageError, match="ends at byte 5; 6 bytes were announced"):
        send_replica(server.address, KEY, ref_of(b"123456"), source, pace=None, deadline_s=WAIT_S)
    os.close(source)
    assert holder.wait_dropped(1)


def test_a_fetch_goes_on_after_the_server_dropped_its_idle_connection(
    holder: FakeHolder, start: Callable[..., TransportServer]
) -> None:
    holder.sealed[FIRST, 3, 0] = b"0123456789"
    server = start(idle_s=0.05)
    client = ReplicaClient(server.address, KEY, RUN, deadline_s=WAIT_S)
    assert client.fetch(FIRST, 3, 0, 0, 10) == b"0123456789"
    for thread in [thread for thread in threading.enumerate() if thread.name == "transport-serve"]:
        thread.join(WAIT_S)
    assert client.fetch(FIRST, 3, 0, 5, 5) == b"56789"
    client.close()


def test_one_place_is_enough_when_idle_connections_give_way(
    holder: FakeHolder, start: Callable[..., TransportServer]
) -> None:
    holder.sealed[FIRST, 3, 0] = b"0123456789"
    server = start(max_connections=1)
    clients = [ReplicaClient(server.address, KEY, RUN, deadline_s=WAIT_S) for _ in range(3)]
    for client in clients:
        assert client.fetch(FIRST, 3, 0, 0, 10) == b"0123456789"
    for client in clients:
        client.close()


def test_a_server_that_is_full_says_so(start: Callable[..., TransportServer]) -> None:
    server = start(max_connections=1)
    channel = begin(server, ref_of(b"takes its time"))
    client = ReplicaClient(server.address, KEY, RUN, deadline_s=STALL_S)
    with pytest.raises(StoreUnavailable, match=r"serves as many as it may|the deadline passed"):
        client.fetch(FIRST, 3, 0, 0, 10)
    client.close()
    channel.sock.sendall(b"takes its time")
    assert channel.receive(Reply, soon()).verdict == "sealed"
    channel.sock.close()


def test_many_send_and_fetch_at_once(holder: FakeHolder, start: Callable[..., TransportServer]) -> None:
    server = start()
    contents = [os.urandom(MIB + number) for number in range(8)]
    client = ReplicaClient(server.address, KEY, RUN, deadline_s=WAIT_S)

    def carry(step: int) -> bool:
        return put(server.address, contents[step], ref_of(contents[step], step=step))

    def read(step: int) -> bool:
        return client.fetch(FIRST, step, 0, 7, MIB - 7) == contents[step][7:MIB]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(carry, range(8)))
        assert all(pool.map(read, list(range(8)) * 4))
    assert len(holder.sealed) == 8
    client.close()


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_closing_in_the_middle_of_transfers_leaves_nothing_behind(holder: FakeHolder) -> None:
    holder.sealed[FIRST, 3, 0] = bytes(LARGE)
    num_threads, num_files = threading.active_count(), num_open()
    server = TransportServer(holder, run_id=RUN, node_id="n1", host="127.0.0.1", key=KEY)
    writing = begin(server, ref_of(bytes(MIB), step=4))
    writing.sock.sendall(bytes(MIB // 2))
    reading, idle = (call(server.address, KEY, RUN) for _ in range(2))
    reading.send(Request(body=Fetch.of(FIRST, 3, 0, 0, LARGE)), soon())
    assert reading.receive(Reply, soon()).verdict == "bytes"
    server.close()
    assert holder.num_dropped == 1
    assert not holder.open_rooms
    assert threading.active_count() == num_threads
    for channel in (writing, reading, idle):
        channel.sock.close()
    assert num_open() == num_files
    server.close()
    with pytest.raises(StoreUnavailable):
        put(server.address, b"too late")


def test_a_closed_client_opens_nothing_more(holder: FakeHolder, start: Callable[..., TransportServer]) -> None:
    holder.sealed[FIRST, 3, 0] = b"0"
    server = start()
    num_files = num_open()
    client = ReplicaClient(server.address, KEY, RUN, deadline_s=WAIT_S)
    assert client.fetch(FIRST, 3, 0, 0, 1) == b"0"
    client.close()
    with pytest.raises(StoreUnavailable, match="this client is closed"):
        client.fetch(FIRST, 3, 0, 0, 1)
    for thread in [thread for thread in threading.enumerate() if thread.name == "transport-serve"]:
        thread.join(WAIT_S)
    assert num_open() == num_files


def test_what_is_dropped_meanwhile_is_missing(holder: FakeHolder, start: Callable[..., TransportServer]) -> None:
    holder.sealed[FIRST, 3, 0] = b"0"
    client = ReplicaClient(start().address, KEY, RUN, deadline_s=WAIT_S)
    assert client.fetch(FIRST, 3, 0, 0, 1) == b"0"
    holder.sealed.clear()
    with pytest.raises(ObjectMissing):
        client.fetch(FIRST, 3, 0, 0, 1)
    client.close()


def test_bytes_of_a_fetch_come_after_nothing_else(holder: FakeHolder, start: Callable[..., TransportServer]) -> None:
    """The wire as a client of another make would see it."""
    holder.sealed[FIRST, 3, 0] = b"0123456789"
    channel = call(start().address, KEY, RUN)
    for offset in (2, 0):
        channel.send(Request(body=Fetch.of(FIRST, 3, 0, offset, 4)), soon())
        assert channel.receive(Reply, soon()) == Reply(verdict="bytes")
        assert take(channel.sock, 4) == b"0123456789"[offset : offset + 4]
    channel.sock.close()

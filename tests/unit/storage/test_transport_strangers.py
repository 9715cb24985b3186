"""Who is not of the Run, over real sockets: it gets nothing, leaves nothing, and the server goes on serving."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from storage.codec import digest128
from storage.errors import StoreRefused, StoreUnavailable
from storage.transport import ReplicaRef
from storage.transport_client import ReplicaClient, send_replica
from storage.transport_server import TransportLimits, TransportServer
from storage.transport_wire import (
    MAGIC,
    NONCE_BYTES,
    PROOF_BYTES,
    Channel,
    Fetch,
    Handshake,
    Reply,
    Request,
    Verdict,
    wait_for,
)
from tests.fakes.replica_holder import FakeHolder
from tests.fakes.transport_peers import FIRST, KEY, RUN, WAIT_S, call, file_of, scripted_server, soon, take

OTHER_KEY = bytes(32)
CONTENT = b"what is held"
MAX_GUESTS = 4
NEVER_S = 10 * WAIT_S


def limits(handshake_s: float) -> TransportLimits:
    return TransportLimits(handshake_s=handshake_s, stall_s=NEVER_S, max_guests=MAX_GUESTS)


@pytest.fixture
def holder() -> FakeHolder:
    holder = FakeHolder()
    holder.sealed[FIRST, 3, 0] = CONTENT
    return holder


@pytest.fixture
def server(holder: FakeHolder) -> Iterator[TransportServer]:
    server = TransportServer(holder, run_id=RUN, node_id="n1", host="127.0.0.1", key=KEY, limits=limits(NEVER_S))
    yield server
    server.close()


def plain(server: TransportServer) -> socket.socket:
    return socket.create_connection((server.address.host, server.address.port), timeout=WAIT_S)


def is_hung_up(sock: socket.socket) -> bool:
    """The other side closes before the time-out, and says nothing more."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def fetch(server: TransportServer, key: bytes = KEY, run_id: str = RUN) -> bytes:
    client = ReplicaClient(server.address, key, run_id, deadline_s=WAIT_S)
    try:
        return bytes(client.fetch(FIRST, 3, 0, 0, len(CONTENT)))
    finally:
        client.close()


@pytest.mark.parametrize(("key", "run_id"), [(OTHER_KEY, RUN), (b"", RUN), (KEY, "another"), (KEY, "")])
def test_without_the_key_of_the_run_nothing_is_read_or_written(
    holder: FakeHolder, server: TransportServer, caplog: pytest.LogCaptureFixture, key: bytes, run_id: str
) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(StoreRefused, match="is not of run") as refused:
        fetch(server, key, run_id)
    ref = ReplicaRef(
        run_id=run_id or "x", attempt=FIRST, step=4, rank=0, world_size=1, num_bytes=4, digest=digest128(b"evil")
    )
    with file_of(b"evil") as source, pytest.raises(StoreRefused, match="is not of run"):
        send_replica(server.address, key, ref, source, pace=None, deadline_s=WAIT_S)
    assert holder.num_rooms == 0
    said = caplog.text + str(refused.value) + repr(refused.value)
    assert KEY.hex() not in said
    assert repr(KEY) not in said
    assert fetch(server) == CONTENT


def test_garbage_is_hung_up_on_and_others_are_served(server: TransportServer) -> None:
    for garbage in (b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" + bytes(64), os.urandom(1 << 16), bytes(40)):
        with plain(server) as sock:
            sock.sendall(garbage)
            assert is_hung_up(sock)
    assert fetch(server) == CONTENT


@pytest.mark.parametrize("said", [b"", MAGIC, MAGIC + bytes(NONCE_BYTES)], ids=["nothing", "a part", "no proof"])
def test_who_proves_nothing_in_time_is_hung_up_on(holder: FakeHolder, said: bytes) -> None:
    server = TransportServer(holder, run_id=RUN, node_id="n1", host="127.0.0.1", key=KEY, limits=limits(0.1))
    try:
        with plain(server) as sock:
            sock.sendall(said)
            answer = b"".join(iter(lambda: sock.recv(64), b""))
        assert len(answer) == (NONCE_BYTES if len(said) == len(MAGIC) + NONCE_BYTES else 0)
    finally:
        server.close()


def test_strangers_cost_no_thread_and_cannot_keep_others_out(server: TransportServer) -> None:
    num_threads = threading.active_count()
    strangers = [plain(server) for _ in range(3 * MAX_GUESTS)]
    assert fetch(server) == CONTENT
    for stranger in strangers[: 2 * MAX_GUESTS]:
        assert is_hung_up(stranger)  # they gave way to those that came later
    serving = sum(thread.name == "transport-serve" for thread in threading.enumerate())
    assert threading.active_count() - serving <= num_threads
    for stranger in strangers:
        stranger.close()


def test_a_proof_cannot_be_played_back(server: TransportServer) -> None:
    """Neither to the server that took it, nor turned round: the server's own proof is none of a client's."""
    with plain(server) as sock:
        sock.sendall(MAGIC + bytes(NONCE_BYTES))
        heard = Handshake(KEY, RUN, bytes(NONCE_BYTES), take(sock, NONCE_BYTES))
        sock.sendall(heard.client_proof())
        assert take(sock, 1) == Verdict.WELCOME
    for proof in (heard.client_proof(), heard.server_proof(Verdict.WELCOME)):
        with plain(server) as sock:
            sock.sendall(MAGIC + bytes(NONCE_BYTES))
            take(sock, NONCE_BYTES)
            sock.sendall(proof)
            assert take(sock, 1 + PROOF_BYTES) == Verdict.STRANGER + bytes(PROOF_BYTES)
            assert is_hung_up(sock)


@pytest.mark.parametrize(
    "welcome",
    [
        lambda _: Verdict.WELCOME + bytes(PROOF_BYTES),
        lambda handshake: Verdict.WELCOME + handshake.client_proof(),
        lambda handshake: Verdict.WELCOME + handshake.server_proof(Verdict.BUSY),
    ],
    ids=["no proof", "the client's own", "of another answer"],
)
def test_a_server_that_does_not_prove_the_key_gets_nothing(welcome: object) -> None:
    def never(channel: Channel) -> None:
        assert channel.sock.recv(1) == b"", "the client went on talking"

    assert callable(welcome)
    with scripted_server(KEY, RUN, never, welcome=welcome) as address:
        client = ReplicaClient(address, KEY, RUN, deadline_s=WAIT_S)
        with pytest.raises(StoreRefused, match="not of run"):
            client.fetch(FIRST, 3, 0, 0, 1)
        client.close()


def test_an_unauthentic_message_ends_the_connection(server: TransportServer) -> None:
    """Somebody took over a connection after its handshake."""
    channel = call(server.address, KEY, RUN)
    with channel.sock:
        thief = Channel(channel.sock, bytes(32), is_client=True)
        thief.send(Request(body=Fetch.of(FIRST, 3, 0, 0, 1)), soon())
        assert is_hung_up(channel.sock)
    assert fetch(server) == CONTENT


def test_a_message_cannot_be_played_back(server: TransportServer) -> None:
    channel = call(server.address, KEY, RUN)
    request = Request(body=Fetch.of(FIRST, 3, 0, 0, len(CONTENT)))
    with channel.sock:
        session_key = channel._key
        channel.send(request, soon())
        assert channel.receive(Reply, soon()).verdict == "bytes"
        assert take(channel.sock, len(CONTENT)) == CONTENT
        Channel(channel.sock, session_key, is_client=True).send(request, soon())  # counted from zero: the same bytes
        assert is_hung_up(channel.sock)


def test_a_claim_of_a_huge_message_is_not_allocated(server: TransportServer) -> None:
    channel = call(server.address, KEY, RUN)
    with channel.sock:
        channel.sock.sendall(b"\xff\xff\xff\xff")
        assert is_hung_up(channel.sock)
    assert fetch(server) == CONTENT


def test_a_new_key_shuts_the_old_one_out(server: TransportServer) -> None:
    old = ReplicaClient(server.address, KEY, RUN, deadline_s=WAIT_S)
    assert old.fetch(FIRST, 3, 0, 0, len(CONTENT)) == CONTENT
    server.set_key(OTHER_KEY)
    with pytest.raises(StoreRefused, match="the key of an earlier driver"):
        old.fetch(FIRST, 3, 0, 0, len(CONTENT))
    old.close()
    assert fetch(server, OTHER_KEY) == CONTENT
    server.set_key(OTHER_KEY)
    assert fetch(server, OTHER_KEY) == CONTENT


def test_a_new_key_ends_a_connection_that_waits(server: TransportServer, monkeypatch: pytest.MonkeyPatch) -> None:
    is_waiting = threading.Event()

    def announced_wait(*arguments: Any) -> None:
        is_waiting.set()
        wait_for(*arguments)

    monkeypatch.setattr("storage.transport_server.wait_for", announced_wait)
    with call(server.address, KEY, RUN).sock as sock:
        assert is_waiting.wait(WAIT_S)
        server.set_key(OTHER_KEY)
        assert is_hung_up(sock)


def test_nobody_listening_is_unavailable() -> None:
    with scripted_server(KEY, RUN) as address:
        pass
    client = ReplicaClient(address, KEY, RUN, deadline_s=WAIT_S)
    with pytest.raises(StoreUnavailable, match="n9"):
        client.fetch(FIRST, 3, 0, 0, 1)
    client.close()

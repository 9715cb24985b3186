"""The proxy that takes the store away. Real: sockets on loopback, a server that echoes, moto's S3 server."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from orchestrator.errors import SupervisorError
from orchestrator.store_proxy import StoreProxy
from storage.errors import StoreUnavailable
from tests.s3_stores import new_bucket, store_at
from tests.servers import MotoServer

WAIT_S = 10.0
SILENCE_S = 0.3


class Echo(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        for line in self.rfile:
            self.wfile.write(line)


@pytest.fixture
def proxy() -> Iterator[StoreProxy]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        made = StoreProxy(f"http://127.0.0.1:{server.server_address[1]}")
        try:
            yield made
        finally:
            made.close()
            server.shutdown()


def connect(proxy: StoreProxy) -> socket.socket:
    host, _, port = proxy.endpoint.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=WAIT_S)


def test_bytes_pass_both_ways_unchanged(proxy: StoreProxy) -> None:
    with connect(proxy) as client:
        text = bytes(range(11, 256)) * 2000 + b"\n"
        client.sendall(text)
        got = b""
        while len(got) < len(text):
            got += client.recv(1 << 16)
    assert got == text


def test_while_it_is_cut_nothing_is_heard_and_afterwards_everything_is(proxy: StoreProxy) -> None:
    with connect(proxy) as old:
        old.sendall(b"before\n")
        assert old.recv(100) == b"before\n"
        proxy.cut()
        old.sendall(b"during\n")
        with connect(proxy) as new:  # a connection is accepted, as by a dead server's kernel, but never served
            new.sendall(b"new\n")
            for client in (old, new):
                client.settimeout(SILENCE_S)
                with pytest.raises(TimeoutError):
                    client.recv(100)
                client.settimeout(WAIT_S)
            proxy.mend()
            assert (old.recv(100), new.recv(100)) == (b"during\n", b"new\n")


def test_an_end_that_hangs_up_is_passed_on(proxy: StoreProxy) -> None:
    with connect(proxy) as client:
        client.sendall(b"last\n")
        client.shutdown(socket.SHUT_WR)
        assert client.recv(100) == b"last\n"
        assert client.recv(100) == b""


def test_an_s3_store_behind_it_is_unavailable_while_it_is_cut_and_whole_before_and_after(
    moto_server: MotoServer, moto_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", moto_server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", moto_server.secret_key)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    proxy = StoreProxy(moto_server.endpoint)
    try:
        store = store_at(proxy.endpoint, new_bucket(moto_client), deadline_s=WAIT_S)
        store.put("before", b"1")
        assert store.get("before") == b"1"
        proxy.cut()
        with pytest.raises(StoreUnavailable):
            store.put("during", b"2", deadline_s=SILENCE_S)
        proxy.mend()
        store.put("after", b"3")
        assert store.get("after") == b"3"
    finally:
        proxy.close()


@pytest.mark.parametrize("endpoint", ["https://s3.example.org", "s3.example.org", ""])
def test_a_store_that_it_cannot_stand_in_for_is_refused(endpoint: str) -> None:
    with pytest.raises(SupervisorError, match="use http"):
        StoreProxy(endpoint)

"""What tests of the transport share: one Run and its replicas, and peers that do the handshake and then as told."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from storage.codec import digest128
from storage.keeper_protocol import TransportAddress
from storage.keys import Attempt
from storage.transport import ReplicaRef
from storage.transport_client import send_replica
from storage.transport_wire import (
    HELLO_BYTES,
    MAGIC,
    NONCE_BYTES,
    PROOF_BYTES,
    Channel,
    Deadline,
    Handshake,
    Verdict,
    receive_into,
)

__all__ = ["FIRST", "KEY", "RUN", "WAIT_S", "call", "file_of", "put", "ref_of", "scripted_server", "soon", "take"]

KEY = bytes(range(32))
RUN = "run"
FIRST = Attempt(number=1, nonce="00000001")
WAIT_S = 20.0


def ref_of(content: bytes, step: int = 3) -> ReplicaRef:
    """A replica of rank 0 with these bytes."""
    return ReplicaRef(
        run_id=RUN,
        attempt=FIRST,
        step=step,
        rank=0,
        world_size=4,
        num_bytes=len(content),
        digest=digest128(content),
        safe_step=1,
    )


def put(address: TransportAddress, content: bytes, ref: ReplicaRef | None = None, **options: Any) -> bool:
    options = {"deadline_s": WAIT_S, "pace": None, **options}
    with file_of(content) as source:
        return send_replica(address, KEY, ref or ref_of(content), source, **options)


@contextmanager
def file_of(content: bytes) -> Iterator[int]:
    """An open file in memory with these bytes."""
    source = os.memfd_create("content")
    try:
        os.truncate(source, len(content))
        assert os.pwrite(source, content, 0) == len(content)
        yield source
    finally:
        os.close(source)


def soon() -> Deadline:
    return Deadline(WAIT_S)


def take(sock: socket.socket, num_bytes: int) -> bytes:
    buffer = bytearray(num_bytes)
    receive_into(sock, memoryview(buffer), soon())
    return bytes(buffer)


def call(address: TransportAddress, key: bytes, run_id: str) -> Channel:
    """A connection to a server, welcomed."""
    sock = socket.create_connection((address.host, address.port), timeout=WAIT_S)
    nonce = secrets.token_bytes(NONCE_BYTES)
    sock.sendall(MAGIC + nonce)
    handshake = Handshake(key, run_id, nonce, take(sock, NONCE_BYTES))
    sock.sendall(handshake.client_proof())
    assert take(sock, 1 + PROOF_BYTES) == Verdict.WELCOME + handshake.server_proof(Verdict.WELCOME)
    return Channel(sock, handshake.session_key(), is_client=True)


@contextmanager
def scripted_server(
    key: bytes, run_id: str, *scripts: Callable[[Channel], None], welcome: Callable[[Handshake], bytes] | None = None
) -> Iterator[TransportAddress]:
    """Serves one connection with each of ``scripts``, one after the other; each is closed when its script ends.

    ``welcome``: what is sent for the answer instead of the true one.
    """

    def serve() -> None:
        for script in scripts:
            sock, _ = listener.accept()
            with sock:
                nonce = secrets.token_bytes(NONCE_BYTES)
                hello = take(sock, HELLO_BYTES)
                sock.sendall(nonce)
                handshake = Handshake(key, run_id, hello[len(MAGIC) :], nonce)
                take(sock, PROOF_BYTES)
                true = Verdict.WELCOME + handshake.server_proof(Verdict.WELCOME)
                sock.sendall(true if welcome is None else welcome(handshake))
                script(Channel(sock, handshake.session_key(), is_client=False))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(WAIT_S)
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield TransportAddress(node_id="n9", host="127.0.0.1", port=listener.getsockname()[1])
        thread.join(WAIT_S)
        assert not thread.is_alive(), "the script did not end"

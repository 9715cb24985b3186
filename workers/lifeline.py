"""A process's lifeline: one authenticated TCP connection to the driver that carries nothing and ends with the process.

Its end is the fastest true sign of a death: the kernel closes it, whatever killed the process. A connection that breaks
while the process lives is made anew. It judges nothing; `orchestrator.lifelines` is the other end.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

__all__ = ["NONCE_BYTES", "Hello", "Lifeline", "LifelineSpec", "Role", "read_hello"]

_log = logging.getLogger(__name__)
NONCE_BYTES = 32
_LENGTH = struct.Struct(">H")
_MAC_BYTES = hashlib.sha256().digest_size
_MAX_BODY = 1024
_CONNECT_S = 10.0
_TRIES = 8
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0


class Role(StrEnum):
    WORKER = "worker"
    AGENT = "agent"


@dataclass(frozen=True, slots=True, kw_only=True)
class LifelineSpec:
    """Where the driver listens, and the key that opens it; made anew by every driver."""

    host: str
    port: int
    key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Who holds a lifeline: ``name`` is a worker's id, or for an agent its node's."""

    role: Role
    name: str
    node_id: str
    pid: int

    def sealed(self, nonce: bytes, key: bytes) -> bytes:
        """As it is sent: length, JSON, and an HMAC over the listener's ``nonce`` and the JSON."""
        values = {"role": self.role.value, "name": self.name, "node_id": self.node_id, "pid": self.pid}
        body = json.dumps(values).encode()
        if len(body) > _MAX_BODY:
            raise ValueError(f"the lifeline's hello of {self.role} {self.name} has {len(body)} bytes, over {_MAX_BODY}")
        return _LENGTH.pack(len(body)) + body + _mac(nonce, body, key)


def read_hello(received: bytes, nonce: bytes, key: bytes) -> Hello | None:
    """The hello in ``received``; None while it is not whole. Raises ValueError when it is none, or false."""
    if len(received) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(received)
    if length > _MAX_BODY:
        raise ValueError(f"a hello of {length} bytes, at most {_MAX_BODY} are allowed")
    end = _LENGTH.size + length
    if len(received) < end + _MAC_BYTES:
        return None
    body, mac = received[_LENGTH.size : end], received[end : end + _MAC_BYTES]
    if not hmac.compare_digest(mac, _mac(nonce, body, key)):
        raise ValueError("a hello with a false signature")
    values = json.loads(body)
    return Hello(
        role=Role(values["role"]), name=str(values["name"]), node_id=str(values["node_id"]), pid=int(values["pid"])
    )


def _mac(nonce: bytes, body: bytes, key: bytes) -> bytes:
    return hmac.digest(key, nonce + body, "sha256")


class Lifeline:
    """Held by one process from its start to its end. Connecting takes place on a thread of its own and may fail: the
    driver then learns of this process's death as it learns of a silent one's."""

    def __init__(self, spec: LifelineSpec, *, role: Role, name: str, node_id: str) -> None:
        self._spec = spec
        self._hello = Hello(role=role, name=name, node_id=node_id, pid=os.getpid())
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._closed = threading.Event()
        # A fork that goes on after this process's death would hold the connection open.
        os.register_at_fork(after_in_child=self._drop)
        self._thread = threading.Thread(target=self._hold, name=f"lifeline-{name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let go. The driver takes it for this process's end, if it still asks."""
        self._closed.set()
        with self._lock:
            held = self._socket
        if held is not None:
            _quietly(lambda: held.shutdown(socket.SHUT_RDWR))
        self._thread.join(timeout=_CONNECT_S)

    def _drop(self) -> None:
        self._closed.set()
        held, self._socket = self._socket, None  # no lock: another thread may have held it at the fork
        if held is not None:
            held.close()

    def _hold(self) -> None:
        """Connect, wait for the end of the connection, connect again; a bounded number of failures in a row."""
        failures = 0
        while not self._closed.is_set():
            try:
                self._connect()
                failures = 0
                self._wait_for_end()
            except OSError as error:
                _log.debug("the lifeline of %s broke: %s", self._hello.name, error)
            finally:
                self._let_go()
            failures += 1
            if failures > _TRIES:
                where = f"{self._spec.host}:{self._spec.port}"
                _log.info("no lifeline to the driver at %s after %d tries: it will not be told at once", where, _TRIES)
                return
            self._closed.wait(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (failures - 1)))

    def _connect(self) -> None:
        until = time.monotonic() + _CONNECT_S
        made = socket.create_connection((self._spec.host, self._spec.port), timeout=_CONNECT_S)
        with self._lock:
            self._socket = made
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        nonce = b""
        while len(nonce) < NONCE_BYTES:
            made.settimeout(max(0.01, until - time.monotonic()))
            got = made.recv(NONCE_BYTES - len(nonce))
            if not got:
                raise ConnectionError("the listener hung up before its nonce was whole")
            nonce += got
        made.sendall(self._hello.sealed(nonce, self._spec.key))
        made.settimeout(None)

    def _wait_for_end(self) -> None:
        """Blocks for as long as the connection stands, which is as long as this process or the driver lives."""
        held = self._socket
        while held is not None and held.recv(NONCE_BYTES):
            continue

    def _let_go(self) -> None:
        with self._lock:
            held, self._socket = self._socket, None
        if held is not None:
            held.close()


def _quietly(call: Callable[[], None]) -> None:
    try:
        call()
    except OSError as error:
        _log.debug("closing a lifeline: %s", error)

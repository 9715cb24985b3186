"""The asking end of the transport: carries a replica to a peer Keeper, and fetches ranges of what a Keeper holds.

It chooses no peer and judges no bytes: the peer checks a replica's digest, whoever fetches checks what came.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from storage.errors import ObjectMissing, StorageError, StoreRefused, StoreUnavailable
from storage.keeper_protocol import TransportAddress
from storage.keys import Attempt, StepKey, shard_key
from storage.transport import ReplicaRef
from storage.transport_wire import (
    MAGIC,
    NONCE_BYTES,
    PROOF_BYTES,
    Channel,
    Deadline,
    Fetch,
    Handshake,
    Put,
    Reply,
    Request,
    Verdict,
    receive_bulk,
    receive_into,
    send_all,
    wait_for,
)

__all__ = ["Pace", "ReplicaClient", "send_replica"]

logger = logging.getLogger(__name__)

STALL_S: Final = 10.0

_PIECE: Final = 1 << 21
_BURST_S: Final = 0.05
_MAX_IDLE: Final = 8
_BUSY_WAIT_S: Final = 0.05
_BUSY_TRIES: Final = 8


class Pace:
    """A token bucket that all sends of a node share: ``bytes_per_s`` over time, a twentieth of a second's at once."""

    def __init__(
        self,
        bytes_per_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        if not bytes_per_s > 0:
            raise ValueError(f"{bytes_per_s} bytes per second: nothing could ever be sent")
        self._bytes_per_s, self._clock, self._wait = bytes_per_s, clock, wait
        self._lock = threading.Lock()
        self._paid_until_s = clock()
        self.piece_bytes: Final = max(1, min(_PIECE, int(bytes_per_s * _BURST_S)))
        """The most to take at once: the peer must see something move."""

    def take(self, num_bytes: int, limit_s: float) -> None:
        """Wait until ``num_bytes`` may go. Raises TimeoutError, taking none, where that is longer than ``limit_s``."""
        with self._lock:
            now_s = self._clock()
            paid_until_s = max(self._paid_until_s, now_s - _BURST_S) + num_bytes / self._bytes_per_s
            wait_s = paid_until_s - now_s
            if wait_s > limit_s:
                raise TimeoutError(f"at {self._bytes_per_s:g} bytes/s the deadline cannot be kept")
            self._paid_until_s = paid_until_s
        if wait_s > 0:
            self._wait(wait_s)


def send_replica(
    address: TransportAddress,
    key: bytes,
    ref: ReplicaRef,
    source_fd: int,
    *,
    pace: Pace | None,
    deadline_s: float,
    stall_s: float = STALL_S,
) -> bool:
    """Carry the object, the first bytes of the file ``source_fd``, to the Keeper at ``address``.

    True: the peer has sealed it; False: it held it already. Raises StorageError with the peer's reason when it refuses,
    StoreUnavailable when it cannot be reached, stands still for ``stall_s`` or is not done within ``deadline_s``.
    """
    name = _name(ref.attempt, ref.step, ref.rank)
    deadline = Deadline(deadline_s)
    moving = Deadline(deadline_s, silence_s=stall_s)
    with _unavailable("replicate", name, address), contextlib.ExitStack() as stack:
        channel = _connect(address, key, ref.run_id, Deadline(min(deadline_s, stall_s)))
        stack.callback(channel.sock.close)
        channel.send(Request(body=Put.of(ref)), moving)
        reply = channel.receive(Reply, deadline)
        if reply.verdict == "go":
            _send_file(channel.sock, source_fd, ref.num_bytes, moving, pace)
            reply = channel.receive(Reply, deadline)
    match reply.verdict:
        case "sealed":
            return True
        case "held":
            return False
        case "refused":
            raise StorageError(f"{name}: node {address.node_id} takes no replica: {reply.reason}")
        case _:
            raise StoreUnavailable(
                "replicate", name, f"{_place(address)} answered {reply.verdict!r}, which makes no sense"
            )


class ReplicaClient:
    """Fetches from one Keeper. Any number of threads may call it: each call has a connection of its own while it lasts.

    ``deadline_s``: for connecting, for the answer, and for each wait in which no bytes come.
    """

    def __init__(self, address: TransportAddress, key: bytes, run_id: str, *, deadline_s: float) -> None:
        self._address, self._key, self._run_id, self._deadline_s = address, key, run_id, deadline_s
        self._lock = threading.Lock()
        self._idle: list[Channel] = []
        self._is_closed = False

    def fetch(self, attempt: Attempt, step: int, rank: int, offset: int, length: int) -> bytearray:
        """Exactly ``length`` bytes of the raw Shard object from ``offset``.

        Raises ObjectMissing when the Keeper does not hold it, StoreUnavailable when it does not answer as it should.
        """
        name = _name(attempt, step, rank)
        request = Request(body=Fetch.of(attempt, step, rank, offset, length))
        with _unavailable("fetch", name, self._address):
            reply, data = self._ask(request, length)
        match reply.verdict:
            case "bytes":
                return data
            case "missing":
                raise ObjectMissing(name, f"the memory of {_place(self._address)}")
            case _:
                raise StoreRefused("fetch", name, f"{_place(self._address)}: {reply.reason or reply.verdict}")

    def close(self) -> None:
        """A call that is under way ends as it would; no connection stays open."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for channel in idle:
            channel.sock.close()

    def _ask(self, request: Request, length: int) -> tuple[Reply, bytearray]:
        """Over a connection used before, if there is one; when it breaks, once more over a new one."""
        channel = self._take_idle() or self._connect()
        try:
            return self._exchange(channel, request, length)
        except ConnectionError as error:
            logger.info("fetching from %s once more, the connection broke: %s", _place(self._address), error)
        return self._exchange(self._connect(), request, length)

    def _exchange(self, channel: Channel, request: Request, length: int) -> tuple[Reply, bytearray]:
        data = bytearray()
        is_usable = False
        try:
            channel.send(request, Deadline(self._deadline_s))
            reply = channel.receive(Reply, Deadline(self._deadline_s))
            if reply.verdict == "bytes":
                data = bytearray(length)
                with memoryview(data) as view:
                    receive_bulk(channel.sock, view, Deadline(math.inf, silence_s=self._deadline_s))
            is_usable = True
        finally:
            if not is_usable or not self._keep_idle(channel):
                channel.sock.close()
        return reply, data

    def _take_idle(self) -> Channel | None:
        with self._lock:
            if self._is_closed:
                raise ConnectionError("this client is closed")
            return self._idle.pop() if self._idle else None

    def _keep_idle(self, channel: Channel) -> bool:
        with self._lock:
            if self._is_closed or len(self._idle) >= _MAX_IDLE:
                return False
            self._idle.append(channel)
            return True

    def _connect(self) -> Channel:
        return _connect(self._address, self._key, self._run_id, Deadline(self._deadline_s))


def _name(attempt: Attempt, step: int, rank: int) -> str:
    return shard_key(StepKey(step=step, attempt=attempt), rank)


def _place(address: TransportAddress) -> str:
    return f"node {address.node_id} ({address.host}:{address.port})"


@contextlib.contextmanager
def _unavailable(operation: str, name: str, address: TransportAddress) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreUnavailable(operation, name, f"{_place(address)}: {error}") from error


def _connect(address: TransportAddress, key: bytes, run_id: str, deadline: Deadline) -> Channel:
    """A connection both ends of which have proved the key. Raises OSError, StoreRefused."""
    for attempt in range(_BUSY_TRIES):
        channel = _dial(address, key, run_id, deadline)
        if channel is not None:
            return channel
        time.sleep(min(_BUSY_WAIT_S * 2**attempt, deadline.wait_s()))
    raise TimeoutError(f"it serves as many as it may, also when asked for the {_BUSY_TRIES}th time")


def _dial(address: TransportAddress, key: bytes, run_id: str, deadline: Deadline) -> Channel | None:
    """None when the peer is of the Run but has no place free."""
    sock = socket.create_connection((address.host, address.port), timeout=deadline.wait_s())
    is_open = False
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        handshake, verdict = _shake_hands(sock, key, run_id, deadline)
        if handshake is None:
            reason = f"{_place(address)} is not of run {run_id}, or one side has the key of an earlier driver"
            raise StoreRefused("connect", run_id, reason)
        is_open = verdict == Verdict.WELCOME
        return Channel(sock, handshake.session_key(), is_client=True) if is_open else None
    finally:
        if not is_open:
            sock.close()


def _shake_hands(sock: socket.socket, key: bytes, run_id: str, deadline: Deadline) -> tuple[Handshake | None, bytes]:
    """The handshake and the peer's verdict; None when it did not prove the key."""
    client_nonce = secrets.token_bytes(NONCE_BYTES)
    send_all(sock, MAGIC + client_nonce, deadline)
    handshake = Handshake(key, run_id, client_nonce, _take(sock, NONCE_BYTES, deadline))
    send_all(sock, handshake.client_proof(), deadline)
    answer = _take(sock, 1 + PROOF_BYTES, deadline)
    verdict, proof = answer[:1], answer[1:]
    if not hmac.compare_digest(proof, handshake.server_proof(verdict)):
        return None, verdict
    return handshake, verdict


def _take(sock: socket.socket, num_bytes: int, deadline: Deadline) -> bytes:
    buffer = bytearray(num_bytes)
    receive_into(sock, memoryview(buffer), deadline)
    return bytes(buffer)


def _send_file(sock: socket.socket, source_fd: int, num_bytes: int, moving: Deadline, pace: Pace | None) -> None:
    """Straight from the file's pages into the socket."""
    position = 0
    for size in _pieces(num_bytes, pace, moving):
        end = position + size
        while position < end:
            wait_for(sock, "write", moving)
            try:
                sent = os.sendfile(sock.fileno(), source_fd, position, end - position)
            except BlockingIOError:
                continue
            if not sent:
                raise StorageError(f"the file to send ends at byte {position}; {num_bytes} bytes were announced")
            position += sent


def _pieces(num_bytes: int, pace: Pace | None, moving: Deadline) -> Iterator[int]:
    """Sizes that make ``num_bytes``, each once it may go."""
    most = _PIECE if pace is None else pace.piece_bytes
    for start in range(0, num_bytes, most):
        size = min(most, num_bytes - start)
        if pace is not None:
            pace.take(size, moving.left_s())
        yield size

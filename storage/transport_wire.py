"""What both ends of the transport speak: waits that end, the mutual proof of the Run's key, small checked messages.

It knows no Keeper and no arena. Nothing that arrives is unpickled, and no length that arrives is allocated unchecked.

Handshake: client: magic, nonce; server: nonce; client: proof; server: answer, proof. A proof is an HMAC-SHA256 over
both nonces, the Run and the side that proves, so that neither side's can be played back to it. The server proves
nothing to a client that has not. After it each message is authenticated with a key of the connection and a count; the
bytes of an object are not: whoever takes them checks their digest. Nothing is encrypted: the network is the cluster's.
"""

from __future__ import annotations

import hmac
import math
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import Annotated, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from storage.keys import Attempt
from storage.manifest import AttemptRecord, Digest128, Name, Size
from storage.transport import ReplicaRef

__all__ = [
    "HELLO_BYTES",
    "MAGIC",
    "MAX_MESSAGE_BYTES",
    "NONCE_BYTES",
    "PROOF_BYTES",
    "BrokenChannel",
    "Channel",
    "Deadline",
    "Fetch",
    "Handshake",
    "Put",
    "Reply",
    "Request",
    "Verdict",
    "receive_bulk",
    "receive_into",
    "send_all",
    "wait_for",
]

MAGIC: Final = b"RAYSUMT1"
NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
HELLO_BYTES: Final = len(MAGIC) + NONCE_BYTES
MAX_MESSAGE_BYTES: Final = 4096
MAX_REASON: Final = 1024

_LENGTH: Final = struct.Struct("<I")
_COUNT: Final = struct.Struct("<Q")
_BATCH_BYTES: Final = 1 << 19
_BATCH_S: Final = 0.02
_EVENTS: Final = {"read": select.POLLIN, "write": select.POLLOUT}

M = TypeVar("M", bound=BaseModel)


class BrokenChannel(ConnectionError):
    """The other side closed the connection, or what it sent is not authentic or not a message of ours."""


class Deadline:
    """When waiting ends: ``left_s`` for all of it, ``silence_s`` for each wait in which the other side does nothing."""

    def __init__(
        self, left_s: float, *, silence_s: float = math.inf, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._silence_s = silence_s
        self._due_s = clock() + left_s

    def left_s(self) -> float:
        return self._due_s - self._clock()

    def wait_s(self) -> float:
        """How long the next wait may last. Raises TimeoutError when there is no time left at all."""
        left_s = self.left_s()
        if left_s <= 0:
            raise TimeoutError("the deadline passed")
        return min(left_s, self._silence_s)


def wait_for(sock: socket.socket, event: Literal["read", "write"], deadline: Deadline) -> None:
    """Until the socket can be read or written (or has failed). Raises TimeoutError."""
    wait_s = deadline.wait_s()
    if not _poll(sock, event, wait_s):
        deadline.wait_s()  # says so when it was this that ended
        raise TimeoutError(f"nothing moved for {wait_s:.3g} s")


def _poll(sock: socket.socket, event: Literal["read", "write"], wait_s: float) -> bool:
    poll = select.poll()
    poll.register(sock, _EVENTS[event])
    return bool(poll.poll(None if math.isinf(wait_s) else math.ceil(wait_s * 1000)))


def receive_into(sock: socket.socket, view: memoryview, deadline: Deadline) -> None:
    """Fill ``view``. Raises BrokenChannel at the end of the stream, TimeoutError."""
    position = 0
    while position < len(view):
        wait_for(sock, "read", deadline)
        position += _receive_some(sock, view, position)


def receive_bulk(sock: socket.socket, view: memoryview, deadline: Deadline) -> None:
    """As `receive_into`, but woken for each half megabyte, not for each packet: that costs a third less time."""
    position = 0
    try:
        while position < len(view):
            _wake_at(sock, min(_BATCH_BYTES, len(view) - position))
            if not _poll(sock, "read", min(_BATCH_S, deadline.wait_s())):
                _wake_at(sock, 1)  # a slow network, or a window too small for a batch: what there is will do
                wait_for(sock, "read", deadline)
            position += _receive_some(sock, view, position)
    finally:
        _wake_at(sock, 1)  # the next message is smaller than a batch


def _wake_at(sock: socket.socket, num_bytes: int) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)


def _receive_some(sock: socket.socket, view: memoryview, position: int) -> int:
    with view[position:] as rest:
        try:
            received = sock.recv_into(rest)
        except BlockingIOError:
            return 0
    if not received:
        raise BrokenChannel("the other side closed the connection")
    return received


def send_all(sock: socket.socket, data: memoryview | bytes, deadline: Deadline) -> None:
    """Send all of ``data``. Raises OSError, TimeoutError."""
    position = 0
    with memoryview(data) as view:
        while position < len(view):
            wait_for(sock, "write", deadline)
            with view[position:] as rest:
                try:
                    position += sock.send(rest)
                except BlockingIOError:
                    continue


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Put(_Message):
    """A replica is to come in: a `ReplicaRef`. Its bytes follow once the reply is ``go``."""

    verb: Literal["put"] = "put"
    run_id: Name
    attempt: AttemptRecord
    step: Size
    rank: Size
    world_size: Size
    num_bytes: Size
    digest: Digest128
    safe_step: Annotated[int, Field(ge=-1, lt=1 << 62)]

    @staticmethod
    def of(ref: ReplicaRef) -> Put:
        return Put(
            run_id=ref.run_id,
            attempt=AttemptRecord.of(ref.attempt),
            step=ref.step,
            rank=ref.rank,
            world_size=ref.world_size,
            num_bytes=ref.num_bytes,
            digest=ref.digest,
            safe_step=ref.safe_step,
        )

    def ref(self) -> ReplicaRef:
        return ReplicaRef(
            run_id=self.run_id,
            attempt=self.attempt.value(),
            step=self.step,
            rank=self.rank,
            world_size=self.world_size,
            num_bytes=self.num_bytes,
            digest=self.digest,
            safe_step=self.safe_step,
        )


class Fetch(_Message):
    """A range of a generation is asked for. Its bytes follow the reply ``bytes``."""

    verb: Literal["fetch"] = "fetch"
    attempt: AttemptRecord
    step: Size
    rank: Size
    offset: Size
    length: Size

    @staticmethod
    def of(attempt: Attempt, step: int, rank: int, offset: int, length: int) -> Fetch:
        return Fetch(attempt=AttemptRecord.of(attempt), step=step, rank=rank, offset=offset, length=length)


class Request(_Message):
    """What a client may ask."""

    body: Annotated[Put | Fetch, Field(discriminator="verb")]


class Reply(_Message):
    """go: send the bytes; held: it is here already; sealed: it is here now; bytes: they follow; missing; refused."""

    verdict: Literal["go", "held", "sealed", "bytes", "missing", "refused"]
    reason: Annotated[str, Field(max_length=MAX_REASON)] = ""

    @staticmethod
    def refused(reason: str) -> Reply:
        # a reply must fit into a message whatever the reason is made of
        return Reply(verdict="refused", reason=reason.encode("ascii", "replace").decode()[:MAX_REASON])


class Verdict:
    """The server's answer to a client's proof."""

    STRANGER: Final = b"\x00"
    WELCOME: Final = b"\x01"
    BUSY: Final = b"\x02"


class Handshake:
    """The proofs of one connection. Holds the Run's key; never shows it."""

    def __init__(self, key: bytes, run_id: str, client_nonce: bytes, server_nonce: bytes) -> None:
        run = run_id.encode()
        self.key = key
        self._transcript = b"".join((MAGIC, _LENGTH.pack(len(run)), run, client_nonce, server_nonce))

    def client_proof(self) -> bytes:
        return self._mac(b"client")

    def server_proof(self, verdict: bytes) -> bytes:
        return self._mac(b"server" + verdict)

    def session_key(self) -> bytes:
        return self._mac(b"session")

    def _mac(self, role: bytes) -> bytes:
        return hmac.digest(self.key, role + b"\x00" + self._transcript, "sha256")


class Channel:
    """Messages over a connection whose handshake is done. One thread at a time; the socket does not block."""

    def __init__(self, sock: socket.socket, session_key: bytes, *, is_client: bool) -> None:
        self.sock = sock
        self._key = session_key
        self._sides = (b"c", b"s") if is_client else (b"s", b"c")
        self._num_sent = self._num_received = 0

    def send(self, message: BaseModel, deadline: Deadline) -> None:
        body = message.model_dump_json().encode()
        if len(body) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(body)} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
        proof = self._mac(self._sides[0], self._num_sent, body)
        self._num_sent += 1
        send_all(self.sock, _LENGTH.pack(len(body)) + body + proof, deadline)

    def receive(self, model: type[M], deadline: Deadline) -> M:
        """The next message. Raises BrokenChannel, OSError, TimeoutError."""
        (num_bytes,) = _LENGTH.unpack(self._take(_LENGTH.size, deadline))
        if num_bytes > MAX_MESSAGE_BYTES:
            raise BrokenChannel(f"a message of {num_bytes} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
        taken = self._take(num_bytes + PROOF_BYTES, deadline)
        body, proof = taken[:num_bytes], taken[num_bytes:]
        if not hmac.compare_digest(proof, self._mac(self._sides[1], self._num_received, body)):
            raise BrokenChannel("a message is not authentic")
        self._num_received += 1
        try:
            return model.model_validate_json(body)
        except ValidationError as error:
            raise BrokenChannel(f"not a {model.__name__} of ours: {error.error_count()} fields are wrong") from None

    def _take(self, num_bytes: int, deadline: Deadline) -> bytes:
        buffer = bytearray(num_bytes)
        receive_into(self.sock, memoryview(buffer), deadline)
        return bytes(buffer)

    def _mac(self, side: bytes, count: int, body: bytes) -> bytes:
        return hmac.digest(self._key, side + _COUNT.pack(count) + body, "sha256")

"""The receiving end of the transport: takes replicas into a Keeper's memory and gives out ranges of what it holds.

What may come in, where it is kept and for how long is the holder's to decide. Strangers stay at the door
(storage.transport_door); each connection that is of the Run has a thread of its own.
"""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Final

import xxhash

from storage.errors import StorageError
from storage.keeper_protocol import TransportAddress
from storage.transport import ReplicaHolder, ReplicaRef, ReplicaRoom
from storage.transport_door import Door
from storage.transport_wire import (
    BrokenChannel,
    Channel,
    Deadline,
    Fetch,
    Handshake,
    Put,
    Reply,
    Request,
    receive_bulk,
    send_all,
    wait_for,
)

__all__ = ["TransportLimits", "TransportServer"]

logger = logging.getLogger(__name__)

_PIECE: Final = 1 << 21  # still in the processor's cache when the digest is made


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportLimits:
    """How long the server waits and how much it takes at once.

    ``stall_s``: nothing moves in the middle of a message or an object. ``idle_s``: no request. ``close_s``: for all
    threads to end.
    """

    handshake_s: float = 5.0
    stall_s: float = 10.0
    idle_s: float = 120.0
    close_s: float = 10.0
    max_guests: int = 64
    max_connections: int = 256
    max_object_bytes: int = 1 << 42


@dataclass(slots=True, eq=False)
class _Connection:
    """``idle_since_s``: when it began to wait for a request; None while it serves one."""

    channel: Channel
    key: bytes = field(repr=False)
    thread: threading.Thread
    idle_since_s: float | None

    def hang_up(self) -> None:
        """From another thread: whatever it waits for ends at once."""
        try:
            self.channel.sock.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            logger.debug("transport: a connection was gone already: %s", error)


class TransportServer:
    """Listens on ``host`` for the Keepers and workers of ``run_id``. Its threads call ``holder``."""

    def __init__(
        self,
        holder: ReplicaHolder,
        *,
        run_id: str,
        node_id: str,
        host: str,
        key: bytes,
        port: int = 0,
        limits: TransportLimits | None = None,
    ) -> None:
        self._holder, self._run_id, self._key = holder, run_id, key
        self._limits = limits or TransportLimits()
        self._lock = threading.Lock()
        self._connections: set[_Connection] = set()
        self._is_closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=128)
        self._address = TransportAddress(node_id=node_id, host=host, port=listener.getsockname()[1])
        self._door = Door(listener, self, handshake_s=self._limits.handshake_s, max_guests=self._limits.max_guests)

    @property
    def address(self) -> TransportAddress:
        """Where peers reach it: the host that was given, the port it got."""
        return self._address

    def set_key(self, key: bytes) -> None:
        """From now on only ``key`` opens. What is being carried is finished, then its connection ends."""
        with self._lock:
            self._key = key
            for connection in self._connections:
                if connection.key != key and connection.idle_since_s is not None:
                    connection.hang_up()

    def close(self) -> None:
        """Breaks off what is being carried, and drops its rooms. Bounded; safe to call twice."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        due_s = time.monotonic() + self._limits.close_s
        self._door.close(self._limits.close_s)
        with self._lock:
            connections = list(self._connections)
            for connection in connections:
                connection.hang_up()
        for connection in connections:
            connection.thread.join(max(0.0, due_s - time.monotonic()))
        if stuck := sum(connection.thread.is_alive() for connection in connections):
            logger.warning("transport: %d threads did not end within %g s", stuck, self._limits.close_s)

    def handshake(self, client_nonce: bytes, server_nonce: bytes) -> Handshake:
        """For the door."""
        return Handshake(self._key, self._run_id, client_nonce, server_nonce)

    def has_room(self) -> bool:
        """For the door. When all places are taken, whoever has asked nothing for longest loses its place."""
        with self._lock:
            if len(self._connections) < self._limits.max_connections:
                return True
            idle = [(c.idle_since_s, c) for c in self._connections if c.idle_since_s is not None]
            if idle:
                min(idle, key=lambda pair: pair[0])[1].hang_up()
            return False

    def admit(self, sock: socket.socket, handshake: Handshake) -> None:
        """For the door."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        thread = threading.Thread(target=lambda: self._serve(connection), name="transport-serve", daemon=True)
        channel = Channel(sock, handshake.session_key(), is_client=False)
        connection = _Connection(channel, handshake.key, thread, time.monotonic())
        with self._lock:
            self._connections.add(connection)
        try:
            thread.start()
        except RuntimeError:
            logger.exception("transport: no thread for a connection, it is closed")
            self._forget(connection)

    def _serve(self, connection: _Connection) -> None:
        try:
            while self._may_wait(connection):
                self._serve_one(connection)
        except OSError as error:
            level = logging.DEBUG if connection.idle_since_s is not None else logging.WARNING
            logger.log(level, "transport: a connection ended: %s", error)
        except Exception:
            logger.exception(
                "transport: a connection is closed, what it asked for failed in a way that nobody expected"
            )
        finally:
            self._forget(connection)

    def _may_wait(self, connection: _Connection) -> bool:
        with self._lock:
            connection.idle_since_s = time.monotonic()
            return not self._is_closed and connection.key == self._key

    def _forget(self, connection: _Connection) -> None:
        with self._lock:
            self._connections.discard(connection)
        connection.channel.sock.close()  # after that nobody can hang up a reused descriptor

    def _serve_one(self, connection: _Connection) -> None:
        channel = connection.channel
        wait_for(channel.sock, "read", Deadline(self._limits.idle_s))
        request = channel.receive(Request, self._moving(self._limits.stall_s))
        with self._lock:
            if connection.key != self._key:
                raise BrokenChannel("it asks with the key of an earlier driver")
            connection.idle_since_s = None
        match request.body:
            case Put():
                reply = self._take(channel, request.body.ref())
                channel.send(reply, self._moving())
            case Fetch():
                self._give(channel, request.body)

    def _moving(self, left_s: float = math.inf) -> Deadline:
        return Deadline(left_s, silence_s=self._limits.stall_s)

    def _take(self, channel: Channel, ref: ReplicaRef) -> Reply:
        """One replica, from the question whether there is room to its seal."""
        if ref.run_id != self._run_id:
            return Reply.refused(f"this is run {self._run_id}, not {ref.run_id}")
        if ref.num_bytes > self._limits.max_object_bytes:
            return Reply.refused(f"{ref.num_bytes} bytes; at most {self._limits.max_object_bytes} are taken")
        try:
            room = self._holder.make_room(ref)
        except StorageError as error:
            return Reply.refused(str(error))
        if room is None:
            return Reply(verdict="held")
        digest = ""
        try:
            channel.send(Reply(verdict="go"), self._moving())
            digest = self._receive(channel.sock, room, ref)
        finally:
            if digest != ref.digest:
                room.drop()
        if digest != ref.digest:
            return Reply.refused(f"the bytes came with digest {digest}, announced was {ref.digest}; nothing was kept")
        return _seal(room)

    def _receive(self, sock: socket.socket, room: ReplicaRoom, ref: ReplicaRef) -> str:
        """Fill the room, piece by piece. The digest of what came."""
        digest = xxhash.xxh3_128()
        deadline = self._moving()
        with memoryview(room.view) as view:
            if view.nbytes != ref.num_bytes:
                raise ValueError(f"the holder made room of {view.nbytes} bytes for {ref}")
            for start in range(0, ref.num_bytes, _PIECE):
                with view[start : start + _PIECE] as piece:
                    receive_bulk(sock, piece, deadline)
                    digest.update(piece)
        return digest.hexdigest()

    def _give(self, channel: Channel, fetch: Fetch) -> None:
        try:
            view = self._holder.open_generation(fetch.attempt.value(), fetch.step, fetch.rank)
        except StorageError as error:
            channel.send(Reply.refused(str(error)), self._moving())
            return
        if view is None:
            channel.send(Reply(verdict="missing"), self._moving())
        elif fetch.offset + fetch.length > view.nbytes:
            reason = f"bytes {fetch.offset} to {fetch.offset + fetch.length} of an object of {view.nbytes}"
            channel.send(Reply.refused(reason), self._moving())
        else:
            channel.send(Reply(verdict="bytes"), self._moving())
            with view[fetch.offset : fetch.offset + fetch.length] as part:
                send_all(channel.sock, part, self._moving())


def _seal(room: ReplicaRoom) -> Reply:
    try:
        room.seal()
    except StorageError as error:
        return Reply.refused(str(error))
    return Reply(verdict="sealed")

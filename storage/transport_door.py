"""The door of a transport server: takes connections, asks each for its proof, hands on those that are of the Run.

One thread for all that have not proved themselves, a fixed number of them, a few dozen bytes each: a stranger costs no
thread and no memory. It reads no message and serves nobody.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import select
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Final, Protocol

from storage.transport_wire import HELLO_BYTES, MAGIC, NONCE_BYTES, PROOF_BYTES, Handshake, Verdict

__all__ = ["Door", "House"]

logger = logging.getLogger(__name__)

_ACCEPT_PAUSE_S: Final = 0.1


class House(Protocol):
    """What lies behind the door. Called from the door's thread alone."""

    def handshake(self, client_nonce: bytes, server_nonce: bytes) -> Handshake:
        """With the key that counts now."""
        ...

    def has_room(self) -> bool:
        """May one more come in?"""
        ...

    def admit(self, sock: socket.socket, handshake: Handshake) -> None:
        """It has proved itself and was welcomed; the socket is the house's from now on."""
        ...


@dataclass(slots=True, eq=False)
class _Guest:
    """A connection that has not proved itself yet. ``server_nonce``: empty until its hello came."""

    sock: socket.socket
    due_s: float
    received: bytearray = field(default_factory=bytearray)
    client_nonce: bytes = b""
    server_nonce: bytes = b""

    @property
    def missing(self) -> int:
        return (PROOF_BYTES if self.server_nonce else HELLO_BYTES) - len(self.received)


class Door:
    """Owns the listening socket. When too many wait at once the one that waits longest gives way."""

    def __init__(self, listener: socket.socket, house: House, *, handshake_s: float, max_guests: int) -> None:
        self._listener, self._house = listener, house
        self._handshake_s, self._max_guests = handshake_s, max_guests
        self._guests: dict[_Guest, None] = {}  # in the order of their coming
        self._num_turned_away = 0
        self._bell, self._rope = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._keep, name="transport-door", daemon=True)
        self._thread.start()

    def close(self, wait_s: float) -> None:
        """Takes nobody any more. Call once."""
        self._rope.close()
        self._thread.join(wait_s)

    def _keep(self) -> None:
        try:
            while self._attend():
                self._turn_away_the_late()
        finally:
            for guest in list(self._guests):
                self._let_go(guest)
            self._selector.close()
            self._listener.close()
            self._bell.close()

    def _attend(self) -> bool:
        """One round. False once the rope was pulled."""
        due_s = next(iter(self._guests)).due_s if self._guests else None
        wait_s = None if due_s is None else max(0.0, due_s - time.monotonic())
        for key, _ in self._selector.select(wait_s):
            if key.fileobj is self._bell:
                return False
            if key.fileobj is self._listener:
                self._accept()
            elif key.data in self._guests:  # may have given way in this very round
                self._hear(key.data)
        return True

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            logger.warning("transport: a connection cannot be taken, trying again: %s", error)
            select.select([self._bell], [], [], _ACCEPT_PAUSE_S)
            return
        if len(self._guests) >= self._max_guests:
            self._turn_away(next(iter(self._guests)), "too many wait at the door")
        sock.setblocking(False)
        guest = _Guest(sock, time.monotonic() + self._handshake_s)
        self._guests[guest] = None
        self._selector.register(sock, selectors.EVENT_READ, guest)

    def _hear(self, guest: _Guest) -> None:
        try:
            piece = guest.sock.recv(guest.missing)
            guest.received += piece
            if not piece:
                self._turn_away(guest, "closed before it proved anything")
            elif guest.missing == 0:
                self._judge_proof(guest) if guest.server_nonce else self._challenge(guest)
        except BlockingIOError:
            return
        except OSError as error:
            logger.debug("transport: a connection broke: %s", error)
            self._let_go(guest)

    def _challenge(self, guest: _Guest) -> None:
        if guest.received[: len(MAGIC)] != MAGIC:
            self._turn_away(guest, "does not speak this protocol")
            return
        guest.client_nonce, guest.received = bytes(guest.received[len(MAGIC) :]), bytearray()
        guest.server_nonce = secrets.token_bytes(NONCE_BYTES)
        guest.sock.send(guest.server_nonce)  # a few bytes into an empty buffer

    def _judge_proof(self, guest: _Guest) -> None:
        handshake = self._house.handshake(guest.client_nonce, guest.server_nonce)
        if not hmac.compare_digest(bytes(guest.received), handshake.client_proof()):
            guest.sock.send(Verdict.STRANGER + bytes(PROOF_BYTES))
            self._turn_away(guest, "not of this run")
            return
        verdict = Verdict.WELCOME if self._house.has_room() else Verdict.BUSY
        guest.sock.send(verdict + handshake.server_proof(verdict))
        if verdict == Verdict.BUSY:
            self._turn_away(guest, "as many as may are served already")
            return
        self._selector.unregister(guest.sock)
        del self._guests[guest]
        self._house.admit(guest.sock, handshake)

    def _turn_away_the_late(self) -> None:
        now_s = time.monotonic()
        for guest in [guest for guest in self._guests if guest.due_s <= now_s]:
            self._turn_away(guest, f"no proof within {self._handshake_s:g} s")

    def _turn_away(self, guest: _Guest, reason: str) -> None:
        self._num_turned_away += 1
        # a flood must not fill the log: the first, then at each doubling
        if self._num_turned_away & (self._num_turned_away - 1) == 0:
            logger.warning("transport: connection refused: %s (%d refused so far)", reason, self._num_turned_away)
        self._let_go(guest)

    def _let_go(self, guest: _Guest) -> None:
        del self._guests[guest]
        self._selector.unregister(guest.sock)
        guest.sock.close()

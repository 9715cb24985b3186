"""The TCP connections of gloo's groups and of the store they meet at, so that they can be cut: a call that waits for a
machine that has vanished without a word ends only with its connection, or at the group's time-out.

gloo has no call for this, nor for giving up while it waits for a rank to connect. Its connections are found as the new
sockets that are polled together with a pipe, as its loops do and asyncio and gRPC do not. Where there is no /proc, or
no gloo, nothing is found and nothing is cut.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from pathlib import Path

__all__ = ["StoreWire", "Wires"]

_WATCHED = re.compile(r"^tfd:\s+(\d+)", re.MULTILINE)
_ANSWER_S = 1.0
_TCP_FAMILIES = (socket.AF_INET, socket.AF_INET6)


class Wires:
    """Made before groups are formed; `note` after, then `cut`, which may come from another thread."""

    def __init__(self) -> None:
        self._old = {link for link in _links().values() if link.startswith("socket:")}
        self._found: dict[int, str] = {}  # descriptor -> its socket, which no later user of the number shares

    def note(self) -> int:
        """Remember the connections that were made since; returns how many."""
        links = _links()
        for descriptor, link in links.items():
            if link != "anon_inode:[eventpoll]":
                continue
            watched = {one: links.get(one, "") for one in _watched_by(descriptor)}
            sockets = {one: link for one, link in watched.items() if link.startswith("socket:")}
            has_pipe = any(link.startswith("pipe:") for link in watched.values())
            if has_pipe and not self._old & set(sockets.values()):
                self._found |= sockets
        return len(self._found)

    def cut(self, *, num_ranks: int = 0) -> int:
        """Shut them all down, and by that their other ends; returns how many were still open.

        ``num_ranks``: of a group that is still being made. What waits for one of them to connect gets a connection in
        its place that ends at once.
        """
        found, self._found = self._found, {}
        doors = [door for one, link in found.items() if (door := _door_of(one, link)) is not None]
        num_open = sum(_shut_down(descriptor, link) for descriptor, link in found.items())
        for door in doors if num_ranks else ():
            _answer(door, num_ranks)
        return num_open


class StoreWire:
    """Made before a client of the store at ``port``; `note` after, then `cut`, which may come from another thread."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._old = set(_links().values())
        self._found: dict[int, str] = {}

    def note(self) -> int:
        """Remember the connections to the store that were made since; returns how many."""
        new = {one: link for one, link in _links().items() if link.startswith("socket:") and link not in self._old}
        self._found = {one: link for one, link in new.items() if _peer_port(one) == self._port}
        return len(self._found)

    def cut(self) -> int:
        """Shut them down: whoever waits for a key gets an error. Returns how many were still open."""
        found, self._found = self._found, {}
        return sum(_shut_down(descriptor, link) for descriptor, link in found.items())


def _links() -> dict[int, str]:
    """What each open descriptor of this process is."""
    links: dict[int, str] = {}
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return links
    for name in names:
        link = _link(int(name))
        if link is not None:
            links[int(name)] = link
    return links


def _link(descriptor: int) -> str | None:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return None  # closed meanwhile


def _watched_by(poll_set: int) -> list[int]:
    try:
        return [int(found) for found in _WATCHED.findall(Path(f"/proc/self/fdinfo/{poll_set}").read_text())]
    except OSError:
        return []


def _door_of(descriptor: int, link: str) -> tuple[str, int] | None:
    """Where a socket listens, None where it does not."""
    try:
        copy = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return None
    with copy:
        if _link(copy.fileno()) != link or copy.family not in _TCP_FAMILIES:
            return None
        if not copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return None
        host, port, *_ = copy.getsockname()
        return str(host), int(port)


def _answer(door: tuple[str, int], num_ranks: int) -> None:
    """Connect in the place of each rank. The first that gloo reads of a connection is whose it is, in 8 bytes."""
    try:
        for rank in range(num_ranks):
            with socket.create_connection(door, timeout=_ANSWER_S) as wire:
                wire.sendall(rank.to_bytes(8, sys.byteorder))
    except OSError:
        return  # nobody listens any more: the group was given up meanwhile


def _peer_port(descriptor: int) -> int | None:
    try:
        copy = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return None
    with copy:
        try:
            return int(copy.getpeername()[1]) if copy.family in _TCP_FAMILIES else None
        except OSError:
            return None  # not connected


def _shut_down(descriptor: int, link: str) -> bool:
    """Through a duplicate, which is looked at first: the number may be another's by now."""
    try:
        copy = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return False
    with copy:
        if _link(copy.fileno()) != link or copy.family not in _TCP_FAMILIES:
            return False
        if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False  # gloo ends the process when a listener of its own fails
        try:
            copy.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False  # its other end was faster
    return True

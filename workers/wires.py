"""The TCP connections of gloo's groups, so that they can be cut: a call that waits for a machine that has vanished
without a word ends only with its connection, or at the group's time-out.

gloo has no call for this. Its connections are found as the new sockets that are polled together with a pipe, as its
loops do and asyncio and gRPC do not. Where there is no /proc, or no gloo, nothing is found and nothing is cut.
"""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

__all__ = ["Wires"]

_WATCHED = re.compile(r"^tfd:\s+(\d+)", re.MULTILINE)
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

    def cut(self) -> int:
        """Shut them all down, and by that their other ends; returns how many were still open."""
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

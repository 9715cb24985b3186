"""A private network of this machine: each node in a network namespace of its own, linked to one bridge; links are cut.

Uses `ip` of iproute2 and needs root. It knows nothing of Ray: a process belongs to the namespace in which its parent
thread was when it started. Namespaces and links of processes that were killed are found by their names.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from orchestrator.errors import SupervisorError
from orchestrator.ownership import is_ownerless, owner_tag

__all__ = ["PrivateNetwork", "remove_stale_networks", "why_no_networks"]

_log = logging.getLogger(__name__)
_PREFIX: Final = "raysume-"
_BRIDGE: Final = "rsm"  # and the pid: a link's name has at most 15 characters
_COMMAND_S: Final = 10.0
_CLONE_NEWNET: Final = 0x40000000
_NAMESPACES: Final = Path("/run/netns")


class PrivateNetwork:
    """One bridge with `gateway` on it; `add` makes a namespace with an address. Close it in any case."""

    interface: Final = "node0"

    def __init__(self) -> None:
        why = why_no_networks()
        if why is not None:
            raise SupervisorError(why)
        self._tag = owner_tag()
        self._bridge = f"{_BRIDGE}{os.getpid()}"
        self._subnet = _free_subnet()
        self._numbers: set[int] = set()
        try:
            _ip("link", "add", "name", self._bridge, "type", "bridge")
            _ip("addr", "add", f"{self.gateway}/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
        except SupervisorError:
            self.close()
            raise

    @property
    def gateway(self) -> str:
        """This machine's own address in the network."""
        return f"{self._subnet}.1"

    def add(self, number: int) -> str:
        """Make node ``number``'s namespace and link; returns its address."""
        name, near, address = self._namespace(number), self._link(number), f"{self._subnet}.{number + 1}"
        self._numbers.add(number)
        _ip("netns", "add", name)
        _ip("link", "add", near, "type", "veth", "peer", "name", self.interface, "netns", name)
        _ip("link", "set", near, "master", self._bridge, "up")
        _ip("-n", name, "addr", "add", f"{address}/24", "dev", self.interface)
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "link", "set", self.interface, "up")
        # No default route: a name server that is out of reach must fail at once, not after its time-outs.
        return address

    @contextmanager
    def inside(self, number: int) -> Iterator[None]:
        """What this thread starts within the block belongs to node ``number``'s namespace."""
        with Path("/proc/thread-self/ns/net").open() as home, (_NAMESPACES / self._namespace(number)).open() as there:
            _enter(there.fileno())
            try:
                yield
            finally:
                _enter(home.fileno())

    def cut(self, number: int) -> None:
        """Take the link of node ``number`` down: packets vanish, both ways, without a word."""
        _ip("link", "set", self._link(number), "down")

    def remove(self, number: int) -> None:
        """Remove the link and the namespace of node ``number``."""
        self._numbers.discard(number)
        _remove_link(self._link(number))
        _remove_namespace(self._namespace(number))

    def close(self) -> None:
        """Remove everything."""
        for number in sorted(self._numbers):
            self.remove(number)
        _remove_link(self._bridge)

    def _namespace(self, number: int) -> str:
        return f"{_PREFIX}{self._tag}-{number}"

    def _link(self, number: int) -> str:
        return f"{self._bridge}n{number}"


def why_no_networks() -> str | None:
    """What this machine lacks for a private network; None when it lacks nothing."""
    if os.geteuid() != 0:
        return "cut-node needs root: each node gets a network namespace of its own"
    try:
        _ip("netns", "list")
        _ip("-V")
    except SupervisorError as error:
        return f"cut-node needs network namespaces and `ip` of iproute2: {error}"
    return None


def remove_stale_networks() -> None:
    """Remove namespaces and links whose owner was killed."""
    names = sorted(_NAMESPACES.iterdir()) if _NAMESPACES.is_dir() else []
    for path in names:
        tag = path.name.removeprefix(_PREFIX).rpartition("-")[0]
        if not path.name.startswith(_PREFIX) or not is_ownerless(tag):
            continue
        _log.warning("removing network namespace %s, whose owner is gone", path.name)
        bridge = f"{_BRIDGE}{tag.partition('-')[0]}"
        _remove_link(f"{bridge}n{path.name.rpartition('-')[2]}")
        _remove_namespace(path.name)
        _remove_link(bridge)


def _free_subnet() -> str:
    """The first 24 bits of a private network that no address of this machine lies in."""
    taken = {
        ".".join(entry["local"].split(".")[:3])
        for link in json.loads(_ip("-j", "-4", "addr"))
        for entry in link.get("addr_info", ())
    }
    for offset in range(256):
        subnet = f"10.231.{(os.getpid() + offset) % 256}"
        if subnet not in taken:
            return subnet
    raise SupervisorError("no private network is free: all of 10.231.0.0/16 is in use")


def _remove_link(name: str) -> None:
    if Path("/sys/class/net", name).exists():
        _ip("link", "del", name)


def _remove_namespace(name: str) -> None:
    if (_NAMESPACES / name).exists():
        _ip("netns", "del", name)


def _enter(descriptor: int) -> None:
    libc: Any = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        code = ctypes.get_errno()
        raise SupervisorError(f"a network namespace cannot be entered: {os.strerror(code)}")


def _ip(*arguments: str) -> str:
    """Run `ip`; SupervisorError with what it said when it fails."""
    command = ["ip", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise SupervisorError(f"{' '.join(command)}: {error}") from error
    if done.returncode != 0:
        raise SupervisorError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout

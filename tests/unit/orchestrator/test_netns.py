"""Private networks of nodes. Real: network namespaces, a bridge, TCP over it, where this machine allows them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.netns import PrivateNetwork, remove_stale_networks, why_no_networks

WAIT_S = 10.0
pytestmark = pytest.mark.skipif(why_no_networks() is not None, reason="no network namespaces here")


@pytest.fixture
def network() -> Iterator[PrivateNetwork]:
    made = PrivateNetwork()
    yield made
    made.close()


def listen(network: PrivateNetwork, number: int, address: str) -> socket.socket:
    with network.inside(number):
        server = socket.create_server((address, 0))
    server.settimeout(WAIT_S)
    return server


def traces() -> set[str]:
    namespaces = Path("/run/netns")
    names = {path.name for path in namespaces.iterdir()} if namespaces.is_dir() else set()
    return {name for name in names | set(os.listdir("/sys/class/net")) if name.startswith(("raysume-", "rsm"))}


def test_nodes_reach_each_other_and_the_machine_by_their_own_addresses(network: PrivateNetwork) -> None:
    first, second = network.add(1), network.add(2)
    assert len({network.gateway, first, second}) == 3
    with listen(network, 2, second) as server:
        with network.inside(1), socket.create_connection(server.getsockname(), timeout=WAIT_S):
            assert server.accept()[1][0] == first
        with socket.create_connection(server.getsockname(), timeout=WAIT_S):
            assert server.accept()[1][0] == network.gateway


def test_a_cut_node_falls_silent_in_the_middle_of_a_connection(network: PrivateNetwork) -> None:
    address = network.add(1)
    with listen(network, 1, address) as server, socket.create_connection(server.getsockname(), timeout=WAIT_S) as near:
        far, _ = server.accept()
        with far:
            far.settimeout(0.3)
            near.sendall(b"before")
            assert far.recv(100) == b"before"
            network.cut(1)
            near.sendall(b"after")  # taken by this machine's kernel, and lost on the way
            with pytest.raises(TimeoutError):
                far.recv(100)


def test_a_thread_is_back_home_after_the_block_and_others_never_left(network: PrivateNetwork) -> None:
    network.add(1)
    home, seen = os.readlink("/proc/thread-self/ns/net"), []
    with network.inside(1):
        assert os.readlink("/proc/thread-self/ns/net") != home
        script = "import os; print(os.readlink('/proc/self/ns/net'))"
        child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
        assert child.stdout.strip() == os.readlink("/proc/thread-self/ns/net")
    thread = threading.Thread(target=lambda: seen.append(os.readlink("/proc/thread-self/ns/net")))
    thread.start()
    thread.join(WAIT_S)
    assert (os.readlink("/proc/thread-self/ns/net"), seen) == (home, [home])


def test_nothing_is_left_after_the_end(network: PrivateNetwork) -> None:
    network.add(1)
    network.add(2)
    network.remove(1)
    network.close()
    assert not [name for name in traces() if str(os.getpid()) in name]


def test_networks_of_a_killed_process_are_removed_and_those_of_living_ones_are_not(network: PrivateNetwork) -> None:
    network.add(1)
    code = (
        "import os, signal; from orchestrator.netns import PrivateNetwork\n"
        "network = PrivateNetwork(); network.add(1); network.add(2)\n"
        "print(os.getpid(), flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    owner = done.stdout.strip()
    assert len([name for name in traces() if owner in name]) == 5, done.stderr
    remove_stale_networks()
    assert not [name for name in traces() if owner in name]
    assert [name for name in traces() if str(os.getpid()) in name]

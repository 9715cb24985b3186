"""Lifelines: whose process has ended is known from its connection alone. Real sockets, real processes and SIGKILL."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from orchestrator.lifelines import Lifelines
from workers.lifeline import NONCE_BYTES, Hello, Lifeline, LifelineSpec, Role, read_hello

HOLDER = """
import sys
from workers.lifeline import Lifeline, LifelineSpec, Role
spec = LifelineSpec(host="127.0.0.1", port=int(sys.argv[1]), key=bytes.fromhex(sys.argv[2]))
line = Lifeline(spec, role=Role(sys.argv[3]), name=sys.argv[4], node_id="n1")
sys.stdin.read()
"""


def eventually(is_so: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20.0
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


@pytest.fixture
def lifelines() -> Iterator[Lifelines]:
    lines = Lifelines("127.0.0.1")
    yield lines
    lines.close()


@pytest.fixture
def holders() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def hold(
    lifelines: Lifelines, holders: list[subprocess.Popen[bytes]], role: Role, name: str
) -> subprocess.Popen[bytes]:
    spec = lifelines.spec
    command = [sys.executable, "-c", HOLDER, str(spec.port), spec.key.hex(), role.value, name]
    holders.append(subprocess.Popen(command, stdin=subprocess.PIPE))
    assert eventually(lambda: lifelines.is_held(role, name))
    return holders[-1]


def test_a_killed_process_is_told_by_its_line_and_the_others_are_not(
    lifelines: Lifelines, holders: list[subprocess.Popen[bytes]]
) -> None:
    doomed = hold(lifelines, holders, Role.WORKER, "w1")
    hold(lifelines, holders, Role.WORKER, "w2")
    hold(lifelines, holders, Role.AGENT, "n1")
    assert not lifelines.is_cut("w1")
    before_s = time.time()
    doomed.send_signal(signal.SIGKILL)
    lifelines.bell.wait(20.0)
    assert lifelines.is_cut("w1")
    cut_at_s = lifelines.cut_at_s("w1")
    assert cut_at_s is not None
    assert before_s <= cut_at_s <= time.time()
    assert not lifelines.is_cut("w2")
    assert not lifelines.is_agent_cut("n1")
    holders[2].send_signal(signal.SIGKILL)
    lifelines.bell.wait(20.0)
    assert lifelines.is_agent_cut("n1")


def test_the_end_of_a_node_s_former_agent_says_nothing_of_the_present_one(
    lifelines: Lifelines, holders: list[subprocess.Popen[bytes]]
) -> None:
    """Whichever of them called last."""
    present = hold(lifelines, holders, Role.AGENT, "n1")
    hello = Hello(role=Role.AGENT, name="n1", node_id="n1", pid=1)
    with socket.create_connection(("127.0.0.1", lifelines.spec.port), timeout=20.0) as former:
        former.sendall(hello.sealed(former.recv(NONCE_BYTES), lifelines.spec.key))
        with lifelines._lock:
            line = lifelines._lines[Role.AGENT, "n1"]
        assert eventually(lambda: len(line.callers) == 2)
    assert eventually(lambda: len(line.callers) == 1)
    assert lifelines.is_held(Role.AGENT, "n1")
    assert not lifelines.is_agent_cut("n1")
    present.send_signal(signal.SIGKILL)
    assert eventually(lambda: lifelines.is_agent_cut("n1"))


def test_a_stopped_process_is_not_taken_for_dead_until_it_is_killed(
    lifelines: Lifelines, holders: list[subprocess.Popen[bytes]]
) -> None:
    stopped = hold(lifelines, holders, Role.WORKER, "w1")
    stopped.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, stopped.pid, os.WSTOPPED)
    assert not lifelines.is_cut("w1")
    stopped.send_signal(signal.SIGKILL)
    lifelines.bell.wait(20.0)
    assert lifelines.is_cut("w1")


def test_a_process_that_never_called_is_neither_held_nor_cut(lifelines: Lifelines) -> None:
    assert not lifelines.is_held(Role.WORKER, "w9")
    assert not lifelines.is_cut("w9")
    assert not lifelines.is_agent_cut("n9")


def test_a_broken_connection_of_a_living_process_is_made_anew(lifelines: Lifelines) -> None:
    """A relay between the two breaks it, as a network would."""
    with socket.create_server(("127.0.0.1", 0)) as relay:
        spec = dataclasses.replace(lifelines.spec, port=relay.getsockname()[1])
        line = Lifeline(spec, role=Role.WORKER, name="w1", node_id="n1")
        pairs = []
        for _ in range(2):
            near, _ = relay.accept()
            far = socket.create_connection(("127.0.0.1", lifelines.spec.port))
            pairs.append((near, far))
            threading.Thread(target=pump, args=(far, near), daemon=True).start()
            threading.Thread(target=pump, args=(near, far), daemon=True).start()
            assert eventually(lambda: lifelines.is_held(Role.WORKER, "w1"))
            assert not lifelines.is_cut("w1")
            if len(pairs) == 1:
                near.shutdown(socket.SHUT_RDWR)
                assert eventually(lambda: lifelines.is_cut("w1"))
        line.close()
        assert eventually(lambda: lifelines.is_cut("w1"))
        for one in (end for pair in pairs for end in pair):
            one.close()


def pump(source: socket.socket, sink: socket.socket) -> None:
    try:
        while got := source.recv(4096):
            sink.sendall(got)
        sink.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


def test_who_does_not_know_the_key_or_talks_nonsense_is_turned_away(lifelines: Lifelines) -> None:
    hello = Hello(role=Role.WORKER, name="w1", node_id="n1", pid=1)
    for say in (
        lambda nonce: hello.sealed(nonce, b"x" * 32),
        lambda _: hello.sealed(b"0" * NONCE_BYTES, lifelines.spec.key),  # an answer overheard before
        lambda _: b"\xff\xff" + b"a" * 100,
        lambda _: b"GET / HTTP/1.1\r\n\r\n" * 100,
    ):
        with socket.create_connection(("127.0.0.1", lifelines.spec.port), timeout=20.0) as caller:
            caller.sendall(say(caller.recv(NONCE_BYTES)))
            assert ended(caller)
    assert not lifelines.is_held(Role.WORKER, "w1")
    assert not lifelines.is_cut("w1")
    with socket.create_connection(("127.0.0.1", lifelines.spec.port), timeout=20.0) as caller:
        whole = hello.sealed(caller.recv(NONCE_BYTES), lifelines.spec.key)
        for at in range(len(whole)):
            caller.sendall(whole[at : at + 1])
        assert eventually(lambda: lifelines.is_held(Role.WORKER, "w1"))


def ended(caller: socket.socket) -> bool:
    try:
        return caller.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_hello_is_read_once_it_is_whole() -> None:
    hello = Hello(role=Role.AGENT, name="n1", node_id="n1", pid=77)
    nonce, key = b"n" * NONCE_BYTES, b"k" * 32
    sealed = hello.sealed(nonce, key)
    assert read_hello(sealed, nonce, key) == hello
    for end in range(len(sealed)):
        assert read_hello(sealed[:end], nonce, key) is None


def test_a_fork_does_not_keep_the_line_of_its_parent(
    lifelines: Lifelines, holders: list[subprocess.Popen[bytes]]
) -> None:
    spec = lifelines.spec
    forker = HOLDER.replace(
        "sys.stdin.read()",
        "import os, time\nsys.stdin.readline()\npid = os.fork()\nif not pid: time.sleep(600)\nprint(pid, flush=True)\n"
        "sys.stdin.read()",
    )
    command = [sys.executable, "-c", forker, str(spec.port), spec.key.hex(), "worker", "w1"]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    holders.append(parent)
    assert eventually(lambda: lifelines.is_held(Role.WORKER, "w1"))
    assert parent.stdin is not None
    assert parent.stdout is not None
    parent.stdin.write(b"\n")
    parent.stdin.flush()
    child = int(parent.stdout.readline())
    try:
        parent.send_signal(signal.SIGKILL)
        assert eventually(lambda: lifelines.is_cut("w1"))
    finally:
        os.kill(child, signal.SIGKILL)


def test_nothing_is_left_open_after_close() -> None:
    before = len(os.listdir("/proc/self/fd"))
    lines = Lifelines("127.0.0.1")
    line = Lifeline(lines.spec, role=Role.WORKER, name="w1", node_id="n1")
    assert eventually(lambda: lines.is_held(Role.WORKER, "w1"))
    line.close()
    lines.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_key_is_never_shown() -> None:
    spec = LifelineSpec(host="127.0.0.1", port=1, key=b"secret")
    assert "secret" not in repr(spec)

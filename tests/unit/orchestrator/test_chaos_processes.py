"""What chaos does to processes. Real: child processes, their limits and their states as /proc has them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.chaos_processes import SlowedNode, pids_titled, starve
from orchestrator.errors import SupervisorError

WAIT_S = 20.0
# Takes the number of bytes on each line and says what came of asking for them.
EATER = """
import sys
for line in sys.stdin:
    try:
        kept = bytearray(int(line))
        print("got", flush=True)
    except MemoryError:
        print("MemoryError", flush=True)
"""


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []

    def started(code: str, title: str | None = None) -> subprocess.Popen[str]:
        command = [title or sys.executable, "-c", code]
        process = subprocess.Popen(
            command, executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        processes.append(process)
        return process

    yield started
    for process in processes:
        process.kill()
        process.communicate(timeout=WAIT_S)


def ask(process: subprocess.Popen[str], size_bytes: int) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{size_bytes}\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def await_state(pid: int, wanted: Callable[[str], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not wanted(state(pid)):
        assert time.monotonic() < deadline, f"process {pid} stays in state {state(pid)}"


def test_a_starved_process_gets_no_more_memory_and_lives(start: Callable[..., subprocess.Popen[str]]) -> None:
    process = start(EATER)
    assert ask(process, 64 << 20) == "got"
    assert starve(process.pid) > 1 << 20
    assert ask(process, 256 << 20) == "MemoryError"
    assert process.poll() is None


def test_starving_what_is_gone_is_an_error(start: Callable[..., subprocess.Popen[str]]) -> None:
    process = start("")
    process.wait(WAIT_S)
    with pytest.raises(SupervisorError, match=f"process {process.pid}"):
        starve(process.pid)


def test_a_slowed_process_is_stopped_again_and_again_and_runs_on_afterwards(
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    slow, stopped = start(EATER), start(EATER)
    assert (ask(slow, 1), ask(stopped, 1)) == ("got", "got")
    slowed = SlowedNode(lambda: [slow.pid, stopped.pid], {stopped.pid})
    try:
        for _ in range(3):
            await_state(slow.pid, lambda found: found == "T")
            await_state(slow.pid, lambda found: found != "T")
        assert state(stopped.pid) != "T"
        assert ask(slow, 1) == "got"
    finally:
        slowed.close()
    assert state(slow.pid) != "T"
    slowed.close()


def test_processes_are_found_by_their_title_below_a_parent_only(start: Callable[..., subprocess.Popen[str]]) -> None:
    keeper = start(EATER, "ray::KeeperActor.ping")
    other = start(EATER, "ray::WorkerActor")
    assert (ask(keeper, 1), ask(other, 1)) == ("got", "got")
    assert keeper.pid in pids_titled(os.getpid(), "ray::KeeperActor")
    assert other.pid not in pids_titled(os.getpid(), "ray::KeeperActor")
    assert pids_titled(other.pid, "ray::KeeperActor") == []

"""The door for chaos into a worker. Real: the pipe, the threads of this process."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from workers.chaos_seam import ChaosError, open_seam, strike
from workers.contract import CauseKind
from workers.failure_cause import classify

WAIT_S = 20.0


def test_an_order_raises_in_the_training_thread_alone_and_counts_as_the_trainings_error(tmp_path: Path) -> None:
    caught: list[BaseException] = []
    is_over = threading.Event()

    def train() -> None:
        deadline = time.monotonic() + WAIT_S
        try:
            while time.monotonic() < deadline:
                sum(range(100))
        except BaseException as error:  # noqa: BLE001  what is raised is what the test is about
            caught.append(error)

    training = threading.Thread(target=train, name="train-1.abc-rank-0")
    other = threading.Thread(target=is_over.wait, args=(WAIT_S,), name="keeps-running")
    training.start()
    other.start()
    open_seam(str(tmp_path))
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            strike(tmp_path, os.getpid())
            break
        except OSError:  # the listener has not opened its end yet
            assert time.monotonic() < deadline
    training.join(WAIT_S)
    assert [type(error) for error in caught] == [ChaosError]
    assert classify(caught[0]) is CauseKind.USER
    assert "on purpose" in str(caught[0])
    assert other.is_alive()
    is_over.set()


def test_an_order_between_two_worlds_raises_in_the_next_training_thread(tmp_path: Path) -> None:
    caught = threading.Event()

    def train() -> None:
        deadline = time.monotonic() + WAIT_S
        try:
            while time.monotonic() < deadline:
                sum(range(100))
        except ChaosError:
            caught.set()

    open_seam(str(tmp_path))
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            strike(tmp_path, os.getpid())
            break
        except OSError:  # the listener has not opened its end yet
            assert time.monotonic() < deadline
    assert not caught.wait(0.2), "nobody is there yet"
    threading.Thread(target=train, name="train-2.abc-rank-0", daemon=True).start()
    assert caught.wait(WAIT_S)


def test_an_order_to_nobody_is_an_error_and_waits_for_none(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        strike(tmp_path, 1)
    os.mkfifo(tmp_path / "1")
    with pytest.raises(OSError, match="No such device or address"):
        strike(tmp_path, 1)

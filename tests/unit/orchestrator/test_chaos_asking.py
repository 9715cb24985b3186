"""The `scale` verb asks a driver through the run's store. Real: the Lease, the desk's thread, a store of files."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from orchestrator.chaos import ChaosAction, parse_chaos
from orchestrator.chaos_asking import Resizing
from orchestrator.config import RunConfig
from orchestrator.errors import SupervisorError
from orchestrator.load_config import load_config
from orchestrator.requests import Request, RequestDesk
from storage.keys import RUN
from storage.lease import acquire
from storage.local_store import LocalStore

DRIVER = "aaaaaaaa"
LIMIT_S = 30.0
Answer = Callable[[RequestDesk, Request], None]


def config_at(directory: Path) -> RunConfig:
    return load_config(Path("clusters/local/run.yaml"), [f"run.url={directory}"])


def scale(workers: int) -> ChaosAction:
    return parse_chaos(f"scale:{workers}@3")[0]


@contextmanager
def driver(directory: Path, answer: Answer) -> Iterator[list[int | None]]:
    """A living driver of this process, whose desk is looked at until the end; the numbers it was asked for."""
    store = LocalStore(directory)
    acquire(store, "run", nonce=DRIVER)
    store.put(RUN, b"{}")
    desk = RequestDesk(store, DRIVER, interval_s=0.01)
    asked: list[int | None] = []
    over = threading.Event()

    def work() -> None:
        while not over.wait(0.01):
            for request in desk.take():
                asked.append(request.workers)
                answer(desk, request)

    desk.start()
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield asked
    finally:
        over.set()
        thread.join(LIMIT_S)
        desk.close()


def test_what_the_driver_accepts_has_happened(tmp_path: Path) -> None:
    happened = threading.Event()
    with driver(tmp_path, lambda desk, request: desk.answer(request.nonce, "accepted", "on its way")) as asked:
        Resizing(config_at(tmp_path)).ask(scale(3), happened.set)
        assert happened.wait(LIMIT_S)
    assert asked == [3]


def test_what_the_driver_refuses_has_not_happened_and_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    happened = threading.Event()
    with driver(tmp_path, lambda desk, request: desk.answer(request.nonce, "refused", "too many")):
        resizing = Resizing(config_at(tmp_path))
        resizing.ask(scale(3), happened.set)
        resizing.close()
    assert not happened.is_set()
    assert "scale:3@3 did NOT happen: the driver refused: too many" in caplog.text


def test_without_a_driver_it_has_not_happened(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    resizing = Resizing(config_at(tmp_path))
    happened = threading.Event()
    resizing.ask(scale(2), happened.set)
    resizing.close()
    assert not happened.is_set()
    assert "scale:2@3 did NOT happen: NotARun" in caplog.text


def test_a_driver_that_ended_meanwhile_is_said_to_have(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    LocalStore(tmp_path).put(RUN, b"{}")
    resizing = Resizing(config_at(tmp_path))
    resizing.ask(scale(2), lambda: None)
    resizing.close()
    assert "scale:2@3 did NOT happen: the driver ended before it answered, NoDriver: no lease is there" in caplog.text


def test_a_second_one_waits_for_no_first(tmp_path: Path) -> None:
    going_on = threading.Event()

    def answer_late(desk: RequestDesk, request: Request) -> None:
        going_on.wait(LIMIT_S)
        desk.answer(request.nonce, "refused", "")

    with driver(tmp_path, answer_late):
        resizing = Resizing(config_at(tmp_path))
        resizing.ask(scale(3), lambda: None)
        with pytest.raises(SupervisorError, match="not answered the scale before"):
            resizing.ask(scale(2), lambda: None)
        going_on.set()
        resizing.close()

"""Asking a driver through the store: done, refused, dead, silent, or nobody there.

Real: the Lease, the desk and its replies, a memory store. Scripted: time, which sleeps move on, and what a driver does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from orchestrator.asking import Asking, DriverGone, NoDriver, NotARun
from orchestrator.requests import Reply, Request, RequestDesk
from storage.errors import StoreUnavailable
from storage.keys import CONTROL, RUN, parse_request_key, reply_key
from storage.lease import Lease, Owner, acquire
from storage.memory_store import MemoryStore

DRIVER = "aaaaaaaa"


class Scene:
    """A driver of another machine that renews its Lease and looks at its desk once a second while it lives."""

    def __init__(self, name: str, *, does: Callable[[RequestDesk, Request], None] = lambda *_: None) -> None:
        self.store = MemoryStore(name)
        self.now = 0.0
        self.lives = self.answers = True
        self.does = does
        self.news: list[Reply] = []
        self.lease: Lease = acquire(
            self.store,
            "r",
            nonce=DRIVER,
            owner=Owner(host="elsewhere", pid=1, boot_id="elsewhere"),
            clock=lambda: self.now,
            sleep=self.sleep,
        )
        self.store.put(RUN, b"{}")
        self.desk = RequestDesk(self.store, DRIVER)

    def sleep(self, seconds: float) -> None:
        before, self.now = self.now, self.now + seconds
        if not self.lives or int(before) == int(self.now):
            return
        self.lease.renew()
        if self.answers:
            self.desk.look()
            for request in self.desk.take():
                self.does(self.desk, request)
            self.desk.look()

    def asking(self) -> Asking:
        return Asking(
            self.store,
            on_news=self.news.append,
            clock=lambda: self.now,
            sleep=self.sleep,
            wall_clock=lambda: self.now,
        )

    def left(self) -> list[str]:
        return [entry.key for entry in self.store.list(CONTROL)]


def accept(desk: RequestDesk, request: Request) -> None:
    desk.answer(request.nonce, "accepted", "on its way")


def test_an_accepted_wish_is_enough_unless_the_end_is_waited_for() -> None:
    scene = Scene("accepted", does=accept)
    answer = scene.asking().ask("scale", 3, until_done=False, timeout_s=60.0)
    assert answer.reply is not None
    assert (answer.reply.state, answer.reply.reason) == ("accepted", "on its way")
    assert (answer.request.driver, answer.request.workers) == (DRIVER, 3)
    assert len(scene.left()) == 2, "the driver still works on it"


def test_the_end_is_waited_for_and_nothing_is_left_behind() -> None:
    scene = Scene("done")

    def do(desk: RequestDesk, request: Request) -> None:
        desk.answer(request.nonce, "done", "saved", 41)

    scene.does = do
    answer = scene.asking().ask("save", None, until_done=True, timeout_s=60.0)
    assert answer.reply == Reply(nonce=answer.request.nonce, driver=DRIVER, state="done", reason="saved", step=41)
    assert scene.news == [answer.reply]
    assert scene.left() == []


def test_what_is_not_done_in_time_goes_on() -> None:
    scene = Scene("slow", does=accept)
    answer = scene.asking().ask("save", None, until_done=True, timeout_s=30.0)
    assert answer.reply is not None
    assert answer.reply.state == "accepted"
    assert 30.0 <= scene.now < 50.0
    assert len(scene.left()) == 2


def test_a_request_that_nobody_takes_is_withdrawn() -> None:
    scene = Scene("busy")
    scene.answers = False
    answer = scene.asking().ask("save", None, until_done=True, timeout_s=30.0)
    assert answer.reply is None
    assert scene.left() == []


def test_a_request_that_is_taken_as_it_is_withdrawn_is_not_said_to_be_withdrawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The driver had read it before it was removed."""
    scene = Scene("crossed")
    scene.answers = False
    delete = scene.store.delete

    def take_first(keys: list[str], **options: Any) -> None:
        monkeypatch.setattr(scene.store, "delete", delete)
        nonce = parse_request_key(keys[0])
        assert nonce is not None
        scene.store.put(reply_key(nonce), Reply(nonce=nonce, driver=DRIVER, state="taken").model_dump_json().encode())
        delete(keys, **options)

    monkeypatch.setattr(scene.store, "delete", take_first)
    answer = scene.asking().ask("save", None, until_done=False, timeout_s=5.0)
    assert answer.reply is not None
    assert answer.reply.state == "taken"


def test_a_driver_that_died_long_ago_is_not_asked() -> None:
    scene = Scene("dead")
    scene.lives = False
    with pytest.raises(NoDriver, match="not renewed within"):
        scene.asking().ask("save", None, until_done=True, timeout_s=60.0)
    assert scene.left() == []


def test_a_driver_that_ends_without_an_answer_is_noticed() -> None:
    scene = Scene("leaves")

    def leave(desk: RequestDesk, request: Request) -> None:
        del desk, request
        scene.lives = False
        scene.lease.release()

    scene.does = leave
    with pytest.raises(DriverGone, match=DRIVER):
        scene.asking().ask("save", None, until_done=True, timeout_s=60.0)


def test_a_driver_that_dies_while_it_is_waited_for_is_noticed() -> None:
    scene = Scene("dies")

    def die(desk: RequestDesk, request: Request) -> None:
        accept(desk, request)
        scene.lives = False

    scene.does = die
    with pytest.raises(DriverGone):
        scene.asking().ask("save", None, until_done=True, timeout_s=600.0)
    assert scene.now < 100.0


def test_the_last_word_of_a_driver_that_ends_counts() -> None:
    scene = Scene("last-word")

    def stop(desk: RequestDesk, request: Request) -> None:
        desk.answer(request.nonce, "done", "the run has ended")
        desk.look()
        scene.lives = False
        scene.lease.release()

    scene.does = stop
    answer = scene.asking().ask("stop", None, until_done=True, timeout_s=60.0)
    assert answer.reply is not None
    assert answer.reply.state == "done"


def test_a_place_without_a_run_and_a_run_without_a_driver_are_told_apart() -> None:
    store = MemoryStore("empty")
    with pytest.raises(NotARun):
        Asking(store).ask("save", None, until_done=False, timeout_s=1.0)
    store.put(RUN, b"{}")
    with pytest.raises(NoDriver, match="no lease is there"):
        Asking(store).ask("save", None, until_done=False, timeout_s=1.0)
    assert store.list(CONTROL) == []


def test_a_store_that_is_away_for_a_moment_ends_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene("blip", does=accept)
    real, failures = scene.store.get, [0]

    def get(key: str, *, deadline_s: float = 60.0) -> bytes:
        if key.startswith(CONTROL) and b"accepted" in (real(key) or b"") and failures[0] < 3:
            failures[0] += 1
            raise StoreUnavailable("get", key, "503")
        return real(key, deadline_s=deadline_s)

    monkeypatch.setattr(scene.store, "get", get)
    answer = scene.asking().ask("scale", 2, until_done=False, timeout_s=60.0)
    assert failures == [3]
    assert answer.reply is not None
    assert answer.reply.state == "accepted"

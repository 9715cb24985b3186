"""Requests through a store: taken once, answered, refused where they are another driver's, foreign files left alone.

Real: the desk's thread, a memory store and one on disk. Scripted: when the store answers.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from orchestrator.requests import Reply, Request, RequestDesk, read_reply
from storage.errors import StoreUnavailable
from storage.keys import CONTROL, reply_key, request_key
from storage.local_store import LocalStore
from storage.memory_store import MemoryStore
from storage.object_store import ObjectStore

DRIVER, OTHER = "aaaaaaaa", "bbbbbbbb"
NONCE = "00000001"
_WAIT_S = 20.0


@pytest.fixture(params=["memory", "disk"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return MemoryStore("requests") if request.param == "memory" else LocalStore(tmp_path)


def put(store: ObjectStore, nonce: str = NONCE, *, driver: str = DRIVER, workers: int | None = 3) -> None:
    wish = "save" if workers is None else "scale"
    request = Request(nonce=nonce, driver=driver, wish=wish, workers=workers)
    store.put(request_key(nonce), request.model_dump_json().encode())


def state_of(store: ObjectStore, nonce: str = NONCE) -> str | None:
    reply = read_reply(store, nonce)
    return None if reply is None else reply.state


def test_a_request_is_taken_once_and_its_answers_are_read_in_order(store: ObjectStore) -> None:
    put(store)
    desk = RequestDesk(store, DRIVER)
    assert read_reply(store, NONCE) is None
    desk.look()
    assert state_of(store) == "taken"
    (request,) = desk.take()
    assert (request.wish, request.workers) == ("scale", 3)
    desk.answer(NONCE, "accepted", "on its way")
    desk.answer(NONCE, "done", "three train", 40)
    desk.look()
    assert read_reply(store, NONCE) == Reply(nonce=NONCE, driver=DRIVER, state="done", reason="three train", step=40)
    desk.look()
    assert desk.take() == ()


def test_a_thread_takes_and_answers_while_nobody_waits(store: ObjectStore) -> None:
    answered = threading.Event()

    class Watched:
        def __getattr__(self, name: str) -> object:
            return getattr(store, name)

        def put(self, key: str, data: bytes, *, deadline_s: float = 60.0) -> None:
            store.put(key, data, deadline_s=deadline_s)
            if b'"done"' in data:
                answered.set()

    put(store, workers=None)
    desk = RequestDesk(Watched(), DRIVER, interval_s=0.01)  # type: ignore[arg-type]
    desk.start()
    try:
        for _ in range(2000):
            taken = desk.take()
            if taken:
                break
            threading.Event().wait(0.01)
        (request,) = taken
        desk.answer(request.nonce, "done", step=7)
        assert answered.wait(_WAIT_S)
    finally:
        desk.close()
    assert state_of(store) == "done"


def test_the_last_answers_are_sent_when_the_desk_closes(store: ObjectStore) -> None:
    desk = RequestDesk(store, DRIVER, interval_s=3600.0)
    desk.start()
    desk.answer(NONCE, "refused", "the run has ended")
    desk.close()
    assert state_of(store) == "refused"


def test_a_request_for_another_driver_is_refused_and_never_done(store: ObjectStore) -> None:
    put(store, driver=OTHER)
    desk = RequestDesk(store, DRIVER)
    desk.look()
    assert desk.take() == ()
    reply = read_reply(store, NONCE)
    assert reply is not None
    assert reply.state == "refused"
    assert OTHER in reply.reason
    assert "ask again" in reply.reason


@pytest.mark.parametrize("state", ["taken", "accepted"])
def test_what_a_dead_driver_had_taken_is_not_done_again(store: ObjectStore, state: str) -> None:
    put(store, driver=OTHER)
    earlier = Reply.model_validate({"nonce": NONCE, "driver": OTHER, "state": state})
    store.put(reply_key(NONCE), earlier.model_dump_json().encode())
    desk = RequestDesk(store, DRIVER)
    desk.look()
    assert desk.take() == ()
    assert state_of(store) == "refused"


def test_a_driver_that_knows_nothing_of_an_answered_request_leaves_it(store: ObjectStore) -> None:
    put(store)
    done = Reply(nonce=NONCE, driver=OTHER, state="done", step=3)
    store.put(reply_key(NONCE), done.model_dump_json().encode())
    desk = RequestDesk(store, DRIVER)
    desk.look()
    assert desk.take() == ()
    assert read_reply(store, NONCE) == done


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b"[1]",
        b'{"nonce": "00000001", "driver": "aaaaaaaa", "wish": "format-disk"}',
        b'{"version": 2, "nonce": "00000001", "driver": "aaaaaaaa", "wish": "save"}',
        b'{"nonce": "00000002", "driver": "aaaaaaaa", "wish": "save"}',
        b'{"nonce": "00000001", "driver": "aaaaaaaa", "wish": "scale"}',
        b'{"nonce": "00000001", "driver": "aaaaaaaa", "wish": "scale", "workers": -1}',
        b" " * 70_000,
    ],
)
def test_a_file_that_is_no_request_is_left_alone(store: ObjectStore, body: bytes) -> None:
    foreign = [f"{CONTROL}notes.txt", f"{CONTROL}request-XYZ.json", f"{CONTROL}old/request-00000001.json"]
    for key in [*foreign, request_key(NONCE)]:
        store.put(key, body)
    desk = RequestDesk(store, DRIVER)
    desk.look()
    desk.look()
    assert desk.take() == ()
    for key in [*foreign, request_key(NONCE)]:
        assert store.get(key) == body
    assert len(store.list(CONTROL)) == 4, "and nothing is written beside it"


def test_answered_requests_are_removed_after_a_while_and_others_are_not() -> None:
    store, now = MemoryStore("old"), [0.0]
    put(store)
    put(store, "00000002")
    desk = RequestDesk(store, DRIVER, monotonic=lambda: now[0])
    desk.look()
    desk.answer(NONCE, "done")
    desk.look()
    now[0] = 599.0
    desk.look()
    assert state_of(store) == "done"
    now[0] = 601.0
    desk.look()
    assert [entry.key for entry in store.list(CONTROL)] == [reply_key("00000002"), request_key("00000002")]


def test_a_reply_whose_request_and_driver_are_gone_goes_too() -> None:
    store, now = MemoryStore("left"), [0.0]
    left = Reply(nonce=NONCE, driver=OTHER, state="done")
    store.put(reply_key(NONCE), left.model_dump_json().encode())
    desk = RequestDesk(store, DRIVER, monotonic=lambda: now[0])
    for now[0] in (1.0, 600.0):
        desk.look()
        assert state_of(store) == "done"
    now[0] = 602.0
    desk.look()
    assert list(store.list(CONTROL)) == []


def test_more_requests_than_the_desk_holds_wait_in_the_store() -> None:
    store = MemoryStore("many")
    for number in range(40):
        put(store, f"{number:08x}")
    desk = RequestDesk(store, DRIVER)
    taken = []
    for _ in range(5):
        desk.look()
        batch = desk.take()
        assert len(batch) <= 16
        taken += [request.nonce for request in batch]
    assert taken == [f"{number:08x}" for number in range(40)]


class Flaky:
    """A store in which chosen calls fail, before or after they had their effect."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.failing: set[str] = set()
        self.failing_late: set[str] = set()

    def __getattr__(self, name: str) -> object:
        def call(*args: object, **kwargs: object) -> object:
            if name in self.failing:
                raise StoreUnavailable(name, "control/", "503")
            result = getattr(self._store, name)(*args, **kwargs)
            if name in self.failing_late:
                raise StoreUnavailable(name, "control/", "the answer was lost")
            return result

        return call


@pytest.mark.parametrize("call", ["list", "get", "put"])
def test_a_store_that_is_away_only_delays(call: str) -> None:
    store = MemoryStore("away")
    put(store)
    flaky = Flaky(store)
    flaky.failing = {call}
    desk = RequestDesk(flaky, DRIVER)  # type: ignore[arg-type]
    for _ in range(3):
        with pytest.raises(StoreUnavailable):
            desk.look()
    assert desk.take() == ()
    flaky.failing = set()
    desk.look()
    assert len(desk.take()) == 1
    desk.answer(NONCE, "done")
    flaky.failing = {"put"}
    with pytest.raises(StoreUnavailable):
        desk.look()
    flaky.failing = set()
    desk.look()
    assert state_of(store) == "done"


def test_a_request_whose_taking_seemed_to_fail_is_still_done_once() -> None:
    store = MemoryStore("lost-answer")
    put(store)
    flaky = Flaky(store)
    flaky.failing_late = {"put"}
    desk = RequestDesk(flaky, DRIVER)  # type: ignore[arg-type]
    with pytest.raises(StoreUnavailable):
        desk.look()
    flaky.failing_late = set()
    for _ in range(3):
        desk.look()
    assert len(desk.take()) == 1


def test_a_request_that_is_withdrawn_while_it_is_taken_is_not_done() -> None:
    class Withdrawn(MemoryStore):
        def put(self, key: str, *rest: Any, **options: Any) -> Any:
            self.delete([request_key(NONCE)])
            return super().put(key, *rest, **options)

    store = Withdrawn("withdrawn")
    MemoryStore.put(
        store, request_key(NONCE), Request(nonce=NONCE, driver=DRIVER, wish="stop").model_dump_json().encode()
    )
    desk = RequestDesk(store, DRIVER)
    for _ in range(2):
        desk.look()
    assert desk.take() == ()
    assert state_of(store) == "refused"


def test_a_request_holds_what_its_wish_needs_and_nothing_else() -> None:
    with pytest.raises(ValidationError, match="workers belong to a scale"):
        Request(nonce=NONCE, driver=DRIVER, wish="save", workers=2)
    with pytest.raises(ValidationError, match="workers belong to a scale"):
        Request(nonce=NONCE, driver=DRIVER, wish="scale")
    newer = b'{"nonce": "00000001", "driver": "aaaaaaaa", "wish": "save", "priority": 9}'
    assert Request.model_validate_json(newer).wish == "save", "what a later version adds is passed over"

"""Objects that go up in parts while they are made: what arrives, what a failing server does to it, what stays behind.

Real: Swift and moto over HTTP. A proxy between counts what is sent, holds parts, refuses, resets and stalls them.
"""

from __future__ import annotations

import os
import threading
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest

import storage.s3_multipart
from storage.config import StoreConfig
from storage.errors import StoreRefused
from storage.memory_store import MemoryStore
from storage.object_store import GrowingObject, GrowsObjects
from storage.retrying import RetryingStore
from storage.s3_store import S3Store
from storage.streamed_put import can_stream
from tests.s3_stores import PART, new_bucket
from tests.servers import DelayProxy, QuirkProxy
from tests.servers.quirk_proxy import Answer, Forward, Request, ResetConnection, error_answer

WAIT_S = 30.0
BOTH = pytest.mark.parametrize("proxy", ["swift", "moto"], indirect=True)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.s3_multipart, "_SMALLEST_PART", PART)


@pytest.fixture
def proxy(request: pytest.FixtureRequest, s3_env: str) -> Iterator[QuirkProxy]:
    """In front of Swift, or of the server that the test names."""
    del s3_env
    server = request.getfixturevalue(f"{getattr(request, 'param', 'swift')}_server")
    proxy = QuirkProxy(server.port).start()
    try:
        yield proxy
    finally:
        proxy.stop()


@pytest.fixture
def client(request: pytest.FixtureRequest, proxy: QuirkProxy) -> Any:
    """Past the proxy."""
    name = "swift" if proxy.backend_port == request.getfixturevalue("swift_server").port else "moto"
    return request.getfixturevalue(f"{name}_client")


@pytest.fixture
def bucket(client: Any, proxy: QuirkProxy) -> str:
    name = new_bucket(client)
    proxy.clear()
    return name


def store_of(
    bucket: str, endpoint: str, *, retries: int = 0, deadline_s: float = 20.0, multipart_bytes: int = PART
) -> RetryingStore:
    config = StoreConfig(endpoint_url=endpoint, retries=0, min_bytes_per_s=1e8, deadline_s=deadline_s)
    inner = S3Store(f"s3://{bucket}/run", config, multipart_bytes=multipart_bytes)
    return RetryingStore(inner, retries=retries, deadline_s=deadline_s, sleep=lambda _: None)


def grow(store: RetryingStore, key: str, most_bytes: int) -> GrowingObject:
    growing = store.grow(key, most_bytes)
    assert growing is not None
    return growing


def write(growing: GrowingObject, data: bytes) -> None:
    """In pieces that end nowhere near the end of a part, from memory that is used again."""
    scratch = bytearray(999_983)
    for start in range(0, len(data), len(scratch)):
        piece = data[start : start + len(scratch)]
        scratch[: len(piece)] = piece
        growing.write(memoryview(scratch)[: len(piece)])


def uploads(client: Any, bucket: str) -> list[str]:
    return [item["Key"] for item in client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])]


class Seen:
    """A rule that passes everything on and lets a test wait until answers of one operation came back."""

    def __init__(self, operation: str, rule: Any = lambda request, forward: forward(request)) -> None:
        self._operation, self._rule, self._num = operation, rule, 0
        self._changed = threading.Condition()

    def __call__(self, request: Request, forward: Forward) -> Answer:
        answer: Answer = self._rule(request, forward)
        if request.operation == self._operation:
            with self._changed:
                self._num += 1
                self._changed.notify_all()
        return answer

    def wait(self, number: int = 1) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._num >= number, WAIT_S), f"{self._operation}: {self._num}"


class Fails:
    """A rule: the part of that number is answered by ``act``, the first time."""

    def __init__(self, number: int, act: Any) -> None:
        self._number, self._act, self.is_done = number, act, threading.Event()

    def __call__(self, request: Request, forward: Forward) -> Answer:
        is_it = request.operation == "put-part" and request.query["partNumber"] == str(self._number)
        if is_it and not self.is_done.is_set():
            self.is_done.set()
            answer: Answer = self._act(request)
            return answer
        return forward(request)


@BOTH
def test_parts_are_stored_while_the_object_grows_and_the_put_sends_the_rest(
    proxy: QuirkProxy, bucket: str, client: Any
) -> None:
    data = os.urandom(4 * PART + 1000)
    store, proxy.rule = store_of(bucket, proxy.endpoint), (seen := Seen("put-part"))
    growing = grow(store, "large", len(data) + 100)
    write(growing, data[: 2 * PART])
    seen.wait(2)
    assert store.list("") == [], "nobody sees it before its put"
    assert store.abort_uploads("", older_than_s=0.0) == 0, "and nobody here takes it for a lost one"
    write(growing, data[2 * PART :])
    store.put("large", memoryview(data))
    assert store.get("large") == data
    assert proxy.uploaded_bytes() == len(data), "each byte went up once"
    assert uploads(client, bucket) == []


def test_what_this_process_sent_is_not_looked_up_again(proxy: QuirkProxy, bucket: str) -> None:
    data = os.urandom(2 * PART)
    store = store_of(bucket, proxy.endpoint)
    write(grow(store, "large", len(data)), data)
    store.put("large", data)
    assert sorted(proxy.operations()) == ["complete", "create-multipart", "head", "put-part", "put-part"]


def test_four_parts_are_held_at_most_and_the_writer_never_waits(
    swift_server: Any, swift_client: Any, s3_env: str
) -> None:
    del s3_env
    data = os.urandom(12 * PART)
    name = new_bucket(swift_client)
    link = DelayProxy(swift_server.port, pattern="partNumber").start()
    try:
        store = store_of(name, link.endpoint)
        store.list("")
        link.hold()
        tracemalloc.start()
        growing = grow(store, "large", len(data))
        write(growing, data)
        link.wait_held(WAIT_S)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 5.5 * PART, "4 parts, and one more while the last bytes of a part are joined"
        link.release()
        store.put("large", data)
        assert link.num_matched == 12
        assert store.get("large") == data
    finally:
        tracemalloc.stop()
        link.release()
        link.stop()


@BOTH
@pytest.mark.parametrize("act", [lambda _: error_answer(503, "SlowDown"), lambda _: error_answer(403, "AccessDenied")])
def test_a_part_that_fails_is_sent_by_the_put_and_no_other_twice(proxy: QuirkProxy, bucket: str, act: Any) -> None:
    data = os.urandom(4 * PART + 1)
    store = store_of(bucket, proxy.endpoint)
    proxy.rule = seen = Seen("put-part", Fails(2, act))
    growing = grow(store, "large", len(data))
    write(growing, data[: 2 * PART])
    seen.wait(2)
    write(growing, data[2 * PART :])
    store.put("large", data)
    assert store.get("large") == data
    assert proxy.uploaded_bytes() == len(data) + PART


def test_a_connection_that_breaks_in_the_middle_of_a_part_costs_that_part_alone(proxy: QuirkProxy, bucket: str) -> None:
    data = os.urandom(3 * PART + 1)
    store = store_of(bucket, proxy.endpoint)
    broken: list[str] = []

    def reset_after(head: Request) -> int | None:
        if head.operation == "put-part" and head.query["partNumber"] == "2" and len(broken) < 3:
            broken.append(head.target)  # aiohttp itself sends again after a reset
            return PART // 2
        return None

    proxy.reset_after = reset_after
    write(grow(store, "large", len(data)), data)
    store.put("large", data)
    assert len(broken) >= 1
    assert store.get("large") == data
    assert proxy.uploaded_bytes() == len(data), "what was cut off is not counted"


def test_a_part_that_stalls_is_left_and_sent_by_the_put(proxy: QuirkProxy, bucket: str) -> None:
    data = os.urandom(3 * PART)
    over = threading.Event()

    def stall(_: Request) -> Answer:
        over.wait(WAIT_S)
        raise ResetConnection

    store = store_of(bucket, proxy.endpoint, deadline_s=2.0, retries=2)
    proxy.rule = stalling = Fails(1, stall)
    try:
        write(grow(store, "large", len(data)), data)
        store.put("large", data)
        assert stalling.is_done.is_set()
        assert store.get("large") == data
    finally:
        over.set()


@pytest.mark.parametrize("error", [error_answer(501, "NotImplemented"), error_answer(503, "SlowDown")])
def test_an_upload_that_cannot_be_begun_is_begun_by_the_put(proxy: QuirkProxy, bucket: str, error: Answer) -> None:
    data = os.urandom(2 * PART)
    store, left = store_of(bucket, proxy.endpoint), [1]

    def rule(request: Request, forward: Forward) -> Answer:
        if request.operation == "create-multipart" and left:
            left.pop()
            return error
        return forward(request)

    proxy.rule = seen = Seen("create-multipart", rule)
    write(grow(store, "large", len(data)), data)
    seen.wait()
    store.put("large", data)
    assert store.get("large") == data
    assert proxy.uploaded_bytes() == len(data)


def test_an_upload_that_vanished_is_begun_anew(proxy: QuirkProxy, bucket: str, client: Any) -> None:
    data = os.urandom(3 * PART)
    store, proxy.rule = store_of(bucket, proxy.endpoint, retries=2), (seen := Seen("put-part"))
    growing = grow(store, "large", len(data))
    write(growing, data[:PART])
    seen.wait()
    for item in client.list_multipart_uploads(Bucket=bucket)["Uploads"]:
        client.abort_multipart_upload(Bucket=bucket, Key=item["Key"], UploadId=item["UploadId"])
    write(growing, data[PART:])
    store.put("large", data)
    assert store.get("large") == data


@BOTH
def test_what_is_abandoned_leaves_no_upload_and_no_object(proxy: QuirkProxy, bucket: str, client: Any) -> None:
    data = os.urandom(3 * PART)
    parts = Seen("put-part")
    store, proxy.rule = store_of(bucket, proxy.endpoint), (aborts := Seen("abort", parts))
    growing = grow(store, "large", len(data))
    write(growing, data[: 2 * PART])
    parts.wait(2)
    growing.abandon()
    write(growing, data[2 * PART :])
    aborts.wait()
    assert uploads(client, bucket) == []
    assert store.list("") == []
    assert proxy.uploaded_bytes() == 2 * PART, "nothing is sent after it"
    store.put("large", data)
    assert store.get("large") == data


def test_a_put_given_up_for_good_leaves_nothing_of_what_went_ahead(proxy: QuirkProxy, bucket: str, client: Any) -> None:
    data = os.urandom(2 * PART)
    refused = error_answer(403, "AccessDenied")
    proxy.rule = lambda request, forward: refused if request.operation == "complete" else forward(request)
    store = store_of(bucket, proxy.endpoint)
    growing = grow(store, "large", len(data))
    write(growing, data)
    with pytest.raises(StoreRefused):
        store.put("large", data)
    assert uploads(client, bucket) == []
    assert store.list("") == []
    growing.abandon()  # too late for anything


def test_a_completion_that_fails_is_tried_again_without_the_parts(proxy: QuirkProxy, bucket: str) -> None:
    data = os.urandom(2 * PART)
    left = [1]

    def rule(request: Request, forward: Forward) -> Answer:
        if request.operation == "complete" and left:
            left.pop()
            return error_answer(500, "InternalError")
        return forward(request)

    proxy.rule = rule
    store = store_of(bucket, proxy.endpoint, retries=1)
    write(grow(store, "large", len(data)), data)
    store.put("large", data)
    assert store.get("large") == data
    assert proxy.uploaded_bytes() == len(data)


@pytest.mark.parametrize("num_bytes", [PART + 5, PART, PART - 5])
def test_an_object_that_became_smaller_than_was_thought_is_stored_all_the_same(
    proxy: QuirkProxy, bucket: str, client: Any, num_bytes: int
) -> None:
    data = os.urandom(num_bytes)
    store = store_of(bucket, proxy.endpoint, multipart_bytes=3 * PART)
    write(grow(store, "small", 4 * PART), data)
    store.put("small", data)
    assert store.get("small") == data
    assert uploads(client, bucket) == []
    assert ("create-multipart" in proxy.operations()) is (num_bytes >= PART)


def test_what_is_put_at_another_length_is_not_mixed_with_what_went_ahead(
    proxy: QuirkProxy, bucket: str, client: Any
) -> None:
    data, other = os.urandom(2 * PART + 7), os.urandom(2 * PART + 6)
    store = store_of(bucket, proxy.endpoint)
    write(grow(store, "large", len(data)), data)
    store.put("large", other)
    assert store.get("large") == other
    until = time.monotonic() + WAIT_S
    while uploads(client, bucket):  # where one was begun at all before the put came
        assert time.monotonic() < until, "what went ahead is still on the server"


def test_nothing_grows_where_the_parts_of_the_bound_and_of_the_object_might_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(storage.s3_multipart, "_SMALLEST_PART", 16 << 20)
    assert can_stream(9000 * (16 << 20))
    assert not can_stream(9000 * (16 << 20) + 1)


def test_nothing_grows_below_the_size_that_goes_up_in_parts_nor_in_other_stores() -> None:
    assert S3Store("s3://bucket/run", multipart_bytes=PART).grow("key", PART - 1) is None
    plain = MemoryStore("streamed")
    assert not isinstance(plain, GrowsObjects)
    assert RetryingStore(plain, retries=0).grow("key", 1 << 40) is None

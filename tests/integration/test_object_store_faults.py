"""Stores that fail every fifth request, drop it, hang, stop, restart, stall, break off, or flip bits.

Real: Swift over TCP, HAProxy, SIGSTOP and SIGKILL of servers. A proxy plays what none of them does.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import storage.s3_multipart
from storage.commit_log import CommitLog
from storage.config import StoreConfig
from storage.errors import CorruptCheckpoint, StoreUnavailable
from storage.frames import read_index
from storage.s3_store import S3Store
from tests.fakes.checkpoints import RUN, save
from tests.s3_stores import PART, store_at
from tests.servers import DelayProxy, HaproxyProxy, QuirkProxy, SwiftServer
from tests.servers.quirk_proxy import Answer, Forward, Request, ResetConnection

_MIB = 1 << 20


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.s3_multipart, "_SMALLEST_PART", PART)


@pytest.mark.needs_haproxy
@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("fault", ["slow_down", pytest.param("internal_error", marks=pytest.mark.slow), "reset"])
def test_large_and_small_objects_get_through_a_store_that_fails_every_fifth_request(
    bucket: str, haproxy: HaproxyProxy, s3_env: str, fault: str
) -> None:
    store = store_at(haproxy.endpoint, bucket, retries=12)
    haproxy.set(**{fault: 20})
    data = os.urandom(3 * PART)
    store.put("large", data)
    for number in range(10):
        store.put(f"small/{number}", str(number).encode())
    assert store.get("large") == data
    assert len(store.list("small/")) == 10
    haproxy.clear()
    plain = store_at(s3_env, bucket)
    assert [plain.get(f"small/{number}") for number in range(10)] == [str(number).encode() for number in range(10)]
    assert fault == "reset" or store.num_retries > 0, "aiohttp hides some resets by sending again"
    assert plain.abort_uploads("", older_than_s=0.0) == 0, "no parts stay behind"


@pytest.mark.needs_haproxy
def test_a_request_dropped_without_a_word_is_given_up_and_sent_again(bucket: str, haproxy: HaproxyProxy) -> None:
    store = store_at(haproxy.endpoint, bucket, deadline_s=1.0)
    haproxy.set(hang=100)
    for call in (lambda: store.put("k", b"x"), lambda: store.get("k"), lambda: store.list("")):
        with pytest.raises(StoreUnavailable, match="no answer within 1 s"):
            call()
    haproxy.clear()
    store.put("k", b"x")
    assert store.get("k") == b"x"


@pytest.fixture
def own_swift(tmp_path: Path, s3_env: str) -> Iterator[tuple[SwiftServer, str]]:
    """A Swift that the test may stop, with a bucket on it."""
    import boto3

    del s3_env
    server = SwiftServer(tmp_path).start()
    try:
        boto3.client("s3", endpoint_url=server.endpoint).create_bucket(Bucket="kept")
        yield server, "kept"
    finally:
        server.stop()


@pytest.mark.usefixtures("small_parts")
def test_a_stopped_server_is_noticed_in_every_operation_and_works_again_afterwards(
    own_swift: tuple[SwiftServer, str],
) -> None:
    server, bucket = own_swift
    store = store_at(server.endpoint, bucket, deadline_s=1.0)
    store.put("k", b"before", deadline_s=20.0)
    server.pause()
    operations: tuple[Callable[[], object], ...] = (
        lambda: store.put("k", b"x"),
        lambda: store.put("large", bytes(3 * PART)),
        lambda: store.create("n", b"x"),
        lambda: store.get("k"),
        lambda: store.get_range("k", 0, 1),
        lambda: store.list(""),
        lambda: store.delete(["k"]),
        lambda: store.abort_uploads("", older_than_s=0.0),
    )
    try:
        for operation in operations:
            with pytest.raises(StoreUnavailable, match="no answer within"):
                operation()
    finally:
        server.proceed()
    # Another key: what was sent before may still be carried out now, which is why a name is never used twice.
    store.put("later", b"after", deadline_s=20.0)
    assert store.get("later", deadline_s=20.0) == b"after"


@pytest.mark.usefixtures("small_parts")
def test_a_server_killed_in_the_middle_of_an_upload_gets_the_rest_after_its_restart(
    own_swift: tuple[SwiftServer, str],
) -> None:
    server, bucket = own_swift
    proxy = QuirkProxy(server.port).start()
    data = os.urandom(6 * PART)
    killed = threading.Event()

    def rule(request: Request, forward: Forward) -> Answer:
        if request.operation == "put-part" and request.query["partNumber"] == "6" and not killed.is_set():
            server.kill()
            killed.set()
        try:
            return forward(request)
        except OSError:
            raise ResetConnection from None

    proxy.rule = rule
    store = store_at(proxy.endpoint, bucket)
    try:
        with pytest.raises(StoreUnavailable):
            store.inner.put("large", data, deadline_s=20.0)
        server.start()
        proxy.clear()
        store.put("large", data)
        assert proxy.uploaded_bytes() <= 4 * PART, "what the server had acknowledged is not sent again"
        assert store.get("large") == data
    finally:
        proxy.stop()


@pytest.mark.usefixtures("s3_env")
def test_a_stalled_upload_is_noticed_long_before_its_bytes_would_be_due() -> None:
    """A server that takes a little of a large body and then nothing more: its deadline counts from the last byte."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)
        config = StoreConfig(endpoint_url=f"http://127.0.0.1:{listener.getsockname()[1]}", min_bytes_per_s=1.0)
        store = S3Store("s3://bucket/run", config)
        began_s = time.monotonic()
        with pytest.raises(StoreUnavailable, match="no answer within 1 s"):
            store.put("k", bytes(30 * _MIB), deadline_s=1.0)
        assert time.monotonic() - began_s < 60.0, "at one byte a second it would have been due in a year"


def test_a_stalled_download_is_noticed_long_before_its_bytes_would_be_due(bucket: str, quirk_proxy: QuirkProxy) -> None:
    config = StoreConfig(endpoint_url=quirk_proxy.endpoint, min_bytes_per_s=1.0)
    store = S3Store(f"s3://{bucket}/run", config)
    store.put("k", bytes(1000))
    release = threading.Event()

    def rule(request: Request, forward: Forward) -> Answer:
        answer = forward(request)
        if request.operation == "get":
            answer.stated_length, answer.stall = 1_000_000, release
        return answer

    quirk_proxy.rule = rule
    try:
        with pytest.raises(StoreUnavailable, match="no answer within 1 s"):
            store.get("k", deadline_s=1.0)
        with pytest.raises(StoreUnavailable, match="no answer within 1 s"):
            store.get_range("k", 0, 1000, deadline_s=1.0)
    finally:
        release.set()


@pytest.mark.parametrize("operation", ["get", "get_range"])
def test_a_download_that_breaks_off_is_an_error_not_short_data(
    bucket: str, quirk_proxy: QuirkProxy, operation: str
) -> None:
    store = store_at(quirk_proxy.endpoint, bucket).inner
    store.put("k", bytes(range(200)))

    def rule(request: Request, forward: Forward) -> Answer:
        answer = forward(request)
        if request.operation == "get":
            answer.stated_length = len(answer.body)
            answer.body = answer.body[:-50]
        return answer

    quirk_proxy.rule = rule
    with pytest.raises(StoreUnavailable):
        _ = store.get("k") if operation == "get" else store.get_range("k", 0, 200)


def test_bits_flipped_on_the_wire_are_caught_by_our_digests(bucket: str, quirk_proxy: QuirkProxy) -> None:
    store = store_at(quirk_proxy.endpoint, bucket)
    save(store, 10)
    log = CommitLog(store, RUN)
    commit = log.latest()
    assert commit is not None
    shard = log.read_manifest(commit).shards[0]

    def fetch(offset: int, length: int) -> bytes:
        return store.get_range(shard.key, offset, length)

    assert read_index(fetch, shard, step=10) is not None
    flipped: list[str] = []

    def rule(request: Request, forward: Forward) -> Answer:
        answer = forward(request)
        if request.operation == "get" and answer.status in (200, 206):
            middle = len(answer.body) // 2
            flipped.append(request.path)
            answer.body = answer.body[:middle] + bytes([answer.body[middle] ^ 1]) + answer.body[middle + 1 :]
        return answer

    quirk_proxy.rule = rule
    with pytest.raises(CorruptCheckpoint):
        log.read_manifest(commit)
    with pytest.raises(CorruptCheckpoint):
        read_index(fetch, shard, step=10)
    assert len(flipped) >= 2


@pytest.mark.usefixtures("small_parts")
def test_the_newest_commit_never_names_what_is_not_stored_yet(bucket: str, s3_env: str, swift_server: Any) -> None:
    """Shards delayed, records not: a reader sees the older Checkpoint until every Shard of the newer one is there."""
    save(store_at(s3_env, bucket), 10)
    proxy = DelayProxy(swift_server.port, pattern="/shards/").start()
    proxy.hold()
    writer = threading.Thread(target=lambda: save(store_at(proxy.endpoint, bucket), 20), daemon=True)
    writer.start()
    try:
        proxy.wait_held(30.0)
        reader = store_at(s3_env, bucket)
        assert [commit.step for commit in CommitLog(reader, RUN).commits()] == [10]
        proxy.release()
        writer.join(60.0)
        assert [commit.step for commit in CommitLog(reader, RUN).commits()] == [10, 20]
    finally:
        proxy.stop()

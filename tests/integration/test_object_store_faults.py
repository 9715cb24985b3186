"""Stores that are slow, refuse, break off, hang, restart, flip bits, lose credentials, or leave out what others do.

Real: Swift and moto over TCP, HAProxy, SIGSTOP and SIGKILL of servers. A proxy plays what none of them does.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import storage.s3_multipart
from storage.commit_log import CommitLog
from storage.config import StoreConfig
from storage.errors import CorruptCheckpoint, ObjectExists, ObjectMissing, StoreRefused, StoreUnavailable
from storage.frames import read_index
from storage.object_store import ObjectEntry, ObjectStore
from storage.retrying import RetryingStore
from storage.s3_store import S3Store
from storage.scrubbing import scrubbed
from storage.store_facts import learn_store
from tests.fakes.checkpoints import RUN, save
from tests.servers import DelayProxy, HaproxyProxy, MotoServer, QuirkProxy, SwiftServer
from tests.servers.quirk_proxy import Answer, Forward, Request, ResetConnection, error_answer
from tests.unit.storage.object_store_conformance import ObjectStoreConformance

_MIB = 1 << 20
_PART = 5 * _MIB


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.s3_multipart, "_SMALLEST_PART", _PART)


def store_at(endpoint: str, bucket: str, *, retries: int = 0, deadline_s: float = 20.0) -> RetryingStore:
    config = StoreConfig(endpoint_url=endpoint, retries=retries, deadline_s=deadline_s, min_bytes_per_s=1e8)
    inner = S3Store(f"s3://{bucket}/run", config, multipart_bytes=_PART)
    return RetryingStore(inner, retries=retries, deadline_s=deadline_s, first_delay_s=0.01, max_delay_s=0.05)


_clients: dict[str, Any] = {}


def sharing_a_client(store: S3Store, endpoint: str) -> S3Store:
    """``store`` on a client that is open already: to make one takes longer than most tests."""
    filesystem = _clients.setdefault(endpoint, store._filesystem() if endpoint not in _clients else None)
    store._opened, store._owner_pid = filesystem, os.getpid()
    store._root = store.url.removeprefix("s3://")
    return store


class TestSwiftConformance(ObjectStoreConformance):
    creates_are_atomic = False  # eight racing creates on Swift had up to eight winners

    @pytest.fixture
    def store(self, bucket: str, s3_env: str) -> ObjectStore:
        config = StoreConfig(endpoint_url=s3_env, retries=0)
        return sharing_a_client(S3Store(f"s3://{bucket}", config), s3_env)


class TestMotoConformance(ObjectStoreConformance):
    @pytest.fixture
    def store(self, moto_server: MotoServer, moto_client: Any, s3_env: str) -> ObjectStore:
        del s3_env
        endpoint = moto_server.endpoint
        store = S3Store(f"s3://{new_bucket(moto_client)}/a/run", StoreConfig(endpoint_url=endpoint, retries=0))
        return sharing_a_client(store, endpoint)


@pytest.mark.needs_haproxy
@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("fault", ["slow_down", pytest.param("internal_error", marks=pytest.mark.slow), "reset"])
def test_large_and_small_objects_get_through_a_store_that_fails_every_fifth_request(
    bucket: str, haproxy: HaproxyProxy, s3_env: str, fault: str
) -> None:
    store = store_at(haproxy.endpoint, bucket, retries=12)
    haproxy.set(**{fault: 20})
    data = os.urandom(3 * _PART)
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
        lambda: store.put("large", bytes(3 * _PART)),
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
    data = os.urandom(6 * _PART)
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
        assert proxy.uploaded_bytes() <= 4 * _PART, "what the server had acknowledged is not sent again"
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


# Servers that leave things out. Each rule is one server; every one has to carry the same work.


def _ignores_conditions(request: Request, forward: Forward) -> Answer:
    return forward(_without(request, "if-none-match"))


def _refuses_conditions(status: int, code: str) -> Callable[[Request, Forward], Answer]:
    def rule(request: Request, forward: Forward) -> Answer:
        if "if-none-match" in {name.lower() for name in request.headers}:
            return error_answer(status, code)
        return forward(request)

    return rule


def _ignores_ranges(request: Request, forward: Forward) -> Answer:
    return forward(_without(request, "range"))


def _has_no_bulk_delete_lists_or_heads(request: Request, forward: Forward) -> Answer:
    if request.method == "HEAD" or "delete" in request.query or request.operation.startswith("list-"):
        return error_answer(501, "NotImplemented")
    return forward(request)


def _lists_as_the_first_version(request: Request, forward: Forward) -> Answer:
    """Does not know list-type=2 and pages by two."""
    if request.operation != "list":
        return forward(request)
    keys = [entry.key for entry in _LISTED if entry.key.startswith(request.query.get("prefix", ""))]
    keys = [key for key in keys if key > request.query.get("marker", "")]
    contents = "".join(f"<Contents><Key>{key}</Key><Size>1</Size></Contents>" for key in keys[:2])
    truncated = "true" if len(keys) > 2 else "false"
    body = f"<ListBucketResult><IsTruncated>{truncated}</IsTruncated>{contents}</ListBucketResult>"
    return Answer(200, body.encode(), {"Content-Type": "application/xml"})


_LISTED = [ObjectEntry(key=f"run/s/{number}", size=1) for number in range(7)]


def _refuses_checksums(request: Request, forward: Forward) -> Answer:
    names = {name.lower() for name in request.headers}
    if any(name.startswith(("x-amz-checksum", "x-amz-trailer", "x-amz-sdk-checksum")) for name in names):
        return error_answer(400, "InvalidArgument", "checksums are not supported")
    return forward(request)


def _empty_etags(request: Request, forward: Forward) -> Answer:
    answer = forward(request)
    if request.operation in ("put", "get", "head"):
        answer.headers = {name: value for name, value in answer.headers.items() if name.lower() != "etag"}
    return answer


def _sends_no_length(request: Request, forward: Forward) -> Answer:
    answer = forward(request)
    answer.has_length = request.operation not in ("get", "head")
    return answer


def _without(request: Request, header: str) -> Request:
    kept = {name: value for name, value in request.headers.items() if name.lower() != header}
    return Request(request.method, request.target, kept, request.body)


@pytest.mark.parametrize(
    ("rule", "create"),
    [
        (_ignores_conditions, "ignored"),
        (_refuses_conditions(501, "NotImplemented"), "unsupported"),
        (_refuses_conditions(400, "InvalidArgument"), "unsupported"),
        (_has_no_bulk_delete_lists_or_heads, "honoured"),
        (_ignores_ranges, "honoured"),
        (_refuses_checksums, "honoured"),
        (_empty_etags, "honoured"),
        (_sends_no_length, "honoured"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_every_operation_works_on_a_server_that_leaves_things_out(
    moto_quirks: QuirkProxy, moto_bucket: str, rule: Callable[[Request, Forward], Answer], create: str
) -> None:
    store = store_at(moto_quirks.endpoint, moto_bucket)
    moto_quirks.rule = rule
    store.put("a/1", bytes(range(100)))
    store.put("a/2", b"")
    assert store.get("a/1") == bytes(range(100))
    assert store.get("a/2") == b""
    assert store.get_range("a/1", 10, 5) == bytes(range(10, 15))
    with pytest.raises(StoreUnavailable):
        store.get_range("a/1", 90, 20)
    assert [entry.size for entry in store.list("a/")] == [100, 0]
    store.create("c/1", b"first")
    if create != "ignored":
        with pytest.raises(ObjectExists):
            store.create("c/1", b"second")
    assert store.get("c/1") == b"first"
    with pytest.raises(ObjectMissing):
        store.get("a/none")
    store.delete(["a/1", "a/2", "a/none"])
    assert store.list("a/") == []
    assert store.abort_uploads("", older_than_s=0.0) == 0
    facts = learn_store(store)
    assert facts.create_on_put == create
    assert facts.exact_ranges == "yes"
    assert [entry.key for entry in store.list("")] == ["c/1"]
    assert moto_quirks.expected_continue == 0, "no request waits for a server's 100-continue"


@pytest.fixture
def moto_quirks(moto_server: Any, s3_env: str) -> Iterator[QuirkProxy]:
    del s3_env
    proxy = QuirkProxy(moto_server.port).start()
    try:
        yield proxy
    finally:
        proxy.stop()


@pytest.fixture
def moto_bucket(moto_client: Any) -> str:
    return new_bucket(moto_client)


def new_bucket(client: Any) -> str:
    name = f"test-{uuid.uuid4().hex[:16]}"
    client.create_bucket(Bucket=name)
    return name


def test_a_listing_of_a_server_that_knows_only_its_first_version_is_complete(
    bucket: str, quirk_proxy: QuirkProxy
) -> None:
    quirk_proxy.rule = _lists_as_the_first_version
    store = store_at(quirk_proxy.endpoint, bucket)
    assert [entry.key for entry in store.list("s/")] == [f"s/{number}" for number in range(7)]


def test_a_listing_that_does_not_move_on_is_an_error_not_a_short_listing(bucket: str, quirk_proxy: QuirkProxy) -> None:
    body = (
        b"<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>same</NextContinuationToken>"
        b"<Contents><Key>run/s/1</Key><Size>1</Size></Contents></ListBucketResult>"
    )
    quirk_proxy.rule = lambda _, __: Answer(200, body, {"Content-Type": "application/xml"})
    with pytest.raises(StoreUnavailable, match="does not move on"):
        store_at(quirk_proxy.endpoint, bucket).list("s/")


def test_a_range_from_elsewhere_is_refused(bucket: str, quirk_proxy: QuirkProxy) -> None:
    store = store_at(quirk_proxy.endpoint, bucket)
    store.put("k", bytes(range(100)))

    def rule(request: Request, forward: Forward) -> Answer:
        if request.operation == "get":
            return Answer(206, bytes(10), {"Content-Range": "bytes 0-9/100"})
        return forward(request)

    quirk_proxy.rule = rule
    with pytest.raises(StoreUnavailable, match="bytes from 0 came"):
        store.get_range("k", 50, 10)


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (403, "AccessDenied"),
        (403, "InvalidAccessKeyId"),
        (403, "SignatureDoesNotMatch"),
        (404, "NoSuchBucket"),
        (400, "InvalidBucketName"),
        (405, "MethodNotAllowed"),
    ],
)
def test_what_asking_again_will_not_change_is_refused_at_once(
    bucket: str, quirk_proxy: QuirkProxy, status: int, code: str
) -> None:
    quirk_proxy.rule = lambda _, __: error_answer(status, code)
    store = store_at(quirk_proxy.endpoint, bucket, retries=3)
    with pytest.raises(StoreRefused):
        store.put("k", b"x")
    assert len(quirk_proxy.passed) == 1


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (500, "InternalError"),
        (503, "SlowDown"),
        (503, "ServiceUnavailable"),
        (429, "TooManyRequests"),
        (502, "Bad"),
        (400, "RequestTimeout"),
        (409, "OperationAborted"),
        (403, "RequestTimeTooSkewed"),
        (400, "BadDigest"),
    ],
)
def test_what_passes_is_asked_again_and_counted(bucket: str, quirk_proxy: QuirkProxy, status: int, code: str) -> None:
    left = [2]

    def rule(request: Request, forward: Forward) -> Answer:
        left[0] -= 1
        return error_answer(status, code) if left[0] >= 0 else forward(request)

    quirk_proxy.rule = rule
    store = store_at(quirk_proxy.endpoint, bucket, retries=3)
    store.put("k", b"x")
    assert store.num_retries == 2
    assert store.get("k") == b"x"


@pytest.mark.parametrize("code", ["ExpiredToken", "ExpiredTokenException", "InvalidToken"])
@pytest.mark.parametrize("place", ["file", "environment"])
def test_expired_credentials_are_read_anew(
    moto_quirks: QuirkProxy, moto_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, place: str
) -> None:
    file = tmp_path / "credentials"

    def hand_out(key: str) -> None:
        if place == "environment":
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
            return
        file.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = s\naws_session_token = t\n")

    if place == "file":
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    hand_out("OLDKEY")

    def rule(request: Request, forward: Forward) -> Answer:
        if "OLDKEY" in request.headers.get("Authorization", ""):
            hand_out("NEWKEY")
            return error_answer(400 if code != "ExpiredToken" else 403, code)
        return forward(request)

    moto_quirks.rule = rule
    store = store_at(moto_quirks.endpoint, moto_bucket, retries=1)
    store.put("k", b"x")
    assert store.num_retries == 1
    assert store.get("k") == b"x"
    assert "NEWKEY" in moto_quirks.passed[-1].headers["Authorization"]


@pytest.mark.parametrize("operation", ["put", "get", "list", "delete", "create"])
def test_no_secret_is_in_any_message_repr_or_log_record(
    bucket: str,
    quirk_proxy: QuirkProxy,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    operation: str,
) -> None:
    secret, token, user = "hunter2hunter2hunter2", "session-token-session", "AKIAIOSFODNN7EXAMPLE"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    monkeypatch.setenv("AWS_SESSION_TOKEN", token)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", user)
    leak = f"signed with {secret} by {user}, https://{user}:{secret}@host/?X-Amz-Signature=abcdef&X-Amz-Security-Token={token}"
    quirk_proxy.rule = lambda *_: error_answer(500, "InternalError", leak.replace("&", "&amp;"))
    store = store_at(quirk_proxy.endpoint, bucket, retries=1)
    calls: dict[str, Callable[[], object]] = {
        "put": lambda: store.put("k", b"x"),
        "get": lambda: store.get("k"),
        "list": lambda: store.list(""),
        "delete": lambda: store.delete(["k"]),
        "create": lambda: store.create("k", b"x"),
    }
    with caplog.at_level(logging.DEBUG), pytest.raises(StoreUnavailable) as caught:
        calls[operation]()
    logging.getLogger("storage").error("failed", exc_info=caught.value)
    said = caplog.text
    error: BaseException | None = caught.value
    while error is not None:
        said += f"{error} {error!r} {error.args}"
        error = error.__cause__ or error.__context__
    assert "InternalError" in said
    for word in (secret, token, user, "abcdef"):
        assert word not in said


def test_a_scrubbed_text_keeps_what_is_no_secret() -> None:
    text = "put shards/step-1 failed: 503 SlowDown (s3://bucket/run), tokens=512, design: ok"
    assert scrubbed(text) == text.replace("tokens=512", "tokens=512")


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


def test_what_swift_and_moto_do_is_found_out(
    bucket: str, s3_env: str, moto_quirks: QuirkProxy, moto_bucket: str
) -> None:
    swift = learn_store(store_at(s3_env, bucket))
    moto = learn_store(store_at(moto_quirks.endpoint, moto_bucket))
    for facts in (swift, moto):
        assert facts.create_on_put == "honoured"
        assert facts.create_on_complete in ("honoured", "ignored", "unsupported")
        seen = {facts.exact_ranges, facts.fresh_after_put, facts.fresh_after_delete, facts.fresh_after_overwrite}
        assert seen == {"yes"}
        assert facts.clock_skew_s is not None
        assert abs(facts.clock_skew_s) < 60
    assert store_at(s3_env, bucket).list("") == []
    assert store_at(s3_env, bucket).abort_uploads("", older_than_s=0.0) == 0

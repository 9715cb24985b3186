"""Large puts that are interrupted, resumed, given up, swept, and completed by servers that answer oddly.

Real: Swift and moto over HTTP, SIGKILL of an uploading process. A proxy between counts what is sent and plays the
servers that leave things out.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

import storage.s3_multipart
from storage.config import StoreConfig
from storage.errors import StoreRefused, StoreUnavailable
from storage.retrying import RetryingStore
from storage.s3_store import S3Store
from tests.servers import DelayProxy, QuirkProxy
from tests.servers.quirk_proxy import Answer, Forward, Request, ResetConnection, error_answer

_MIB = 1 << 20
_PART = 5 * _MIB


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.s3_multipart, "_SMALLEST_PART", _PART)


BOTH = pytest.mark.parametrize("proxy", ["swift", "moto"], indirect=True)


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
    name = f"test-{uuid.uuid4().hex[:16]}"
    client.create_bucket(Bucket=name)
    proxy.clear()
    return name


def store_of(bucket: str, proxy: QuirkProxy | DelayProxy, retries: int = 0) -> S3Store:
    config = StoreConfig(endpoint_url=proxy.endpoint, retries=retries, min_bytes_per_s=1e8, deadline_s=20.0)
    return S3Store(f"s3://{bucket}/run", config, multipart_bytes=_PART)


def uploads(client: Any, bucket: str) -> list[dict[str, Any]]:
    return list(client.list_multipart_uploads(Bucket=bucket).get("Uploads", []))


def fail_part(number: int, times: int = 1) -> Any:
    """A rule: the part of that number fails, the first so many times. (aiohttp itself sends again after a reset.)"""
    left = [times]

    def rule(request: Request, forward: Forward) -> Answer:
        if request.operation == "put-part" and request.query["partNumber"] == str(number) and left[0]:
            left[0] -= 1
            return error_answer(500, "InternalError")
        return forward(request)

    return rule


@pytest.fixture
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts go up in order, so that the test knows which ones were stored."""
    real = storage.s3_multipart.MultipartPut.__init__

    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        object.__setattr__(self._rules, "parallel", 1)

    monkeypatch.setattr(storage.s3_multipart.MultipartPut, "__init__", begin)


@BOTH
@pytest.mark.usefixtures("one_at_a_time")
@pytest.mark.parametrize("other_process", [False, True])
def test_a_second_try_sends_only_the_parts_that_are_missing(
    proxy: QuirkProxy, bucket: str, client: Any, other_process: bool
) -> None:
    data = os.urandom(3 * _PART + 1000)
    store = store_of(bucket, proxy)
    proxy.rule = fail_part(4)
    with pytest.raises(StoreUnavailable):
        store.put("large", data)
    assert store.list("") == []
    assert len(uploads(client, bucket)) == 1
    proxy.clear()
    (store_of(bucket, proxy) if other_process else store).put("large", memoryview(data))
    assert proxy.uploaded_bytes() == len(data) - 3 * _PART
    assert store.get("large") == data
    assert uploads(client, bucket) == []


@pytest.mark.usefixtures("one_at_a_time")
def test_parts_of_other_content_are_never_taken_over(proxy: QuirkProxy, bucket: str) -> None:
    older, newer = os.urandom(3 * _PART), os.urandom(3 * _PART)
    newer = older[:_PART] + newer[_PART:]
    store = store_of(bucket, proxy)
    proxy.rule = fail_part(3)
    with pytest.raises(StoreUnavailable):
        store.put("large", older)
    proxy.clear()
    store.put("large", newer)
    assert store.get("large") == newer
    assert proxy.uploaded_bytes() == 2 * _PART


@pytest.mark.usefixtures("one_at_a_time")
def test_the_upload_of_a_longer_key_is_left_alone(proxy: QuirkProxy, bucket: str, client: Any) -> None:
    data = os.urandom(2 * _PART)
    store = store_of(bucket, proxy)
    proxy.rule = fail_part(2)
    with pytest.raises(StoreUnavailable):
        store.put("large-2", data)
    proxy.clear()
    store.put("large", data)
    assert proxy.uploaded_bytes() == len(data)
    assert [item["Key"] for item in uploads(client, bucket)] == ["run/large-2"]


@pytest.mark.usefixtures("one_at_a_time")
def test_a_part_that_fails_quickly_is_sent_again_alone_and_counted(proxy: QuirkProxy, bucket: str) -> None:
    data = os.urandom(3 * _PART)
    proxy.rule = fail_part(2, times=2)
    store = RetryingStore(store_of(bucket, proxy, retries=3), retries=0)
    store.put("large", data)
    assert store.num_retries == 2
    assert proxy.uploaded_bytes() == len(data) + 2 * _PART
    assert store.get("large") == data


@pytest.mark.parametrize("error", [error_answer(403, "AccessDenied"), error_answer(500, "InternalError")])
def test_a_put_given_up_for_good_leaves_no_parts(proxy: QuirkProxy, bucket: str, client: Any, error: Answer) -> None:
    proxy.rule = lambda request, forward: error if request.operation == "complete" else forward(request)
    store = RetryingStore(store_of(bucket, proxy), retries=1, sleep=lambda _: None)
    kind = StoreRefused if error.status == 403 else StoreUnavailable
    with pytest.raises(kind):
        store.put("large", bytes(2 * _PART))
    assert uploads(client, bucket) == []
    assert store.list("") == []
    assert proxy.uploaded_bytes() == 2 * _PART, "the second try sent no part again"


@BOTH
@pytest.mark.usefixtures("one_at_a_time")
def test_uploads_are_swept_under_their_prefix_once_they_are_old(proxy: QuirkProxy, bucket: str, client: Any) -> None:
    store = store_of(bucket, proxy)
    for key in ("shards/a", "shards/b", "other/c"):
        proxy.rule = fail_part(2)
        with pytest.raises(StoreUnavailable):
            store.put(key, bytes(2 * _PART))
    proxy.clear()
    store.put("shards/whole", b"kept")
    assert store.abort_uploads("shards/", older_than_s=3600.0) == 0
    assert len(uploads(client, bucket)) == 3
    assert store.abort_uploads("shards/", older_than_s=0.0) == 2
    assert [item["Key"] for item in uploads(client, bucket)] == ["run/other/c"]
    assert store.abort_uploads("", older_than_s=0.0) == 1
    assert store.get("shards/whole") == b"kept"


def test_an_old_upload_that_still_receives_parts_is_not_swept(proxy: QuirkProxy, bucket: str, client: Any) -> None:
    """Another process may be going on with what a killed one began long ago."""
    upload = client.create_multipart_upload(Bucket=bucket, Key="run/shards/a")["UploadId"]
    client.upload_part(Bucket=bucket, Key="run/shards/a", UploadId=upload, PartNumber=1, Body=bytes(_PART))

    def rule(request: Request, forward: Forward) -> Answer:
        answer = forward(request)
        if request.operation == "list-multipart":
            start = answer.body.index(b"<Initiated>") + len(b"<Initiated>")
            answer.body = answer.body[:start] + b"2020" + answer.body[start + 4 :]
        return answer

    proxy.rule = rule
    store = store_of(bucket, proxy)
    assert store.abort_uploads("shards/", older_than_s=3600.0) == 0
    client.abort_multipart_upload(Bucket=bucket, Key="run/shards/a", UploadId=upload)
    client.create_multipart_upload(Bucket=bucket, Key="run/shards/b")
    assert store.abort_uploads("shards/", older_than_s=3600.0) == 1, "no part ever came"


@BOTH
def test_a_completion_whose_answer_was_lost_is_not_sent_again(proxy: QuirkProxy, bucket: str) -> None:
    data = os.urandom(2 * _PART)
    lost = [1]

    def rule(request: Request, forward: Forward) -> Answer:
        answer = forward(request)
        if request.operation == "complete" and lost:
            lost.pop()
            raise ResetConnection
        return answer

    proxy.rule = rule
    store = RetryingStore(store_of(bucket, proxy), retries=1, sleep=lambda _: None)
    store.put("large", data)
    assert store.get("large") == data
    assert proxy.uploaded_bytes() == len(data)
    assert proxy.operations().count("complete") == 1


def test_an_older_object_of_the_same_size_is_not_taken_for_the_lost_completion(
    proxy: QuirkProxy, bucket: str, client: Any
) -> None:
    older, newer = os.urandom(2 * _PART), os.urandom(2 * _PART)
    store = store_of(bucket, proxy)
    store.put("large", older)

    def rule(request: Request, forward: Forward) -> Answer:
        if request.operation == "complete":
            for item in uploads(client, bucket):  # the upload vanishes and the answer is lost
                client.abort_multipart_upload(Bucket=bucket, Key=item["Key"], UploadId=item["UploadId"])
            proxy.clear()
            raise ResetConnection
        return forward(request)

    proxy.rule = rule
    RetryingStore(store, retries=1, sleep=lambda _: None).put("large", newer)
    assert store.get("large") == newer


@pytest.mark.parametrize(
    "body",
    [b"", b'<?xml version="1.0"?>\n<Error><Code>InternalError</Code><Message>injected</Message></Error>'],
    ids=["empty", "error"],
)
def test_a_completion_answered_200_without_being_done_is_noticed(proxy: QuirkProxy, bucket: str, body: bytes) -> None:
    data = os.urandom(2 * _PART)
    lies = [1]

    def rule(request: Request, forward: Forward) -> Answer:
        if request.operation == "complete" and lies:
            lies.pop()
            return Answer(200, body, {"Content-Type": "application/xml"})
        return forward(request)

    proxy.rule = rule
    store = store_of(bucket, proxy)
    with pytest.raises(StoreUnavailable):
        store.put("large", data)
    store.put("large", data)
    assert store.get("large") == data
    assert proxy.uploaded_bytes() == len(data)


def _without_etags(request: Request, forward: Forward) -> Answer:
    """Empty ETag at completion and in the object's head, none that is an MD5 in a list of parts."""
    answer = forward(request)
    if request.operation in ("list-parts", "complete"):
        answer.body = answer.body.replace(b"<ETag>", b"<ETag>W/x")
    if request.operation == "head":
        answer.headers = {k: v for k, v in answer.headers.items() if k.lower() != "etag"}
    return answer


def _without_lists(request: Request, forward: Forward) -> Answer:
    if request.operation in ("list-multipart", "list-parts"):
        return error_answer(501, "NotImplemented")
    return forward(request)


def _denying_lists(request: Request, forward: Forward) -> Answer:
    if request.operation in ("list-multipart", "list-parts"):
        return error_answer(403, "AccessDenied")
    return forward(request)


def _without_head_length(request: Request, forward: Forward) -> Answer:
    answer = forward(request)
    if request.method == "HEAD":
        answer.has_length = False
    return answer


def _refusing_head(request: Request, forward: Forward) -> Answer:
    return Answer(405) if request.method == "HEAD" else forward(request)


@pytest.mark.usefixtures("one_at_a_time")
@pytest.mark.parametrize(
    ("quirk", "resent_parts"),
    [
        (_without_etags, 3),
        (_without_lists, 1),
        (_denying_lists, 1),
        (_without_head_length, 1),
        (_refusing_head, 1),
    ],
)
def test_a_large_put_is_whole_and_goes_on_as_far_as_the_server_lets_it(
    proxy: QuirkProxy, bucket: str, quirk: Any, resent_parts: int
) -> None:
    data = os.urandom(3 * _PART)
    fails = fail_part(3)
    proxy.rule = lambda request, forward: quirk(request, lambda inner: fails(inner, forward))
    store = store_of(bucket, proxy)
    with pytest.raises(StoreUnavailable):
        store.put("large", data)
    proxy.passed = []
    store.put("large", data)
    assert store.get("large") == data
    assert proxy.uploaded_bytes() == resent_parts * _PART
    assert isinstance(store.abort_uploads("", older_than_s=0.0), int)


_UPLOADER = """
import sys, storage.s3_multipart as parts
from storage.config import StoreConfig
from storage.s3_store import S3Store
parts._SMALLEST_PART = 5 << 20
config = StoreConfig(endpoint_url=sys.argv[1], retries=0)
store = S3Store(sys.argv[2], config, multipart_bytes=5 << 20)
store.put("large", open(sys.argv[3], "rb").read(), deadline_s=60.0)
"""


def test_after_a_sigkill_another_process_goes_on_with_the_upload(
    swift_server: Any, swift_client: Any, s3_env: str, tmp_path: Any
) -> None:
    del s3_env
    client = swift_client
    name = f"test-{secrets.token_hex(8)}"
    client.create_bucket(Bucket=name)
    data = os.urandom(6 * _PART)
    (tmp_path / "data").write_bytes(data)
    held = DelayProxy(swift_server.port, pattern="partNumber=6").start()
    counting = QuirkProxy(swift_server.port).start()
    held.hold()
    process = subprocess.Popen(
        [sys.executable, "-c", _UPLOADER, held.endpoint, f"s3://{name}/run", str(tmp_path / "data")],
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    try:
        held.wait_held(60.0)  # four at a time: when the sixth waits, at least two are stored
        os.kill(process.pid, signal.SIGKILL)
        process.wait(30)
        assert len(uploads(client, name)) == 1
        store = store_of(name, counting)
        assert store.list("") == []
        store.put("large", data)
        assert counting.uploaded_bytes() <= 4 * _PART
        assert store.get("large") == data
        assert uploads(client, name) == []
    finally:
        process.kill()
        held.release()
        held.stop()
        counting.stop()

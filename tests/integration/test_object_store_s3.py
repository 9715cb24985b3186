"""What is special to S3, over HTTP. The conformance suite: test_object_store_conformance.

Real: s3fs, botocore, sockets, a server process (moto). Stalls are played by a socket that accepts and never answers.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from storage.commit_log import CommitLog
from storage.config import StoreConfig
from storage.errors import ObjectExists, StoreRefused, StoreUnavailable
from storage.open_store import open_store
from storage.restore import plan_restore
from storage.retrying import RetryingStore
from storage.s3_store import S3Store
from storage.verify import verify_commit
from tests.fakes.checkpoints import RUN, attempt, save

_MIB = 1 << 20


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_listening(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert server.poll() is None, "the S3 server ended at once"
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            threading.Event().wait(0.05)
        else:
            return
    raise AssertionError("the S3 server does not listen")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    port = _free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_until_listening(port, server)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait(timeout=30)


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")


@pytest.fixture
def client(endpoint: str, _credentials: None) -> Any:
    import botocore.session

    return botocore.session.get_session().create_client("s3", endpoint_url=endpoint)


@pytest.fixture
def bucket(client: Any) -> str:
    name = f"bucket-{secrets.token_hex(6)}"
    client.create_bucket(Bucket=name)
    return name


@pytest.fixture
def config(endpoint: str) -> StoreConfig:
    return StoreConfig(endpoint_url=endpoint, retries=0, min_bytes_per_s=1e8)


def test_a_listing_sees_what_another_process_just_wrote(bucket: str, config: StoreConfig, client: Any) -> None:
    store = open_store(f"s3://{bucket}/run", config)
    for step in (10, 20):
        client.put_object(Bucket=bucket, Key=f"run/commits/{step}", Body=b"x")
        assert store.list("commits/")[-1].key == f"commits/{step}"


def test_the_endpoint_may_come_from_the_environment(
    bucket: str, endpoint: str, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    open_store(f"s3://{bucket}/run").put("k", b"x")
    assert client.get_object(Bucket=bucket, Key="run/k")["Body"].read() == b"x"


def test_a_large_object_goes_up_in_parts_and_comes_back_whole(bucket: str, config: StoreConfig, client: Any) -> None:
    data = os.urandom(_MIB) * 36
    S3Store(f"s3://{bucket}/run", config, multipart_bytes=20 * _MIB).put("large", memoryview(data))
    head = client.head_object(Bucket=bucket, Key="run/large")
    assert head["ETag"].endswith('-3"')
    assert open_store(f"s3://{bucket}/run", config).get("large") == data


@pytest.mark.parametrize("failing", ["upload_part", "complete_multipart_upload", "stall"])
def test_a_multipart_upload_that_is_given_up_publishes_nothing_and_leaves_no_parts(
    bucket: str, config: StoreConfig, client: Any, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import asyncio

    inner = S3Store(f"s3://{bucket}/run", config, multipart_bytes=20 * _MIB)
    store = RetryingStore(inner, retries=0)
    filesystem = inner._filesystem()
    real = filesystem._call_s3

    async def call(method: str, *args: Any, **kwargs: Any) -> Any:
        if method == "upload_part" and failing == "stall" and kwargs["PartNumber"] == 2:
            await asyncio.Event().wait()
        if method == failing:
            raise OSError(5, "connection reset")
        return await real(method, *args, **kwargs)

    monkeypatch.setattr(filesystem, "_call_s3", call)
    with pytest.raises(StoreUnavailable):
        store.put("large", bytes(36 * _MIB), deadline_s=1.0)
    assert store.list("") == []
    assert "Uploads" not in client.list_multipart_uploads(Bucket=bucket)


def test_a_missing_bucket_is_refused_in_every_operation(config: StoreConfig) -> None:
    store = open_store("s3://no-such-bucket-here/run", config)
    for operation in (
        lambda: store.list("commits/"),
        lambda: store.get("k"),
        lambda: store.get_range("k", 0, 1),
        lambda: store.put("k", b"x"),
        lambda: store.create("k", b"x"),
    ):
        with pytest.raises(StoreRefused, match="bucket does not exist"):
            operation()


@pytest.mark.parametrize("operation", ["list", "get", "put"])
def test_denied_access_is_named_and_not_retried(
    bucket: str, endpoint: str, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    store = S3Store(f"s3://{bucket}/run", StoreConfig(endpoint_url=endpoint))

    async def deny(method: str, *_: Any, **__: Any) -> Any:
        calls.append(method)
        raise PermissionError("Access Denied")

    monkeypatch.setattr(store._filesystem(), "_call_s3", deny)
    action = {
        "list": lambda: store.list("commits/"),
        "get": lambda: store.get("k"),
        "put": lambda: store.put("k", b"x"),
    }[operation]
    with pytest.raises(StoreRefused, match="access denied"):
        action()
    assert len(calls) == 1


def _server_error(code: str, status: int) -> OSError:
    import botocore.exceptions

    response = {"Error": {"Code": code, "Message": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error = OSError(22, code)
    error.__cause__ = botocore.exceptions.ClientError(response, "PutObject")  # type: ignore[arg-type]
    return error


@pytest.mark.parametrize(("code", "status"), [("InvalidArgument", 400), ("NotImplemented", 501)])
def test_a_server_without_create_only_writes_gets_a_plain_put(
    bucket: str, config: StoreConfig, code: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = S3Store(f"s3://{bucket}/run", config)
    filesystem = store._filesystem()
    real = filesystem._call_s3

    async def call(method: str, *args: Any, **kwargs: Any) -> Any:
        if "IfNoneMatch" in kwargs:
            raise _server_error(code, status)
        return await real(method, *args, **kwargs)

    monkeypatch.setattr(filesystem, "_call_s3", call)
    store.create("commits/1", b"x")
    assert store.get("commits/1") == b"x"


def test_a_failed_precondition_without_its_name_means_the_object_exists(
    bucket: str, config: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = S3Store(f"s3://{bucket}/run", config)

    async def call(*_: Any, **__: Any) -> Any:
        raise _server_error("PreconditionFailed", 412)

    monkeypatch.setattr(store._filesystem(), "_call_s3", call)
    with pytest.raises(ObjectExists):
        store.create("commits/1", b"x")


@pytest.mark.parametrize("operation", ["put", "get", "list", "delete"])
def test_a_server_that_never_answers_is_given_up_at_the_deadline(operation: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)
        store = S3Store("s3://bucket/run", StoreConfig(endpoint_url=f"http://127.0.0.1:{listener.getsockname()[1]}"))
        action = {
            "put": lambda: store.put("k", bytes(_MIB), deadline_s=0.5),
            "get": lambda: store.get("k", deadline_s=0.5),
            "list": lambda: store.list("", deadline_s=0.5),
            "delete": lambda: store.delete(["k"], deadline_s=0.5),
        }[operation]
        with pytest.raises(StoreUnavailable, match=r"no answer within 0\.5 s"):
            action()


def test_a_store_made_before_a_fork_works_in_the_child(bucket: str, config: StoreConfig) -> None:
    store = open_store(f"s3://{bucket}/run", config)
    store.put("parent", b"1")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            store.put("child", store.get("parent") + b"2")
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert store.get("child") == b"12"


def test_a_checkpoint_is_saved_planned_and_verified_on_s3(bucket: str, config: StoreConfig) -> None:
    store, reader = (open_store(f"s3://{bucket}/run", config) for _ in range(2))
    log = CommitLog(reader, RUN)
    assert plan_restore(log, attempt=attempt(9)) is None
    for step in (10, 20):
        save(store, step)
        plan = plan_restore(log, attempt=attempt(9))
        assert plan is not None
        assert plan.step == step
    latest = log.latest()
    assert latest is not None
    assert verify_commit(reader, log, latest).is_good


@pytest.mark.parametrize("failing", ["put_object", "copy_object"])
def test_a_commit_that_fails_leaves_the_step_uncommitted_and_no_copy_is_ever_made(
    bucket: str, config: StoreConfig, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit is one put; a server whose copies fail, which breaks write-then-rename, does not disturb it."""
    store = S3Store(f"s3://{bucket}/run", config)
    save(store, 10)
    filesystem = store._filesystem()
    real, failures = filesystem._call_s3, [1]

    async def call(method: str, *args: Any, **kwargs: Any) -> Any:
        if method == failing and "/commits/" in kwargs["Key"] and failures:
            failures.pop()
            raise OSError(5, "injected")
        return await real(method, *args, **kwargs)

    monkeypatch.setattr(filesystem, "_call_s3", call)
    log = CommitLog(store, RUN)
    if failing == "put_object":
        with pytest.raises(StoreUnavailable, match="injected"):
            save(store, 20)
        assert [commit.step for commit in log.commits()] == [10]
    save(store, 20)
    assert [commit.step for commit in log.commits()] == [10, 20]
    assert bool(failures) == (failing == "copy_object")


def test_a_wrong_bucket_or_denied_access_is_never_a_fresh_start(
    bucket: str, config: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StoreRefused, match="s3://no-such-bucket-here/run"):
        plan_restore(CommitLog(open_store("s3://no-such-bucket-here/run", config), RUN), attempt=attempt())
    store = S3Store(f"s3://{bucket}/run", config)

    async def deny(*_: Any, **__: Any) -> Any:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(store._filesystem(), "_call_s3", deny)
    with pytest.raises(StoreRefused, match="access denied"):
        plan_restore(CommitLog(store, RUN), attempt=attempt())

"""Fixtures shared by all tests: a real S3 store, faults in front of it, and a bucket of one's own.

Nothing starts unless a test asks for it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.s3_stores import new_bucket
from tests.servers import DelayProxy, HaproxyProxy, MotoServer, QuirkProxy, SwiftServer
from tests.servers.swift_server import keeps_xattrs


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests that are too long for `make test` as well")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("slow") and not item.config.getoption("--slow"):
        pytest.skip("slow; `make test-full` runs it")
    if item.get_closest_marker("gpu") and shutil.which("nvidia-smi") is None:
        pytest.skip("needs a CUDA device")
    if item.get_closest_marker("needs_haproxy") and not HaproxyProxy.is_installed():
        pytest.skip("haproxy is not installed (Debian: apt-get install haproxy)")


@pytest.fixture(scope="session")
def swift_server() -> Iterator[SwiftServer]:
    """One Swift for the whole session; tests keep apart by bucket."""
    for parent in (None, "/dev/shm"):
        directory = Path(tempfile.mkdtemp(prefix="raysume-swift-", dir=parent))
        if keeps_xattrs(directory):
            break
        shutil.rmtree(directory)
    else:
        pytest.skip("no temporary directory here keeps user extended attributes, which Swift needs")
    server = SwiftServer(directory).start()
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def moto_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotoServer]:
    server = MotoServer(tmp_path_factory.mktemp("moto")).start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def s3_env(swift_server: SwiftServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """Point the usual AWS variables at Swift; returns the endpoint. Set AWS_ENDPOINT_URL again to go by a proxy."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", swift_server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", swift_server.secret_key)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", swift_server.endpoint)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return swift_server.endpoint


@pytest.fixture(scope="session")
def swift_client(swift_server: SwiftServer) -> Any:
    """A plain client of Swift for what tests prepare and look up; making one takes long."""
    return plain_client(swift_server)


@pytest.fixture(scope="session")
def moto_client(moto_server: MotoServer) -> Any:
    return plain_client(moto_server)


def plain_client(server: SwiftServer | MotoServer) -> Any:
    import boto3

    return boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        region_name="us-east-1",
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
    )


@pytest.fixture
def bucket(s3_env: str, swift_client: Any) -> str:
    """A new, empty bucket on Swift."""
    del s3_env  # for whoever opens the bucket
    return new_bucket(swift_client)


@pytest.fixture
def delay_proxy(swift_server: SwiftServer) -> Iterator[DelayProxy]:
    """In front of Swift, passing everything on until the test says otherwise."""
    proxy = DelayProxy(swift_server.port).start()
    try:
        yield proxy
    finally:
        proxy.stop()


@pytest.fixture
def haproxy(swift_server: SwiftServer) -> Iterator[HaproxyProxy]:
    """In front of Swift, without faults until the test sets some. Mark the test needs_haproxy."""
    proxy = HaproxyProxy(swift_server.port).start()
    try:
        yield proxy
    finally:
        proxy.stop()


@pytest.fixture
def quirk_proxy(swift_server: SwiftServer) -> Iterator[QuirkProxy]:
    """In front of Swift, with a rule of the test's own for every request."""
    proxy = QuirkProxy(swift_server.port).start()
    try:
        yield proxy
    finally:
        proxy.stop()


@pytest.fixture
def moto_quirks(moto_server: MotoServer, s3_env: str) -> Iterator[QuirkProxy]:
    """In front of moto, with a rule of the test's own for every request."""
    del s3_env
    proxy = QuirkProxy(moto_server.port).start()
    try:
        yield proxy
    finally:
        proxy.stop()


@pytest.fixture
def moto_bucket(moto_client: Any) -> str:
    """A new, empty bucket on moto."""
    return new_bucket(moto_client)

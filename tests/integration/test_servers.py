"""The test servers do what the tests that stand on them believe.

Real: OpenStack Swift with its S3 API, moto, HAProxy, and s3fs as the client. Nothing is faked.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import s3fs

from tests.servers import DelayProxy, HaproxyProxy, MotoServer, PacedProxy, ServerNotReady, ServerProcess, SwiftServer


def store_at(endpoint: str, **config: object) -> s3fs.S3FileSystem:
    return s3fs.S3FileSystem(
        endpoint_url=endpoint, skip_instance_cache=True, use_listings_cache=False, config_kwargs=config
    )


def test_what_is_put_to_swift_is_read_back(bucket: str, s3_env: str) -> None:
    data = bytes(range(256)) * 4096
    store_at(s3_env).pipe_file(f"{bucket}/shard", data)
    assert store_at(s3_env).cat_file(f"{bucket}/shard") == data


def test_swift_refuses_a_wrong_secret(bucket: str, s3_env: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(PermissionError):
        store_at(s3_env).pipe_file(f"{bucket}/shard", b"x")


def test_a_link_of_limited_bandwidth_passes_every_byte_both_ways(
    bucket: str, swift_server: SwiftServer, s3_env: str, tmp_path: Path
) -> None:
    del s3_env
    data = bytes(range(251)) * 8192
    link = PacedProxy(tmp_path, swift_server.port, 50e6).start()
    try:
        store_at(link.endpoint).pipe_file(f"{bucket}/shard", data)
        assert store_at(link.endpoint).cat_file(f"{bucket}/shard") == data
    finally:
        link.stop()
    assert store_at(swift_server.endpoint).cat_file(f"{bucket}/shard") == data


def test_what_swift_acknowledged_survives_its_kill(tmp_path: Path, s3_env: str) -> None:
    del s3_env  # for the credentials only; this test kills a server of its own
    server = SwiftServer(tmp_path).start()
    try:
        port = server.port
        store = store_at(server.endpoint)
        store.mkdir("kept")
        store.pipe_file("kept/shard", b"acknowledged")
        server.kill()
        server.start()
        assert server.port == port
        assert store_at(server.endpoint).cat_file("kept/shard") == b"acknowledged"
    finally:
        server.stop()


def test_moto_lets_exactly_one_create_only_put_win(moto_server: MotoServer, s3_env: str) -> None:
    del s3_env
    store = store_at(moto_server.endpoint)
    store.mkdir("leases")
    store.pipe_file("leases/one", b"first", mode="create")
    with pytest.raises(FileExistsError):
        store.pipe_file("leases/one", b"second", mode="create")
    assert store.cat_file("leases/one") == b"first"


def test_an_upload_held_by_the_delay_proxy_is_invisible_until_released(bucket: str, delay_proxy: DelayProxy) -> None:
    delay_proxy.hold()
    upload = threading.Thread(
        target=lambda: store_at(delay_proxy.endpoint).pipe_file(f"{bucket}/shard", b"late"), daemon=True
    )
    upload.start()
    delay_proxy.wait_held(30.0)
    assert not store_at(delay_proxy.endpoint).exists(f"{bucket}/shard")
    delay_proxy.release()
    upload.join(30.0)
    assert store_at(delay_proxy.endpoint).cat_file(f"{bucket}/shard") == b"late"


def test_a_delayed_upload_is_not_there_yet_while_reads_pass(bucket: str, s3_env: str, delay_proxy: DelayProxy) -> None:
    store_at(s3_env).pipe_file(f"{bucket}/there", b"read me")
    delay_proxy.delay_s = 600.0
    store = store_at(delay_proxy.endpoint)
    upload = threading.Thread(
        target=lambda: store_at(delay_proxy.endpoint).pipe_file(f"{bucket}/shard", b"x"), daemon=True
    )
    upload.start()
    delay_proxy.wait_held(30.0)
    assert store.cat_file(f"{bucket}/there") == b"read me"
    assert not store.exists(f"{bucket}/shard")
    # s3fs tries again; that this attempt gets through shows that the delay alone held the first one back.
    delay_proxy.delay_s = 0.0
    delay_proxy.break_connections()
    upload.join(30.0)
    assert store.cat_file(f"{bucket}/shard") == b"x"


def test_the_delay_proxy_refuses_as_many_uploads_as_asked(bucket: str, delay_proxy: DelayProxy, s3_env: str) -> None:
    delay_proxy.refuse_next(2)
    store_at(delay_proxy.endpoint).pipe_file(f"{bucket}/shard", b"third time")
    assert delay_proxy.num_matched == 3
    assert store_at(s3_env).cat_file(f"{bucket}/shard") == b"third time"


def test_large_uploads_pass_the_delay_proxy_whole(bucket: str, delay_proxy: DelayProxy, s3_env: str) -> None:
    data = bytes(range(256)) * (48 << 10)
    store_at(delay_proxy.endpoint).pipe_file(f"{bucket}/shard", data, chunksize=5 << 20)
    assert store_at(s3_env).cat_file(f"{bucket}/shard") == data
    assert delay_proxy.num_matched >= 2


@pytest.mark.needs_haproxy
def test_haproxy_answers_503_until_told_otherwise(bucket: str, haproxy: HaproxyProxy) -> None:
    store = store_at(haproxy.endpoint, retries={"max_attempts": 0})
    store.retries = 1
    haproxy.set(slow_down=100)
    with pytest.raises(OSError, match="injected"):
        store.pipe_file(f"{bucket}/shard", b"x")
    haproxy.clear()
    store.pipe_file(f"{bucket}/shard", b"x")
    assert store.cat_file(f"{bucket}/shard") == b"x"


@pytest.mark.needs_haproxy
def test_haproxy_names_the_faults_it_knows(haproxy: HaproxyProxy) -> None:
    with pytest.raises(ValueError, match="slow_down, internal_error"):
        haproxy.set(slowdown=100)


def test_a_server_that_dies_at_its_start_says_what_it_wrote(tmp_path: Path) -> None:
    server = ServerProcess("broken", ["sh", "-c", "echo no such ring >&2; exit 3"], tmp_path)
    with pytest.raises(ServerNotReady, match="no such ring"):
        server.start()

"""Replicas and ranges over real sockets on loopback; the Keeper is a fake that holds bytes."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.errors import ObjectMissing, StorageError
from storage.transport_client import ReplicaClient, send_replica
from storage.transport_server import TransportServer
from tests.fakes.replica_holder import FakeHolder
from tests.fakes.transport_peers import FIRST, KEY, RUN, ref_of

MIB = 1 << 20


@pytest.fixture
def holder() -> FakeHolder:
    return FakeHolder()


@pytest.fixture
def server(holder: FakeHolder) -> Iterator[TransportServer]:
    server = TransportServer(holder, run_id=RUN, node_id="n1", host="127.0.0.1", key=KEY)
    yield server
    server.close()


def send(server: TransportServer, folder: Path, content: bytes) -> bool:
    path = folder / secrets.token_hex(8)
    path.write_bytes(content + b"more of the buffer that is not sent")
    source = os.open(path, os.O_RDONLY)
    try:
        return send_replica(server.address, KEY, ref_of(content), source, pace=None, deadline_s=30)
    finally:
        os.close(source)


@pytest.mark.parametrize("num_bytes", [0, 1, 4097, MIB, 5 * MIB + 3])
def test_a_replica_arrives_as_it_was_sent_and_can_be_fetched(
    holder: FakeHolder, server: TransportServer, tmp_path: Path, num_bytes: int
) -> None:
    content = secrets.token_bytes(num_bytes)
    assert send(server, tmp_path, content)
    assert holder.sealed == {(FIRST, 3, 0): content}
    assert holder.refs == [ref_of(content)]
    client = ReplicaClient(server.address, KEY, RUN, deadline_s=30)
    assert client.fetch(FIRST, 3, 0, 0, num_bytes) == content
    middle = num_bytes // 3
    assert client.fetch(FIRST, 3, 0, middle, num_bytes // 2) == content[middle : middle + num_bytes // 2]
    client.close()


def test_what_is_held_already_is_not_sent_again(holder: FakeHolder, server: TransportServer, tmp_path: Path) -> None:
    assert send(server, tmp_path, b"once")
    assert not send(server, tmp_path, b"once")
    assert holder.num_rooms == 1


def test_the_reason_of_a_refusal_travels(holder: FakeHolder, server: TransportServer, tmp_path: Path) -> None:
    holder.refuses_with = StorageError("the budget of 8 bytes is used up")
    with pytest.raises(StorageError, match=r"step-0000000003.*node n1.*the budget of 8 bytes is used up"):
        send(server, tmp_path, b"too much")
    holder.refuses_with = None
    assert send(server, tmp_path, b"too much")


def test_what_is_not_held_is_missing(server: TransportServer) -> None:
    client = ReplicaClient(server.address, KEY, RUN, deadline_s=30)
    with pytest.raises(ObjectMissing, match=r"step-0000000007/.*rank-00002.* node n1"):
        client.fetch(FIRST, 7, 2, 0, 1)
    client.close()

"""The conformance suite on S3 servers: Swift with a whole bucket, moto below a prefix."""

from __future__ import annotations

import os
from typing import Any

import pytest

from storage.config import StoreConfig
from storage.object_store import ObjectStore
from storage.s3_store import S3Store
from tests.s3_stores import new_bucket
from tests.servers import MotoServer
from tests.unit.storage.object_store_conformance import ObjectStoreConformance

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

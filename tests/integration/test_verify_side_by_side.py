"""Verifying reads several Shards at once, and not more than it may. Real: Swift's S3 behind a proxy, the Verifier."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from orchestrator.verifier import Verifier
from storage.config import StoreConfig
from storage.object_store import ObjectStore
from storage.open_store import open_store
from storage.verify import SHARDS_AT_ONCE
from tests.fakes.checkpoints import RUN, save
from tests.servers import DelayProxy, SwiftServer

LIMIT_S = 60.0
NUM_SHARDS = 2 * SHARDS_AT_ONCE + 3


class CountedReads:
    """The store, with the most ranged reads that were under way at once."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._num_under_way = self.most_at_once = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        with self._lock:
            self._num_under_way += 1
            self.most_at_once = max(self.most_at_once, self._num_under_way)
        try:
            return self._store.get_range(key, offset, length)
        finally:
            with self._lock:
                self._num_under_way -= 1


def test_as_many_requests_as_allowed_are_in_flight_and_no_more(bucket: str, swift_server: SwiftServer) -> None:
    url = f"s3://{bucket}/run"
    key = save(open_store(url), 10, world_size=NUM_SHARDS).step_key
    proxy = DelayProxy(swift_server.port, pattern="/shards/", methods=frozenset({"GET"})).start()
    try:
        store = CountedReads(open_store(url, StoreConfig(endpoint_url=proxy.endpoint)))
        verifier = Verifier(store, RUN, open_load="digests will do", now_utc=lambda: "now")  # type: ignore[arg-type]
        proxy.hold()
        with ThreadPoolExecutor(1) as pool:
            verdict = pool.submit(verifier.verify, key)
            try:
                proxy.wait_held(LIMIT_S, SHARDS_AT_ONCE)
            finally:
                proxy.release()
            found = verdict.result(LIMIT_S)
    finally:
        proxy.stop()
    assert found is not None
    assert (found.problem, found.by) == (None, "digests")
    assert store.most_at_once == SHARDS_AT_ONCE


def test_a_busy_machine_has_one_request_in_flight(bucket: str) -> None:
    url = f"s3://{bucket}/run"
    store = CountedReads(open_store(url))
    key = save(open_store(url), 10, world_size=5).step_key
    verifier = Verifier(store, RUN, open_load="digests will do", now_utc=lambda: "now", at_once=lambda: 1)  # type: ignore[arg-type]
    found = verifier.verify(key)
    assert found is not None
    assert found.problem is None
    assert store.most_at_once == 1

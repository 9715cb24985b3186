"""Copies of Shards on the node's own disk: read when they are right, passed over when they are not."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.codec import digest128
from storage.disk_source import NearestSource
from storage.errors import ObjectMissing
from storage.keys import Attempt, StepKey, shard_key
from storage.manifest import ShardRecord
from storage.memory_store import MemoryStore
from storage.object_source import ObjectStoreSource
from storage.sources import ShardLocation
from storage.spool_files import spool_file

KEY = shard_key(StepKey(step=20, attempt=Attempt(number=3, nonce="0000000a")), 1)
CONTENT = bytes(range(256)) * 1024
PLACE = ShardLocation(rank=1, tier="object-storage", location=KEY)


def record_of(content: bytes, key: str = KEY) -> ShardRecord:
    return ShardRecord(
        rank=1, key=key, size=len(content), digest=digest128(content), index_bytes=1, index_digest="0" * 32
    )


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore()
    store.put(KEY, CONTENT)
    return store


@pytest.fixture
def source(store: MemoryStore, tmp_path: Path) -> Iterator[NearestSource]:
    with NearestSource(ObjectStoreSource(store), tmp_path, [record_of(CONTENT)]) as source:
        yield source


def test_a_right_copy_is_read_and_the_store_is_not(store: MemoryStore, source: NearestSource, tmp_path: Path) -> None:
    spool_file(tmp_path, KEY).write_bytes(CONTENT)
    store.delete([KEY])
    assert source.read_range(PLACE, 1000, 5000) == CONTENT[1000:6000]
    assert source.bytes_by_tier == {"local-disk": 5000, "object-storage": 0}


def test_without_a_copy_the_store_is_read(source: NearestSource) -> None:
    assert source.read_range(PLACE, 7, 9) == CONTENT[7:16]
    assert source.bytes_by_tier == {"local-disk": 0, "object-storage": 9}


def test_one_flipped_bit_sends_the_reader_to_the_store_and_removes_the_copy(
    source: NearestSource, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = spool_file(tmp_path, KEY)
    copy.write_bytes(CONTENT[:-1] + bytes([CONTENT[-1] ^ 1]))
    with caplog.at_level(logging.WARNING):
        assert source.read_range(PLACE, 0, 64) == CONTENT[:64]
    assert source.bytes_by_tier == {"local-disk": 0, "object-storage": 64}
    assert not copy.exists()
    assert digest128(CONTENT) in caplog.text


def test_a_stale_copy_of_the_same_name_and_size_is_never_taken(
    store: MemoryStore, source: NearestSource, tmp_path: Path
) -> None:
    spool_file(tmp_path, KEY).write_bytes(bytes(len(CONTENT)))
    assert source.read_range(PLACE, 0, len(CONTENT)) == store.get(KEY)


def test_a_copy_of_another_size_is_left_alone(source: NearestSource, tmp_path: Path) -> None:
    copy = spool_file(tmp_path, KEY)
    copy.write_bytes(CONTENT + b"more")
    assert source.read_range(PLACE, 0, 4) == CONTENT[:4]
    assert copy.exists()


def test_a_copy_that_is_removed_while_it_is_read_stays_readable(source: NearestSource, tmp_path: Path) -> None:
    copy = spool_file(tmp_path, KEY)
    copy.write_bytes(CONTENT)
    source.read_range(PLACE, 0, 4)
    copy.unlink()
    assert source.read_range(PLACE, 4, 4) == CONTENT[4:8]
    assert source.bytes_by_tier["object-storage"] == 0


def test_a_copy_cut_short_while_it_is_read_sends_the_reader_to_the_store(source: NearestSource, tmp_path: Path) -> None:
    copy = spool_file(tmp_path, KEY)
    copy.write_bytes(CONTENT)
    source.read_range(PLACE, 0, 4)
    copy.write_bytes(CONTENT[:10])
    assert source.read_range(PLACE, 8, 8) == CONTENT[8:16]


def test_a_shard_the_manifest_does_not_name_comes_from_the_store(source: NearestSource, tmp_path: Path) -> None:
    other = shard_key(StepKey(step=10, attempt=Attempt(number=3, nonce="0000000a")), 1)
    spool_file(tmp_path, other).write_bytes(CONTENT)
    with pytest.raises(ObjectMissing):
        source.read_range(ShardLocation(rank=1, tier="object-storage", location=other), 0, 4)


def test_several_threads_check_a_copy_once_and_read_the_same(
    source: NearestSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import storage.disk_source as module

    checks: list[int] = []
    real = module._digest

    def count(copy: int) -> str:
        checks.append(copy)
        return real(copy)

    monkeypatch.setattr(module, "_digest", count)
    spool_file(tmp_path, KEY).write_bytes(CONTENT)
    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda start=start: found.append(source.read_range(PLACE, start, 10)))
        for start in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert sorted(found) == sorted(CONTENT[start : start + 10] for start in range(8))
    assert len(checks) == 1

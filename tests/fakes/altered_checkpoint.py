"""Changes a stored Checkpoint as nobody who looks at digests could tell: values are encoded and recorded anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from storage.codec import digest128
from storage.commit_bytes import commit_to_bytes
from storage.commit_log import CommitLog
from storage.config import CheckpointConfig
from storage.frames import RawChunk, decode_frame, encode_shard, itemsize_of, read_index
from storage.manifest import Manifest, ShardRecord
from storage.object_store import ObjectStore

__all__ = ["alter", "scale"]

Change = Callable[[str, bytearray], None]


def scale(name: str, factor: float) -> Change:
    """Multiply the float32 tensor ``name``."""

    def change(chunk: str, raw: bytearray) -> None:
        if chunk == name:
            values = np.frombuffer(raw, dtype=np.float32)
            values *= np.float32(factor)

    return change


def alter(
    store: ObjectStore,
    step: int,
    *,
    values: Change = lambda *_: None,
    shared_state: Callable[[Any], None] = lambda _: None,
) -> None:
    """``values`` gets each chunk's name and bytes, ``shared_state`` the plain state; both change what they get."""
    log = CommitLog(store, None)
    commit = next(commit for commit in log.commits() if commit.step == step)
    manifest = log.read_manifest(commit)
    shards = tuple(_rewritten(store, manifest, record, values) for record in manifest.shards)
    plain = manifest.model_dump(mode="json")
    shared_state(plain["shared_state"])
    changed = Manifest.model_validate(plain | {"shards": [shard.model_dump(mode="json") for shard in shards]})
    content = changed.model_dump_json().encode()
    store.put(commit.manifest_key, content)
    updated = commit.model_copy(update={"manifest_bytes": len(content), "manifest_digest": digest128(content)})
    store.put(commit.object_key, commit_to_bytes(updated))


def _rewritten(store: ObjectStore, manifest: Manifest, record: ShardRecord, values: Change) -> ShardRecord:
    step = manifest.step

    def fetch(offset: int, length: int) -> bytes:
        return store.get_range(record.key, offset, length)

    chunks = []
    for chunk in read_index(fetch, record, step=step).chunks:
        raw = bytearray()
        for number, frame in enumerate(chunk.frames):
            stored = memoryview(fetch(frame.offset, frame.stored_bytes))
            raw += decode_frame(chunk, number, stored, step=step, key=record.key, rank=record.rank)
        values(chunk.name, raw)
        chunks.append(
            RawChunk(
                name=chunk.name,
                dtype=chunk.dtype,
                offsets=chunk.offsets,
                sizes=chunk.sizes,
                level=chunk.level,
                itemsize=itemsize_of(chunk.dtype),
                data=memoryview(raw),
            )
        )
    encoded = encode_shard(
        chunks, step=step, attempt=manifest.attempt.value(), rank=record.rank, config=CheckpointConfig()
    )
    store.put(record.key, bytes(encoded.data))
    return encoded.record(record.key)

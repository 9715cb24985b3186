"""What is fed with untrusted bytes: one function a parser. It returns for good and for refused input, raises for a bug.

Digests are made to fit the mutated bytes, as an attacker or a faulty writer would, so that what lies behind them is
reached. Used by the tests and by `python -m tests.fuzz.run`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any, get_args

import xxhash
from pydantic import BaseModel, ValidationError

from storage.codec import decode, digest128
from storage.commit_log import CommitLog
from storage.errors import StorageError
from storage.frames import read_index, read_rows
from storage.keys import (
    MANIFESTS,
    QUARANTINE,
    Attempt,
    StepKey,
    commit_key,
    manifest_key,
    parse_shard_key,
    parse_step_key,
    quarantine_key,
    shard_key,
)
from storage.lease import LeaseRecord
from storage.local_store import LocalStore
from storage.manifest import (
    AttemptRecord,
    ChunkIndex,
    ChunkPlace,
    Commit,
    Manifest,
    QuarantineRecord,
    Receipt,
    ShardIndex,
    ShardRecord,
    TensorLayout,
)
from storage.memory_store import MemoryStore
from storage.restore import plan_restore
from storage.shard_format import MAGIC, TRAILER, itemsize_of
from storage.snapshot_format import read_header
from storage.verify import verify_commit

__all__ = ["TARGETS", "Target", "shard_input", "shard_is_good"]

Target = Callable[[bytes], None]

RUN = "run"
STEP = 7
KEY = StepKey(step=STEP, attempt=Attempt(number=1, nonce="00000001"))
WRITER = "0badcafe"
TIME = "2026-01-01T00:00:00.000Z"
MODELS: tuple[type[BaseModel], ...] = (*(Commit, Manifest, Receipt, ShardIndex, QuarantineRecord, LeaseRecord),)
ENCODINGS: tuple[str, ...] = get_args(ChunkIndex.model_fields["encoding"].annotation)
LARGEST_FRAME = 64 << 20
SEALED = b"RAYSNAP\x00"


def records(data: bytes) -> None:
    """Any record's JSON: refused, or read, written and read again without a change."""
    if not data:
        return
    model = MODELS[data[0] % len(MODELS)]
    with suppress(ValidationError):
        record = model.model_validate_json(data[1:])
        again = model.model_validate_json(record.model_dump_json())
        assert again.model_dump_json() == record.model_dump_json()
        # Of the other records only numbers that are none may change: they become null.
        assert model not in (Manifest, Receipt) or repr(again) == repr(record)


def codec(data: bytes) -> None:
    """One stored frame with a promise of its size."""
    if len(data) < 8:
        return
    encoding, itemsize = ENCODINGS[data[0] % len(ENCODINGS)], 1 << (data[1] % 5)
    promised = int.from_bytes(data[2:8], "little")
    if encoding == "planes-zstd":  # it may really hold that much, and its reader bounds what a frame promises
        promised %= LARGEST_FRAME
    with suppress(ValueError):
        assert len(decode(data[8:], promised, itemsize, encoding)) == promised  # type: ignore[arg-type]


def shard_input(index: bytes, frames: bytes) -> bytes:
    """An input of `shard`: the length of the index, the index, then the frames."""
    return len(index).to_bytes(2, "little") + index + frames


def shard(data: bytes) -> None:
    """A Shard object with any index and any frames: what deep verification finds good is readable."""
    record, content, footer = _shard_object(data)
    _read_shard(record, content, _is_good(record, content, footer))


def shard_is_good(data: bytes) -> bool:
    """Whether deep verification accepts an input of `shard`."""
    return _is_good(*_shard_object(data))


def _shard_object(data: bytes) -> tuple[ShardRecord, bytes, bytes]:
    """The record of the object, the object, and its index."""
    length = int.from_bytes(data[:2], "little")
    frames = data[2 + length :]
    footer = _with_digests(data[2 : 2 + length], frames)
    content = frames + footer + TRAILER.pack(len(footer), 1, 0, MAGIC)
    record = ShardRecord(
        rank=0,
        key=shard_key(KEY, 0),
        size=len(content),
        digest=digest128(content),
        index_bytes=len(footer),
        index_digest=digest128(footer),
    )
    return record, content, footer


def _with_digests(footer: bytes, frames: bytes) -> bytes:
    """The index with every frame's digest made to fit, and with it step and rank, where it is JSON of that form."""
    try:
        index: dict[str, Any] = json.loads(footer)
        for chunk in index["chunks"]:
            for frame in chunk["frames"]:
                stored = frames[frame["offset"] : frame["offset"] + frame["stored_bytes"]]
                frame["digest"] = xxhash.xxh3_64_hexdigest(stored)
        return json.dumps(index | {"step": STEP, "rank": 0}).encode()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return footer


def _is_good(record: ShardRecord, content: bytes, footer: bytes) -> bool:
    store = _stored({record.key: content})
    manifest = Manifest(
        run_id=RUN,
        step=STEP,
        attempt=AttemptRecord.of(KEY.attempt),
        world_size=1,
        time_utc=TIME,
        shards=(record,),
        tensors=_layouts(footer),
        shared_state={},
        rank_states=({},),
    )
    log = CommitLog(store, RUN)
    return verify_commit(store, log, _committed(store, manifest.model_dump_json().encode())).is_good


def _layouts(footer: bytes) -> dict[str, TensorLayout]:
    try:
        chunks = ShardIndex.model_validate_json(footer).chunks
    except ValidationError:
        return {}
    return {
        chunk.name: TensorLayout(
            dtype=chunk.dtype,
            shape=chunk.sizes,
            level=chunk.level,
            chunks=(ChunkPlace(rank=0, offsets=chunk.offsets, sizes=chunk.sizes),),
        )
        for chunk in chunks
    }


def _read_shard(record: ShardRecord, content: bytes, is_good: bool) -> None:
    def fetch(offset: int, length: int) -> bytes:
        assert 0 <= offset <= offset + length <= len(content), (offset, length)
        return content[offset : offset + length]

    try:
        for chunk in read_index(fetch, record, step=STEP).chunks:
            rows = 0 if 0 in chunk.sizes else (chunk.sizes or (1,))[0]
            raw = read_rows(chunk, 0, rows, fetch, step=STEP, key=record.key)
            expected = itemsize_of(chunk.dtype)
            for size in chunk.sizes:
                expected *= size
            assert len(raw) == expected
    except (StorageError, ValueError):
        assert not is_good


def log(data: bytes) -> None:
    """The same bytes as a Commit, as a Manifest that a Commit names, and as a quarantine record."""
    store = _stored({commit_key(KEY): data})
    CommitLog(store, RUN).scan()
    with suppress(StorageError):
        plan_restore(CommitLog(store, RUN), attempt=Attempt(number=2, nonce="00000002"))
    store = _stored({quarantine_key(KEY): data})
    CommitLog(store, RUN).quarantined()
    store = _stored({})
    with suppress(StorageError):
        CommitLog(store, RUN).read_manifest(_committed(store, data))
    with suppress(StorageError):
        plan_restore(CommitLog(store, RUN), attempt=Attempt(number=2, nonce="00000002"))


def _stored(objects: dict[str, bytes]) -> MemoryStore:
    store = MemoryStore()
    for key, content in objects.items():
        store.put(key, content)
    return store


def _committed(store: MemoryStore, manifest: bytes) -> Commit:
    """A Commit that fits ``manifest``, whatever it is."""
    commit = Commit(
        run_id=RUN,
        step=STEP,
        attempt=AttemptRecord.of(KEY.attempt),
        base_step=0,
        time_utc=TIME,
        manifest_key=manifest_key(KEY),
        manifest_bytes=len(manifest),
        manifest_digest=digest128(manifest),
        stored_bytes=0,
    )
    store.put(commit.manifest_key, manifest)
    store.put(commit_key(KEY), commit.model_dump_json().encode())
    return commit


def snapshot(data: bytes) -> None:
    """A Snapshot buffer as it is, and one whose header's length and digest were made to fit."""
    with suppress(StorageError):
        _check_places(data)
    prefix = SEALED + (1).to_bytes(4, "little") + len(data).to_bytes(8, "little")
    buffer = prefix + data + xxhash.xxh3_64_digest(prefix + data) + bytes(512)
    with suppress(StorageError):
        _check_places(buffer)


def _check_places(buffer: bytes) -> None:
    for chunk in read_header(buffer).chunks:
        assert 0 < chunk.data_offset <= chunk.data_offset + chunk.num_bytes <= len(buffer)


def keys(data: bytes) -> None:
    """Names: taken apart only when they are exactly ours; none leads out of a store."""
    name = data.decode("utf-8", "surrogateescape")
    shard_name = parse_shard_key(name)
    assert shard_name is None or shard_key(*shard_name) == name
    step_key = parse_step_key(name)
    assert step_key is None or step_key.stem in name
    with suppress(ValueError):
        Attempt.parse(name)
    for folder in ("", MANIFESTS, QUARANTINE):
        with suppress(StorageError, ValueError):
            LocalStore("/raysume-nowhere/store").get(folder + name)
    with suppress(StorageError):
        path = LocalStore("/raysume-nowhere/store")._path(name)
        assert ".." not in path.parts, name
        assert str(path).startswith("/raysume-nowhere/store"), name


TARGETS: dict[str, Target] = {target.__name__: target for target in (records, codec, shard, log, snapshot, keys)}

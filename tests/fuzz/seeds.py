"""Valid inputs of each target, made by the code that writes such bytes, and the files kept from fuzzing runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from storage.codec import encode
from storage.config import CheckpointConfig
from storage.frames import RawChunk, encode_shard
from storage.keys import Attempt, StepKey, commit_key, manifest_key, quarantine_key, shard_key
from storage.lease import LeaseRecord
from storage.manifest import AttemptRecord, Commit, QuarantineRecord
from storage.memory_store import MemoryStore
from storage.shard_format import TRAILER_BYTES
from storage.snapshot_format import SnapshotHeader, StagedChunk, assign_offsets, write_header
from tests.fakes.checkpoints import prepare, save
from tests.fuzz.targets import ENCODINGS, KEY, MODELS, RUN, STEP, TIME, shard_input

__all__ = ["CORPUS", "seeds_of"]

CORPUS = Path(__file__).with_name("corpus")


def seeds_of(target: str) -> list[bytes]:
    """Valid inputs first, then hostile ones, then the corpus, in a fixed order."""
    made = {"records": _records, "codec": _codec, "shard": _shard, "log": _log, "snapshot": _snapshot, "keys": _keys}
    kept = sorted((CORPUS / target).glob("*")) if (CORPUS / target).exists() else []
    return [*made[target](), *hostile(target), *(path.read_bytes() for path in kept)]


def hostile(target: str) -> list[bytes]:
    """Inputs that promise far more than they hold, and agree with themselves in it."""
    huge = 1 << 45
    bomb = b"\x28\xb5\x2f\xfd\xe0" + huge.to_bytes(8, "little") + b"\x03\x00\x10\x00"
    constant = b"\x01" + 2 * b"\x02\x01\x00\x00\x00" + b"\x00\x00"
    if target == "codec":
        return [bytes([ENCODINGS.index("zstd"), 0]) + huge.to_bytes(6, "little") + bomb]
    if target == "shard":
        return [
            shard_input(_promise(huge, name, len(data)), data)
            for name, data in (("zstd", bomb), (ENCODINGS[-1], constant))
        ]
    return []


def _promise(rows: int, encoding: str, stored_bytes: int) -> bytes:
    """The index of one frame of ``rows`` bytes."""
    frame = {"rows": [0, rows], "offset": 0, "stored_bytes": stored_bytes, "raw_bytes": rows, "digest": "0" * 16}
    chunk = {"name": "w", "dtype": "uint8", "offsets": [0], "sizes": [rows], "level": "L1", "encoding": encoding}
    chunk |= {"raw_digest": "0" * 16, "frames": [frame]}
    attempt = {"number": 1, "nonce": "00000001"}
    return json.dumps({"version": 1, "step": STEP, "attempt": attempt, "rank": 0, "chunks": [chunk]}).encode()


def _records() -> list[bytes]:
    return [bytes([MODELS.index(type(record))]) + record.model_dump_json().encode() for record in _some_records()]


def _some_records() -> list[Commit | QuarantineRecord | LeaseRecord]:
    parts = prepare(STEP)
    commit = save(MemoryStore(), STEP)
    attempt = AttemptRecord.of(Attempt(number=1, nonce="00000001"))
    quarantine = QuarantineRecord(step=STEP, attempt=attempt, time_utc=TIME, key="shards/x", reason="hash mismatch")
    manifest = parts.manifest()
    index = encode_shard([_chunk()], step=STEP, attempt=KEY.attempt, rank=0, config=CheckpointConfig()).index
    return [commit, manifest, *parts.receipts, index, quarantine]  # type: ignore[list-item]


def _codec() -> list[bytes]:
    raw = np.arange(64, dtype=np.float32).tobytes()
    return [
        bytes([number, 2]) + len(raw).to_bytes(6, "little") + encode(raw, 4, name, 1)  # type: ignore[arg-type]
        for number, name in enumerate(ENCODINGS)
    ]


def _chunk(name: str = "w", rows: int = 8) -> RawChunk:
    data = np.arange(rows * 4, dtype=np.float32).tobytes()
    return RawChunk(
        name=name, dtype="float32", offsets=(0, 0), sizes=(rows, 4), level="L1", itemsize=4, data=memoryview(data)
    )


def _shard() -> list[bytes]:
    inputs = []
    for encoding in ENCODINGS:
        config = CheckpointConfig(encoding=encoding)
        encoded = encode_shard([_chunk(), _chunk("b", 1)], step=STEP, attempt=KEY.attempt, rank=0, config=config)
        content = bytes(encoded.data)
        split = len(content) - TRAILER_BYTES - encoded.index_bytes
        inputs.append(shard_input(content[split:-TRAILER_BYTES], content[:split]))
    return inputs


def _log() -> list[bytes]:
    store = MemoryStore()
    commit = save(store, STEP)
    record = QuarantineRecord(
        step=STEP, attempt=AttemptRecord.of(KEY.attempt), time_utc=TIME, key="shards/x", reason="missing file"
    )
    return [store.get(commit.manifest_key), commit.model_dump_json().encode(), record.model_dump_json().encode()]


def _snapshot() -> list[bytes]:
    chunk = StagedChunk(name="w", dtype="float32", shape=(8, 4), offsets=(0, 0), sizes=(4, 4), level="L1", num_bytes=64)
    header, size = assign_offsets(
        SnapshotHeader(
            run_id=RUN,
            attempt=KEY.attempt,
            step=STEP,
            rank=0,
            world_size=2,
            chunks=(chunk,),
            shared_state={"lr": 0.1},
            rank_state={},
        )
    )
    buffer = bytearray(size)
    write_header(buffer, header)
    length = int.from_bytes(buffer[12:20], "little")
    return [bytes(buffer), bytes(buffer[20 : 20 + length])]


def _keys() -> list[bytes]:
    key = StepKey(step=STEP, attempt=KEY.attempt)
    names = [shard_key(key, 3), commit_key(key), manifest_key(key, "0badcafe"), quarantine_key(key), key.attempt.label]
    return [name.encode() for name in [*names, "../../etc/passwd", "shards/../../x", json.dumps("a\x00b")]]

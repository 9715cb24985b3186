"""Builds small, real Checkpoints in any store, the way a save does: Shards, Manifest, then the Commit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from storage.commit_log import CommitLog
from storage.config import CheckpointConfig
from storage.frames import RawChunk, encode_shard
from storage.keys import Attempt, StepKey, shard_key
from storage.manifest import AttemptRecord, ChunkPlace, Commit, Manifest, Receipt, TensorLayout
from storage.merge import merge_receipts
from storage.object_store import ObjectStore

RUN = "run"
COLUMNS = 16
TIME = "2026-01-01T00:00:00.000Z"
WRITER = "0000cafe"


def attempt(number: int = 1) -> Attempt:
    """Attempt ``number`` with a nonce that follows from it."""
    return Attempt(number=number, nonce=f"{number:08x}")


def weights(step: int, rows: int) -> bytes:
    """The bytes of tensor ``w`` at ``step``."""
    return np.random.default_rng(step).normal(size=(rows, COLUMNS)).astype(np.float32).tobytes()


@dataclass(frozen=True, kw_only=True)
class SaveParts:
    """A save in pieces, so that a test can stop between any two writes."""

    key: StepKey
    shards: dict[str, bytes]
    receipts: tuple[Receipt, ...]
    base_step: int
    metric: float | None

    def manifest(self) -> Manifest:
        return merge_receipts(self.receipts, time_utc=TIME, metadata={}, ledger=None)


def prepare(
    step: int,
    *,
    by: Attempt | None = None,
    world_size: int = 2,
    rows_per_rank: int = 8,
    base_step: int = 0,
    metric: float | None = None,
) -> SaveParts:
    """All that a save of ``step`` will write."""
    key = StepKey(step=step, attempt=by or attempt())
    rows = world_size * rows_per_rank
    raw = memoryview(weights(step, rows))
    share = len(raw) // world_size
    shards: dict[str, bytes] = {}
    receipts = []
    for rank in range(world_size):
        offsets, sizes = (rank * rows_per_rank, 0), (rows_per_rank, COLUMNS)
        chunk = RawChunk(
            name="w",
            dtype="float32",
            offsets=offsets,
            sizes=sizes,
            level="L1",
            itemsize=4,
            data=raw[rank * share : (rank + 1) * share],
        )
        encoded = encode_shard([chunk], step=step, attempt=key.attempt, rank=rank, config=CheckpointConfig())
        name = shard_key(key, rank)
        shards[name] = bytes(encoded.data)
        place = ChunkPlace(rank=rank, offsets=offsets, sizes=sizes)
        layout = TensorLayout(dtype="float32", shape=(rows, COLUMNS), level="L1", chunks=(place,))
        receipts.append(
            Receipt(
                run_id=RUN,
                step=step,
                attempt=AttemptRecord.of(key.attempt),
                world_size=world_size,
                shard=encoded.record(name),
                tensors={"w": layout},
                shared_state={"step": step} if rank == 0 else None,
                rank_state={"rank": rank},
            )
        )
    return SaveParts(key=key, shards=shards, receipts=tuple(receipts), base_step=base_step, metric=metric)


def write_shards(store: ObjectStore, parts: SaveParts) -> None:
    for name, content in parts.shards.items():
        store.put(name, content)


def commit_parts(log: CommitLog, parts: SaveParts) -> Commit:
    """The Manifest and the Commit, in this order."""
    manifest = parts.manifest()
    stored = log.write_manifest(manifest)
    commit = Commit(
        run_id=RUN,
        step=parts.key.step,
        attempt=AttemptRecord.of(parts.key.attempt),
        base_step=parts.base_step,
        time_utc=TIME,
        manifest_key=stored.key,
        manifest_bytes=stored.num_bytes,
        manifest_digest=stored.digest,
        stored_bytes=manifest.stored_bytes,
        metric=parts.metric,
    )
    log.append(commit)
    return commit


def save(
    store: ObjectStore,
    step: int,
    *,
    by: Attempt | None = None,
    world_size: int = 2,
    base_step: int = 0,
    metric: float | None = None,
) -> Commit:
    """A whole committed Checkpoint of ``step``."""
    parts = prepare(step, by=by, world_size=world_size, base_step=base_step, metric=metric)
    write_shards(store, parts)
    return commit_parts(CommitLog(store, RUN, writer=WRITER), parts)

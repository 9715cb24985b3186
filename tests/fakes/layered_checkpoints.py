"""Real Checkpoints with a weight (L1) and two moments (L2), cut among ranks by rows or by columns."""

from __future__ import annotations

import numpy as np

from storage.commit_log import CommitLog
from storage.config import CheckpointConfig
from storage.frames import RawChunk, encode_shard, read_index
from storage.keys import StepKey, shard_key
from storage.manifest import AttemptRecord, ChunkPlace, Commit, Level, Receipt, TensorLayout
from storage.object_store import ObjectStore
from tests.fakes.checkpoints import RUN, SaveParts, attempt, commit_parts, write_shards

__all__ = ["LEVELS", "damage_level", "damage_tensor", "layered_parts", "layered_save"]

LEVELS: dict[str, Level] = {"model.w": "L1", "optim.w.exp_avg": "L2", "optim.w.exp_avg_sq": "L2"}
ROWS, COLUMNS = 24, 12


def values_of(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {name: rng.normal(size=(ROWS, COLUMNS)).astype(np.float32) for name in LEVELS}


def layered_parts(
    step: int, *, world_size: int = 2, by_columns: bool = False, values: dict[str, np.ndarray] | None = None
) -> SaveParts:
    """All that a save of ``step`` writes; ``values`` in place of those that follow from the step."""
    key = StepKey(step=step, attempt=attempt())
    values = values or values_of(step)
    shards: dict[str, bytes] = {}
    receipts = []
    for rank in range(world_size):
        chunks, layouts = [], {}
        for name, whole in values.items():
            parts = np.array_split(np.arange(whole.shape[1 if by_columns else 0]), world_size)
            start, size = (int(parts[rank][0]), len(parts[rank])) if len(parts[rank]) else (0, 0)
            block = whole[:, start : start + size] if by_columns else whole[start : start + size]
            offsets = (0, start) if by_columns else (start, 0)
            data = memoryview(np.ascontiguousarray(block).tobytes())
            dtype = str(whole.dtype)
            chunk = RawChunk(
                name=name, dtype=dtype, offsets=offsets, sizes=block.shape, level=LEVELS[name],
                itemsize=whole.itemsize, data=data,
            )  # fmt: skip
            chunks.append(chunk)
            place = ChunkPlace(rank=rank, offsets=offsets, sizes=block.shape)
            layouts[name] = TensorLayout(dtype=dtype, shape=whole.shape, level=LEVELS[name], chunks=(place,))
        encoded = encode_shard(chunks, step=step, attempt=key.attempt, rank=rank, config=CheckpointConfig())
        name = shard_key(key, rank)
        shards[name] = bytes(encoded.data)
        receipts.append(
            Receipt(
                run_id=RUN, step=step, attempt=AttemptRecord.of(key.attempt), world_size=world_size,
                shard=encoded.record(name), tensors=layouts, shared_state={"step": step} if rank == 0 else None,
                rank_state={"rank": rank},
            )
        )  # fmt: skip
    return SaveParts(key=key, shards=shards, receipts=tuple(receipts), base_step=0, metric=None)


def layered_save(store: ObjectStore, step: int, *, world_size: int = 2, by_columns: bool = False) -> Commit:
    parts = layered_parts(step, world_size=world_size, by_columns=by_columns)
    write_shards(store, parts)
    return commit_parts(CommitLog(store, RUN), parts)


def damage_tensor(store: ObjectStore, commit: Commit, name: str, *, rank: int = 0) -> str:
    """Flip one bit in the middle of what ``rank`` stored of ``name``; returns the object's key."""
    manifest = CommitLog(store, RUN).read_manifest(commit)
    record = manifest.shards[rank]
    content = bytearray(store.get(record.key))

    def fetch(offset: int, length: int) -> bytes:
        return bytes(content[offset : offset + length])

    index = read_index(fetch, record, step=commit.step)
    frame = next(chunk for chunk in index.chunks if chunk.name == name).frames[0]
    content[frame.offset + frame.stored_bytes // 2] ^= 1
    store.put(record.key, bytes(content))
    return record.key


def damage_level(store: ObjectStore, commit: Commit, level: Level) -> None:
    """Flip one bit in every tensor of ``level``."""
    for name, of in LEVELS.items():
        if of == level:
            damage_tensor(store, commit, name)

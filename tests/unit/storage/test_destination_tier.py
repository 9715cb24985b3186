"""What a rule keeps in the memory Tier alone never reaches a Shard of a Checkpoint; everything else does."""

from __future__ import annotations

import time
from functools import partial

import numpy as np

from storage.config import CheckpointConfig, LevelRule
from storage.frames import read_index
from storage.keeper_protocol import BufferLease
from storage.keys import Attempt
from storage.memory_store import MemoryStore
from storage.shipping import ship_snapshot
from tests.fakes.snapshot_writer import fill, make_header, sealed

ATTEMPT = Attempt(number=1, nonce="0123abcd")


def test_a_tensor_of_tier_memory_is_in_the_snapshot_but_in_no_shard() -> None:
    arrays = {
        "model.w": np.arange(64, dtype=np.float32).reshape(8, 8),
        "optim.w.trace": np.ones((8, 8), dtype=np.float32),
    }
    header, num_bytes = make_header(arrays, attempt=ATTEMPT, step=3)
    buffer = bytearray(num_bytes)
    digest = fill(buffer, header, arrays)
    snapshot = sealed(header, BufferLease(lease_id="x", path="-", num_bytes=num_bytes), digest)
    config = CheckpointConfig(levels=(LevelRule(pattern="optim.*.trace", tier="memory"),))
    for kept, names in ((config, {"model.w"}), (CheckpointConfig(), {"model.w", "optim.w.trace"})):
        store = MemoryStore()
        receipt = ship_snapshot(snapshot, memoryview(buffer), store, kept, time.monotonic)
        index = read_index(partial(store.get_range, receipt.shard.key), receipt.shard, step=3)
        assert {chunk.name for chunk in index.chunks} == names == set(receipt.tensors)

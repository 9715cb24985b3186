"""Real Keepers with a memory Tier in one process, talking over loopback, and what a worker does to fill it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from storage.buffer_map import map_buffer
from storage.config import CheckpointConfig
from storage.frames import decode_frame, read_index
from storage.keeper import Keeper
from storage.keeper_protocol import BufferLease, KeeperPort, LeaseRequest, TransportAddress
from storage.keys import Attempt
from storage.manifest import Manifest, Receipt
from storage.memory_store import MemoryStore
from storage.merge import merge_receipts
from storage.object_store import ObjectStore
from tests.fakes.gated_store import GatedStore
from tests.fakes.recording_sink import RecordingSink
from tests.fakes.snapshot_writer import Arrays, fill, make_header, sealed

FIRST = Attempt(number=1, nonce="00000001")
SECOND = Attempt(number=2, nonce="00000002")
THIRD = Attempt(number=3, nonce="00000003")
WAIT_S = 20.0
KEY = bytes(range(32))


class MemoryBench:
    """Makes Keepers of one Run, each with an arena of its own, and closes them whatever the test did."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._made: list[tuple[Keeper, ObjectStore]] = []

    def keeper(
        self,
        node_id: str,
        *,
        store: ObjectStore | None = None,
        sink: RecordingSink | None = None,
        config: CheckpointConfig | None = None,
        budget_bytes: int = 1 << 26,
        generation_budget_bytes: int = 1 << 26,
        key: bytes = KEY,
    ) -> Keeper:
        store = store or MemoryStore()
        keeper = Keeper(
            "run",
            node_id,
            store,
            sink or RecordingSink(),
            config or CheckpointConfig(encoding="raw"),
            self._directory / f"arena-{len(self._made)}",
            budget_bytes=budget_bytes,
            generation_budget_bytes=generation_budget_bytes,
            transport_key=key,
            resend_s=(0.001, 0.01),
        )
        self._made.append((keeper, store))
        return keeper

    def close(self) -> None:
        for keeper, store in self._made:
            if isinstance(store, GatedStore):
                store.open_gate()
            keeper.close()


def arrays(value: float, rows: int = 640) -> Arrays:
    """One of them not a multiple of 64 bytes, one of many rows, one without elements."""
    return {
        "bias": np.full((3,), value, dtype=np.float32),
        "weight": value + np.arange(rows * 1024, dtype=np.float32).reshape(rows, 1024),
        "nothing": np.zeros((0, 4), dtype=np.float32),
    }


def ask(
    keeper: KeeperPort,
    num_bytes: int,
    *,
    attempt: Attempt = FIRST,
    step: int,
    rank: int = 0,
    safe_step: int = -1,
    pid: int | None = None,
    run_id: str = "run",
) -> BufferLease | None:
    """Lease a buffer for a generation."""
    return keeper.lease_buffer(
        LeaseRequest(
            run_id=run_id,
            attempt=attempt,
            step=step,
            rank=rank,
            pid=pid or os.getpid(),
            num_bytes=num_bytes,
            is_generation=True,
            safe_step=safe_step,
        )
    )


def keep(
    keeper: KeeperPort,
    content: Arrays,
    *,
    attempt: Attempt = FIRST,
    step: int,
    rank: int = 0,
    world_size: int = 2,
    safe_step: int = -1,
    peer: TransportAddress | None = None,
    ship: bool = False,
    run_id: str = "run",
) -> BufferLease | None:
    """One whole Snapshot in memory; None when there was no buffer for it."""
    header, num_bytes = make_header(
        content, run_id=run_id, attempt=attempt, step=step, rank=rank, world_size=world_size
    )
    lease = ask(keeper, num_bytes, attempt=attempt, step=step, rank=rank, safe_step=safe_step, run_id=run_id)
    if lease is None:
        return None
    with map_buffer(lease.path, lease.num_bytes) as buffer:
        digest = fill(buffer, header, content)
    keeper.seal(replace(sealed(header, lease, digest), keep=True, ship=ship, peer=peer))
    return lease


def steps(keeper: Keeper, *, is_replica: bool, rank: int = 0) -> list[tuple[int, int]]:
    """Attempt and step of what is held whole."""
    held = keeper.memory_report().generations
    return sorted((g.attempt.number, g.step) for g in held if (g.is_replica, g.rank) == (is_replica, rank))


def manifest_of(*receipts: Receipt) -> Manifest:
    return merge_receipts(receipts, time_utc="", metadata={}, ledger=None)


def read_arrays(content: bytes, receipt: Receipt) -> Arrays:
    """What a raw Shard object holds, by the reader of all Shards."""
    index = read_index(lambda offset, length: content[offset : offset + length], receipt.shard, step=receipt.step)
    found = {}
    for chunk in index.chunks:
        if chunk.name in receipt.tensors:
            raw = bytearray()
            for number, frame in enumerate(chunk.frames):
                stored = content[frame.offset : frame.offset + frame.stored_bytes]
                raw += decode_frame(
                    chunk, number, stored, step=receipt.step, key=receipt.shard.key, rank=receipt.shard.rank
                )
            found[chunk.name] = np.frombuffer(bytes(raw), dtype=np.float32).reshape(chunk.sizes)
    return found

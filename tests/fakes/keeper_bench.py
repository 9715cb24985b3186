"""Makes real Keepers with a local-disk spool below one directory, and closes them whatever the test did."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import xxhash

from storage.config import CheckpointConfig, LocalDiskConfig
from storage.keeper import Keeper
from storage.keeper_protocol import ReceiptSink
from storage.keys import Attempt, StepKey, shard_key
from storage.manifest import Receipt
from storage.object_store import ObjectStore
from storage.spool_files import spool_directory
from tests.fakes.gated_store import GatedStore
from tests.fakes.snapshot_writer import Arrays, save

FIRST = Attempt(number=1, nonce="00000001")
SECOND = Attempt(number=2, nonce="00000002")
WAIT_S = 20.0
STATE_BYTES = 1 << 20


class Clock:
    """Moves only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class KeeperBench:
    """``run`` and ``node`` are the names of the Run and the node; each Keeper has an arena of its own."""

    def __init__(self, directory: Path, *, direct_io: bool = True) -> None:
        self.directory = directory
        self.config = self.with_quota(1 << 30, direct_io=direct_io)
        self._made: list[tuple[Keeper, ObjectStore]] = []

    def with_quota(self, max_bytes: int, *, direct_io: bool = True, keep_free_bytes: int = 0) -> CheckpointConfig:
        return CheckpointConfig(
            encoding="raw",
            local_disk=LocalDiskConfig(
                mode="on",
                directory=str(self.directory / "disk"),
                max_bytes=max_bytes,
                keep_free_bytes=keep_free_bytes,
                direct_io=direct_io,
            ),
        )

    @property
    def spool(self) -> Path:
        return spool_directory(self.config.local_disk, "run", "node")

    def keeper(
        self,
        store: ObjectStore,
        sink: ReceiptSink,
        config: CheckpointConfig | None = None,
        clock: Clock | None = None,
        retry_s: tuple[float, float] = (0.005, 0.02),
    ) -> Keeper:
        keeper = Keeper(
            "run",
            "node",
            store,
            sink,
            config or self.config,
            self.directory / f"arena-{len(self._made)}",
            clock or Clock(),
            budget_bytes=1 << 28,
            resend_s=(0.001, 0.01),
            retry_s=retry_s,
        )
        self._made.append((keeper, store))
        return keeper

    def close(self) -> None:
        for keeper, store in self._made:
            if isinstance(store, GatedStore):
                store.open_gate()
            keeper.close()


def state(value: float, num_bytes: int = STATE_BYTES) -> Arrays:
    return {"weight": np.full((num_bytes // 256, 64), value, dtype=np.float32)}


def key(step: int, rank: int = 0, attempt: Attempt = FIRST) -> str:
    return shard_key(StepKey(step=step, attempt=attempt), rank)


def shards_on(disk: Path) -> list[str]:
    return sorted(path.name for path in disk.glob("*.shard"))


def assert_proves(store: ObjectStore, receipt: Receipt, value: float) -> None:
    stored = store.get(receipt.shard.key)
    assert (receipt.shard.size, receipt.shard.digest) == (len(stored), xxhash.xxh3_128_hexdigest(stored))
    assert state(value)["weight"].tobytes() in stored


def save_waiting(keeper: Keeper, arrays: Arrays, *, attempt: Attempt = FIRST, step: int, rank: int = 0) -> None:
    """A save that waits for a buffer, as the last save of a Run does."""
    for _ in range(20_000):
        if save(keeper, arrays, attempt=attempt, step=step, rank=rank) is not None:
            return
        keeper.flush(0.001)
    raise AssertionError(f"no buffer for step {step}")


def wait_for_states(keeper: Keeper, disk: Path, number: int) -> None:
    """Return once ``number`` Shards are whole on the disk."""
    for _ in range(20_000):
        if len(list(disk.glob("*.shard.json"))) == number:
            return
        keeper.flush(0.001)
    raise AssertionError(f"{os.listdir(disk)}: {number} whole Shards expected")

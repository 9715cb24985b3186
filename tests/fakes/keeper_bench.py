"""Makes real Keepers with a local-disk spool below one directory, and closes them whatever the test did."""

from __future__ import annotations

from pathlib import Path

from storage.config import CheckpointConfig, LocalDiskConfig
from storage.keeper import Keeper
from storage.keeper_protocol import ReceiptSink
from storage.object_store import ObjectStore
from storage.spool import spool_directory
from tests.fakes.gated_store import GatedStore


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

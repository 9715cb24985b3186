"""A KeeperPort without Ray, Keeper or shared memory: encodes, stores and delivers while `seal` runs.

For one process on its own, and for tests. It keeps nothing in flight, so `seal` costs as long as the store takes, and
an error of the store reaches the caller.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from storage.buffer_map import map_buffer
from storage.config import CheckpointConfig
from storage.errors import StorageError
from storage.keeper_protocol import BufferLease, LeaseRequest, ReceiptSink, SealedSnapshot
from storage.object_store import ObjectStore
from storage.shipping import ship_snapshot

__all__ = ["DirectKeeper"]

logger = logging.getLogger(__name__)


class DirectKeeper:
    """One buffer file at a time, in a temporary directory that goes with this object."""

    def __init__(self, store: ObjectStore, sink: ReceiptSink, config: CheckpointConfig) -> None:
        self._store = store
        self._sink = sink
        self._config = config
        self._directory = tempfile.TemporaryDirectory(prefix="raysume-direct-")
        self._lock = threading.Lock()
        self._open: dict[str, BufferLease] = {}

    def __enter__(self) -> DirectKeeper:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._directory.cleanup()

    def lease_buffer(self, request: LeaseRequest) -> BufferLease | None:
        """A new file; None while an earlier one is neither sealed nor released."""
        with self._lock:
            if self._open:
                return None
            lease_id = secrets.token_hex(8)
            path = Path(self._directory.name) / f"buffer-{lease_id}"
            with path.open("wb") as file:
                file.truncate(request.num_bytes)
            lease = BufferLease(lease_id=lease_id, path=str(path), num_bytes=request.num_bytes)
            self._open[lease_id] = lease
            return lease

    def seal(self, snapshot: SealedSnapshot) -> None:
        """Make the Snapshot durable and deliver its Receipt. An error is reported as a given-up step, then raised."""
        with self._lock:
            lease = self._open.get(snapshot.lease_id)
        if lease is None:
            raise StorageError(
                f"rank {snapshot.rank} step {snapshot.step}: lease {snapshot.lease_id} is not open; lease anew"
            )
        try:
            with map_buffer(lease.path, snapshot.num_bytes) as buffer:
                receipt = ship_snapshot(snapshot, buffer, self._store, self._config, time.monotonic)
        except StorageError as error:
            self._sink.report_failed(snapshot.attempt, snapshot.step, snapshot.rank, str(error))
            raise
        finally:
            self.release([snapshot.lease_id])
        if not self._sink.deliver(receipt):
            raise StorageError(f"rank {snapshot.rank} step {snapshot.step}: the Receipt was not taken")

    def release(self, lease_ids: Sequence[str]) -> None:
        """Remove the files of these leases."""
        with self._lock:
            for lease in [lease for lease_id in lease_ids if (lease := self._open.pop(lease_id, None))]:
                with contextlib.suppress(FileNotFoundError):
                    Path(lease.path).unlink()

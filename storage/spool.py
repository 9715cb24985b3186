"""The local-disk Tier of one node for one Run: encoded Shards on their way to the store, and the newest ones kept.

Beside each Shard file lies its state, written after it: a Shard without one is of a save that died half-way, and goes
at the next start. What is uploaded, and in which order, is the Keeper's concern.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from storage.config import LocalDiskConfig
from storage.direct_io import TEMPORARY, DiskFull, FileWriter, check_room, free_bytes, new_file, sync_folder
from storage.errors import StorageError
from storage.keys import parse_shard_key
from storage.manifest import Receipt
from storage.spool_files import (
    SHARD,
    STATE,
    SpoolBusy,
    drop_copy,
    key_of_file,
    lock_directory,
    make_directory,
    remove_spool,
    spool_directory,
    spool_file,
    state_file,
    sweep_dead_nodes,
)

__all__ = ["Spool", "SpoolEntry", "open_spool"]

logger = logging.getLogger(__name__)

_LEAST_ROOM: Final = 256 << 20  # below this `auto` does without
_KEPT_STEPS: Final = 2  # uploaded steps kept to be read from: the newest, and one more should that be unusable


class _State(BaseModel):
    """What lies beside a Shard. ``receipt`` is true only once ``is_uploaded``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = 1
    receipt: Receipt
    is_uploaded: bool = False
    is_acknowledged: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolEntry:
    """One Shard on this disk. Its Receipt is a proof only once ``is_uploaded``."""

    receipt: Receipt
    is_uploaded: bool = False
    is_acknowledged: bool = False

    @property
    def key(self) -> str:
        return self.receipt.shard.key

    @property
    def size(self) -> int:
        return self.receipt.shard.size


def open_spool(config: LocalDiskConfig, store_url: str, run_id: str, node_id: str) -> Spool | None:
    """The node's spool, or None where the settings or the disk say to do without. ``mode: on`` never gives None."""
    if config.mode == "off" or (config.mode == "auto" and store_url.startswith(("file://", "memory://"))):
        return None
    try:
        spool = Spool(spool_directory(config, run_id, node_id), config, run_id=run_id)
        try:
            if config.mode == "auto":
                check_room(spool.directory, min(_LEAST_ROOM, config.max_bytes), config.keep_free_bytes)
        except DiskFull:
            if not spool.entries():  # what a Keeper before this one left is uploaded all the same
                spool.close(remove=True)
                raise
    except (OSError, StorageError) as error:
        if config.mode == "on" or isinstance(error, SpoolBusy):
            raise StorageError(f"the local-disk Tier cannot be used: {error}") from error
        logger.warning("no local-disk Tier on node %s, Shards stay in memory until uploaded: %s", node_id, error)
        return None
    return spool


class Spool:
    """Owns the directory while it lives. Thread-safe; nothing is written or removed while its lock is held."""

    def __init__(
        self,
        directory: Path,
        config: LocalDiskConfig,
        *,
        run_id: str,
        free: Callable[[Path], int] = free_bytes,
    ) -> None:
        self.directory = directory
        self._config, self._run_id, self._free = config, run_id, free
        self._mutex = threading.Lock()
        self._entries: dict[str, SpoolEntry] = {}
        self._reserved = 0
        make_directory(directory, is_base_ours=config.directory is None)
        self._lock = lock_directory(directory)
        sweep_dead_nodes(directory)
        for entry in self._found():
            self._entries[entry.key] = entry

    @property
    def used_bytes(self) -> int:
        """Bytes of all Shards here and of those being written."""
        with self._mutex:
            return self._reserved + sum(entry.size for entry in self._entries.values())

    def entries(self) -> tuple[SpoolEntry, ...]:
        """All Shards here, in the order of Attempt, step and rank."""
        with self._mutex:
            return tuple(sorted(self._entries.values(), key=_order))

    @property
    def has_unsent(self) -> bool:
        """Whether a Shard here is not uploaded, or its Receipt still to be acknowledged."""
        return len(self._settled()) < len(self.entries())

    def add(self, key: str, need: int, write: Callable[[FileWriter], Receipt]) -> SpoolEntry:
        """Write one Shard through ``write`` and then its state. ``need``: the most bytes it can take.

        Uploaded Shards go, oldest first, where room is short; raises DiskFull where that is not enough.
        """
        path = spool_file(self.directory, key)
        self._reserve(need)
        try:
            with new_file(path, direct=self._config.direct_io) as file:
                receipt = write(file)
            entry = SpoolEntry(receipt=receipt)
            if receipt.shard.key != key:
                raise StorageError(f"the Shard written to {path} is {receipt.shard.key}, expected {key}")
            self._write_state(entry)
        except BaseException:
            path.unlink(missing_ok=True)  # without a state it is nothing, and would only take room
            raise
        finally:
            with self._mutex:
                self._reserved -= need
        with self._mutex:
            self._entries[key] = entry
        return entry

    @contextmanager
    def open(self, key: str) -> Iterator[memoryview]:
        """The Shard's bytes, mapped: pages come in as they are read, so no whole Shard is ever in memory."""
        path = spool_file(self.directory, key)
        try:
            with path.open("rb") as file:
                mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise StorageError(f"the Shard {key} cannot be read from {path}: {error}") from error
        mapping.madvise(mmap.MADV_SEQUENTIAL)
        view = memoryview(mapping)
        try:
            yield view
        finally:
            # An error that is on its way may still hold a slice of it; then the mapping goes with the error.
            with contextlib.suppress(BufferError):
                view.release()
                mapping.close()

    def mark_uploaded(self, key: str, receipt: Receipt) -> None:
        """The Shard is in the store: its Receipt holds, and its file may go when room is short."""
        self._change(key, lambda entry: replace(entry, receipt=receipt, is_uploaded=True))

    def mark_acknowledged(self, key: str) -> None:
        """The coordinator has the Receipt. Older uploaded steps go: newer ones are read in their place."""
        self._change(key, lambda entry: replace(entry, is_acknowledged=True))
        for stale in self._stale():
            self.drop(stale)

    def drop(self, key: str) -> None:
        """Remove one Shard; unknown ones are no error."""
        drop_copy(self.directory, key)
        with self._mutex:
            self._entries.pop(key, None)

    def close(self, *, remove: bool) -> None:
        """Let the directory go; with ``remove`` what this class wrote there too, and the directory when that is all."""
        if remove:
            remove_spool(self.directory)
            with self._mutex:
                self._entries.clear()
        os.close(self._lock)

    def _reserve(self, need: int) -> None:
        """Book ``need`` bytes, evicting for it; raises DiskFull and books nothing when that does not help."""
        while True:
            with self._mutex:
                used = self._reserved + sum(entry.size for entry in self._entries.values())
                usable = min(
                    self._config.max_bytes - used,
                    self._free(self.directory) - self._config.keep_free_bytes - self._reserved,
                )
                if need <= usable:
                    self._reserved += need
                    return
                evictable = sorted((e for e in self._entries.values() if e.is_uploaded), key=_order)
            if not evictable:
                raise DiskFull(str(self.directory), need, max(0, usable))
            self.drop(evictable[0].key)

    def _settled(self) -> list[SpoolEntry]:
        """Those of which nobody waits to hear: Receipts of an Attempt that is over are refused for good."""
        entries = self.entries()
        newest = max((entry.receipt.attempt.number for entry in entries), default=0)
        return [e for e in entries if e.is_uploaded and (e.is_acknowledged or e.receipt.attempt.number < newest)]

    def _stale(self) -> list[str]:
        settled = self._settled()
        steps = sorted({entry.receipt.step_key for entry in settled}, key=lambda key: (key.attempt.number, key.step))
        kept = set(steps[-_KEPT_STEPS:])
        return [entry.key for entry in settled if entry.receipt.step_key not in kept]

    def _change(self, key: str, change: Callable[[SpoolEntry], SpoolEntry]) -> None:
        with self._mutex:
            entry = self._entries.get(key)
            if entry is None:  # evicted meanwhile
                return
            self._entries[key] = entry = change(entry)
        self._write_state(entry)

    def _write_state(self, entry: SpoolEntry) -> None:
        path = spool_file(self.directory, entry.key)
        state = _State(receipt=entry.receipt, is_uploaded=entry.is_uploaded, is_acknowledged=entry.is_acknowledged)
        with new_file(state_file(path), direct=False) as file:
            file.write(state.model_dump_json().encode())

    def _found(self) -> list[SpoolEntry]:
        """What a Keeper before this one left whole; its half-written files are removed."""
        for temporary in self.directory.glob(f"{TEMPORARY}*"):
            temporary.unlink(missing_ok=True)
        found: list[SpoolEntry] = []
        for path in self.directory.glob(f"*{SHARD}"):
            if parse_shard_key(key_of_file(path)) is None:
                continue
            entry = self._read_entry(path)
            if entry is None:
                state_file(path).unlink(missing_ok=True)
                path.unlink(missing_ok=True)
            else:
                found.append(entry)
        for state in self.directory.glob(f"*{SHARD}{STATE}"):
            shard = state.with_name(state.name.removesuffix(STATE))
            if parse_shard_key(key_of_file(shard)) is not None and not shard.exists():
                state.unlink(missing_ok=True)
        sync_folder(self.directory)
        return found

    def _read_entry(self, path: Path) -> SpoolEntry | None:
        try:
            state = _State.model_validate_json(state_file(path).read_bytes())
        except (FileNotFoundError, ValidationError) as error:
            logger.warning("%s is of a save that died before it was whole; removed (%s)", path, type(error).__name__)
            return None
        record = state.receipt.shard
        expected = (self._run_id, key_of_file(path), path.stat().st_size)
        if (state.receipt.run_id, record.key, record.size) != expected:
            logger.warning("%s is not the Shard that its state describes; removed", path)
            return None
        return SpoolEntry(receipt=state.receipt, is_uploaded=state.is_uploaded, is_acknowledged=state.is_acknowledged)


def _order(entry: SpoolEntry) -> tuple[int, int, int]:
    return entry.receipt.attempt.number, entry.receipt.step, entry.receipt.shard.rank

"""Where the Shards of a node's local disk lie: folder and file names, who owns the folder, how it is removed.

What is written there, and when it may go, is storage.spool's concern; readers need no more than this.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Final

from storage.config import LocalDiskConfig
from storage.direct_io import TEMPORARY, sync_folder
from storage.errors import StorageError
from storage.keys import SHARDS, parse_shard_key

__all__ = [
    "LOCK",
    "SHARD",
    "STATE",
    "SpoolBusy",
    "drop_copy",
    "key_of_file",
    "lock_directory",
    "make_directory",
    "remove_spool",
    "spool_directory",
    "spool_file",
    "state_file",
    "sweep_dead_nodes",
]

LOCK: Final = ".lock"
SHARD: Final = ".shard"
STATE: Final = ".json"
_SAFE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")
_TRIES: Final = 16
_DEAD_AFTER_S: Final = 600.0  # a Keeper that died on a living node has a successor long before


class SpoolBusy(StorageError):
    """Another living process holds the directory."""


def spool_directory(config: LocalDiskConfig, run_id: str, node_id: str) -> Path:
    """Where the Shards of ``run_id`` lie on this node; the same path for every process on it."""
    for name in (run_id, node_id):
        if _SAFE_NAME.match(name) is None:
            raise ValueError(f"{name!r} cannot be part of a spool's directory name")
    default = Path(tempfile.gettempdir()) / f"raysume-spool-{os.geteuid()}"
    return (default if config.directory is None else Path(config.directory)) / run_id / node_id


def spool_file(directory: Path, key: str) -> Path:
    """The file that holds the Shard of object name ``key``. Raises ValueError for any other name."""
    if parse_shard_key(key) is None:
        raise ValueError(f"{key!r} is not the name of a Shard object")
    return directory / key.removeprefix(SHARDS).replace("/", ".")


def drop_copy(directory: Path, key: str) -> None:
    """Remove the Shard of object name ``key`` from the disk; none there is no error."""
    path = spool_file(directory, key)
    state_file(path).unlink(missing_ok=True)  # first: a Shard without a state is nothing
    path.unlink(missing_ok=True)


def remove_spool(directory: Path) -> None:
    """Remove what a Spool wrote in ``directory``, and the folders when that was all. For a node that is no more."""
    if not directory.is_dir():
        return
    for path in directory.iterdir():
        shard = path.with_name(path.name.removesuffix(STATE))
        if path.name == LOCK or path.name.startswith(TEMPORARY) or parse_shard_key(key_of_file(shard)) is not None:
            path.unlink(missing_ok=True)
    for folder in (directory, directory.parent):
        with contextlib.suppress(OSError):  # other files, or other nodes of one machine, are in it
            folder.rmdir()


def sweep_dead_nodes(directory: Path) -> None:
    """Remove the spools of the same Run beside ``directory`` that nobody holds or has touched for long. A cluster that
    is started again on this machine gives its nodes new names, so that no Keeper would ever come back to them."""
    for other in directory.parent.iterdir():
        with contextlib.suppress(OSError, SpoolBusy):  # in use, or removed by itself meanwhile
            if other == directory or other.is_symlink() or not (other / LOCK).is_file():
                continue
            touched_s = max(path.stat().st_mtime for path in (other, *other.iterdir()))
            if time.time() - touched_s < _DEAD_AFTER_S:
                continue
            lock = lock_directory(other)
            try:
                remove_spool(other)
            finally:
                os.close(lock)


def state_file(shard: Path) -> Path:
    """The file of a Shard's state, beside the Shard's own."""
    return shard.with_name(shard.name + STATE)


def key_of_file(path: Path) -> str:
    """The inverse of `spool_file`; not a Shard's name for a file of somebody else."""
    parts = path.name.split(".")
    return f"{SHARDS}{'/'.join(parts[:-1])}.{parts[-1]}"


def make_directory(directory: Path, *, is_base_ours: bool) -> None:
    """The directory and those above it, our own levels closed to other users."""
    run, base = directory.parent, directory.parent.parent
    base.parent.mkdir(parents=True, exist_ok=True)
    ours = (base, run, directory) if is_base_ours else (run, directory)
    for _ in range(_TRIES):
        try:
            base.mkdir(exist_ok=True, mode=0o700)
            for folder in ours:
                folder.mkdir(mode=0o700, exist_ok=True)
                if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                    raise StorageError(f"spool {folder} belongs to somebody else; choose another directory")
        except FileNotFoundError:  # another node of this machine removed the Run's folder, empty, in between
            continue
        _sync_above(directory)
        return
    raise StorageError(f"spool {directory} is removed again and again; choose another directory")


def _sync_above(directory: Path) -> None:
    """Make the name of ``directory`` durable, and of those above it up to the mount point: any may be new."""
    for folder in directory.parents:
        with contextlib.suppress(PermissionError):  # the higher ones may not be ours to read
            sync_folder(folder)
        if os.path.ismount(folder):
            return


def lock_directory(directory: Path) -> int:
    """Held until closed, or until this process ends, however it ends."""
    descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise SpoolBusy(f"spool {directory} is in use by a living Keeper; end that one first") from error
    return descriptor

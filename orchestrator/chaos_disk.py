"""A small disk of a local node's own, and filling it to the last byte.

The disk is a tmpfs of a fixed size over the node's directory, so that a full one is full for that node alone. Mounts
and directories of processes that were killed are found by the owner's name in them.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from orchestrator.errors import SupervisorError
from orchestrator.ownership import is_ownerless, owner_tag

__all__ = ["DiskFill", "make_nodes_root", "mount_disk", "remove_stale_disks", "unmount_disks", "why_no_disks"]

_log = logging.getLogger(__name__)
_PREFIX: Final = "raysume-nodes-"
_OWNER: Final = "owner"
_CHUNK_BYTES: Final = 1 << 24
_MOUNT_S: Final = 10.0


def make_nodes_root() -> Path:
    """A new directory for the disks of this process's nodes."""
    root = Path(tempfile.mkdtemp(prefix=_PREFIX))
    # Not in its name: the paths of sockets below may have 107 characters.
    (root / _OWNER).write_text(f"{owner_tag()} {_pid_namespace()}")
    return root


def _pid_namespace() -> str:
    """Within which a pid means a process; containers may share a directory for temporary files, and no pids."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return "unknown"


def mount_disk(directory: Path, size_bytes: int) -> None:
    """Give ``directory`` a file system of its own of ``size_bytes``. SupervisorError where that is not allowed."""
    options = f"size={size_bytes},mode=0700"
    command = ["mount", "-t", "tmpfs", "-o", options, "raysume-node", str(directory)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_MOUNT_S, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise SupervisorError(f"no disk can be mounted at {directory}: {error}") from error
    if done.returncode != 0:
        raise SupervisorError(f"no disk can be mounted at {directory} (are you root?): {done.stderr.strip()}")


def why_no_disks() -> str | None:
    """Why no disk can be mounted on this machine; None when one can."""
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as name:
        try:
            mount_disk(Path(name), 1 << 20)
        except SupervisorError as error:
            return str(error)
        unmount_disks(Path(name))
    return None


def unmount_disks(below: Path) -> None:
    """Unmount everything at or below ``below``, in use or not."""
    for mount in reversed(_mounts()):
        if mount == below or below in mount.parents:
            # Lazily: a process of a killed node may still be on its way out.
            done = subprocess.run(["umount", "-l", str(mount)], capture_output=True, text=True, check=False)
            if done.returncode != 0:
                _log.warning("%s is still mounted: %s", mount, done.stderr.strip())


def remove_stale_disks() -> None:
    """Remove the directories of nodes whose owner was killed, and unmount the disks in them."""
    beside = Path(tempfile.gettempdir()).glob(f"{_PREFIX}*")
    for root in sorted({*beside, *(mount.parent for mount in _mounts() if mount.parent.name.startswith(_PREFIX))}):
        if _is_stale(root):
            _log.warning("removing %s, whose owner is gone", root)
            unmount_disks(root)
            shutil.rmtree(root, ignore_errors=True)


def _is_stale(root: Path) -> bool:
    """Whether ``root`` is of this user, and of a process that would be seen here if it still ran."""
    try:
        is_ours = root.lstat().st_uid == os.geteuid() and root.is_dir() and not root.is_symlink()
        words = (root / _OWNER).read_text().split() if is_ours else []
    except OSError:  # another one removes it, or it was killed before it said whose this is
        return False
    return len(words) == 2 and words[1] == _pid_namespace() and is_ownerless(words[0])


def _mounts() -> list[Path]:
    lines = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    return [Path(line.split()[1].replace("\\040", " ")) for line in lines]


class DiskFill:
    """Takes every free byte of the file system that ``directory`` is on, until `close`."""

    def __init__(self, directory: Path) -> None:
        if not os.path.ismount(directory):
            raise SupervisorError(f"{directory} is not a disk of its own: filling it would fill the whole machine's")
        self._path = directory / "full"
        self.filled_bytes = 0
        descriptor = os.open(self._path, os.O_CREAT | os.O_WRONLY, 0o600)
        try:
            step_bytes = _CHUNK_BYTES
            while step_bytes >= 4096:
                try:
                    os.posix_fallocate(descriptor, self.filled_bytes, step_bytes)
                    self.filled_bytes += step_bytes
                except OSError:  # no room for so much: try for less, down to a page
                    step_bytes //= 2
        finally:
            os.close(descriptor)
        state = os.statvfs(directory)
        self.free_bytes = state.f_bavail * state.f_frsize

    def close(self) -> None:
        """Give everything back."""
        self._path.unlink(missing_ok=True)

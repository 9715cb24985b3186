"""Disks of nodes and filling them. Real: tmpfs mounts, where this machine allows them."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.chaos_disk import (
    DiskFill,
    make_nodes_root,
    mount_disk,
    remove_stale_disks,
    unmount_disks,
    why_no_disks,
)
from orchestrator.errors import SupervisorError

SIZE_BYTES = 8 << 20
needs_mounts = pytest.mark.skipif(why_no_disks() is not None, reason="no disk can be mounted here")


@pytest.fixture
def root() -> Iterator[Path]:
    made = make_nodes_root()
    yield made
    unmount_disks(made)
    shutil.rmtree(made)


@pytest.fixture
def disk(root: Path) -> Path:
    directory = root / "node-1"
    directory.mkdir()
    mount_disk(directory, SIZE_BYTES)
    return directory


@needs_mounts
def test_a_full_disk_takes_no_byte_more_until_it_is_given_back(disk: Path) -> None:
    (disk / "before").write_bytes(b"x" * 4096)
    fill = DiskFill(disk)
    assert fill.filled_bytes > SIZE_BYTES // 2
    assert fill.free_bytes == 0
    with pytest.raises(OSError, match="No space left") as caught:
        (disk / "more").write_bytes(b"x" * 8192)
    assert caught.value.errno == errno.ENOSPC
    assert (disk / "before").read_bytes() == b"x" * 4096
    fill.close()
    (disk / "more").write_bytes(b"x" * 8192)
    fill.close()


def test_the_machines_own_disk_is_never_filled(tmp_path: Path) -> None:
    with pytest.raises(SupervisorError, match="would fill the whole machine's"):
        DiskFill(tmp_path)
    assert list(tmp_path.iterdir()) == []


@needs_mounts
def test_all_disks_below_a_root_go_with_it(root: Path, disk: Path) -> None:
    unmount_disks(root)
    assert not os.path.ismount(disk)


@needs_mounts
def test_disks_of_a_killed_process_are_removed_and_those_of_living_ones_are_not(disk: Path) -> None:
    code = (
        "import os, signal; from orchestrator.chaos_disk import *\n"
        "root = make_nodes_root(); (root / 'node-1').mkdir(); mount_disk(root / 'node-1', 1 << 20)\n"
        "print(root, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    left = Path(done.stdout.strip())
    assert os.path.ismount(left / "node-1"), done.stderr
    remove_stale_disks()
    assert not left.exists()
    assert os.path.ismount(disk)

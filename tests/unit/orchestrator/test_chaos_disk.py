"""Disks of nodes and filling them. Real: tmpfs mounts, where this machine allows them."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
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


def killed_owners_root(temporary: Path) -> Path:
    """What a process that was killed left below ``temporary``."""
    code = (
        "import os, signal; from orchestrator.chaos_disk import *\n"
        "root = make_nodes_root(); (root / 'node-1').mkdir(); (root / 'node-1' / 'file').write_text('x')\n"
        "print(root, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "TMPDIR": str(temporary)},
    )  # fmt: skip
    left = Path(done.stdout.strip())
    assert left.parent == temporary, done.stderr
    assert (left / "node-1" / "file").exists(), done.stderr
    return left


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_directories_of_a_killed_process_are_removed_where_no_disk_is_mounted_in_them(temporary: Path) -> None:
    left, own = killed_owners_root(temporary), make_nodes_root()
    nameless = temporary / "raysume-nodes-nameless"
    nameless.mkdir()
    remove_stale_disks()
    assert not left.exists()
    assert own.exists()
    assert nameless.exists()


def test_what_may_belong_to_a_process_that_cannot_be_seen_here_stays(temporary: Path) -> None:
    left = killed_owners_root(temporary)
    tag = (left / "owner").read_text().split()[0]
    for owner in (f"{tag} pid:[1]", tag):
        (left / "owner").write_text(owner)
        remove_stale_disks()
        assert (left / "node-1" / "file").exists()


def test_what_belongs_to_another_user_stays(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = killed_owners_root(temporary)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: left.stat().st_uid + 1)
        remove_stale_disks()
    assert left.exists()

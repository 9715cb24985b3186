"""The spool of one node: real files in the test's directory, a made-up amount of free space."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from storage.codec import digest128
from storage.config import LocalDiskConfig
from storage.direct_io import DiskFull, FileWriter
from storage.errors import StorageError
from storage.keys import Attempt, StepKey, shard_key
from storage.manifest import AttemptRecord, Receipt, ShardRecord
from storage.spool import Spool, open_spool
from storage.spool_files import remove_spool, spool_directory, spool_file

FIRST = Attempt(number=1, nonce="00000001")
MIB = 1 << 20


def key(step: int, rank: int = 0) -> str:
    return shard_key(StepKey(step=step, attempt=FIRST), rank)


def receipt_of(step: int, content: bytes, rank: int = 0) -> Receipt:
    shard = ShardRecord(
        rank=rank,
        key=key(step, rank),
        size=len(content),
        digest=digest128(content),
        index_bytes=1,
        index_digest="0" * 32,
    )
    return Receipt(run_id="run", step=step, attempt=AttemptRecord.of(FIRST), world_size=2, shard=shard, tensors={})


def writing(step: int, content: bytes, rank: int = 0) -> Callable[[FileWriter], Receipt]:
    def write(file: FileWriter) -> Receipt:
        file.write(content)
        return receipt_of(step, content, rank)

    return write


class Disk:
    """A directory with ``free`` bytes beside what the spool uses."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.free = 1 << 40
        self.spools: list[Spool] = []

    def spool(self, max_bytes: int = 8 * MIB, keep_free_bytes: int = 0) -> Spool:
        config = LocalDiskConfig(
            mode="on", directory=str(self.root), max_bytes=max_bytes, keep_free_bytes=keep_free_bytes
        )
        spool = Spool(spool_directory(config, "run", "node"), config, run_id="run", free=lambda _: self.free)
        self.spools.append(spool)
        return spool

    def add(self, spool: Spool, step: int, size: int = MIB, *, uploaded: bool = False, rank: int = 0) -> bytes:
        content = bytes([step % 256]) * size
        spool.add(key(step, rank), size, writing(step, content, rank))
        if uploaded:
            spool.mark_uploaded(key(step, rank), receipt_of(step, content, rank))
        return content


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path / "disk")
    yield disk
    for spool in disk.spools:
        spool.close(remove=True)


def steps(spool: Spool) -> list[int]:
    return [entry.receipt.step for entry in spool.entries()]


def reopened(disk: Disk) -> Spool:
    """As after a SIGKILL: nothing said, the lock gone with the process."""
    disk.spools.pop().close(remove=False)
    return disk.spool()


def test_what_was_added_is_read_back_and_found_again_with_its_state(disk: Disk) -> None:
    spool = disk.spool()
    content = disk.add(spool, 3)
    disk.add(spool, 4, uploaded=True)
    with spool.open(key(3)) as view:
        assert bytes(view) == content
    again = reopened(disk)
    assert [(e.receipt.step, e.is_uploaded, e.is_acknowledged) for e in again.entries()] == [
        (3, False, False),
        (4, True, False),
    ]
    assert again.entries()[0].receipt == receipt_of(3, content)
    assert again.used_bytes == 2 * MIB


def test_directories_are_closed_to_others_and_names_are_safe(disk: Disk) -> None:
    spool = disk.spool()
    disk.add(spool, 3)
    for folder in (spool.directory, spool.directory.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert spool_file(spool.directory, key(3)).parent == spool.directory
    for bad in ("../run", "", "a/b", ".hidden"):
        with pytest.raises(ValueError, match="cannot be part"):
            spool_directory(LocalDiskConfig(), bad, "node")
    with pytest.raises(ValueError, match="not the name of a Shard"):
        spool_file(spool.directory, "shards/../../etc/passwd")


@pytest.mark.parametrize("damage", ["no state", "no shard", "cut short", "nonsense", "of another run"])
def test_half_of_a_save_is_removed_at_the_next_start(disk: Disk, damage: str) -> None:
    spool = disk.spool()
    disk.add(spool, 3)
    disk.add(spool, 4)
    shard = spool_file(spool.directory, key(3))
    state = shard.with_name(shard.name + ".json")
    match damage:
        case "no state":
            state.unlink()
        case "no shard":
            shard.unlink()
        case "cut short":
            shard.write_bytes(b"short")
        case "nonsense":
            state.write_text("{")
        case _:
            state.write_text(state.read_text().replace('"run_id":"run"', '"run_id":"other"'))
    (spool.directory / ".raysume-tmp-0123").write_bytes(b"half")
    again = reopened(disk)
    assert steps(again) == [4]
    assert sorted(os.listdir(again.directory)) == sorted(
        [".lock", spool_file(again.directory, key(4)).name, spool_file(again.directory, key(4)).name + ".json"]
    )


def test_files_of_somebody_else_stay_whatever_happens(disk: Disk) -> None:
    spool = disk.spool()
    for name in ("notes.txt", "my.shard", "my.shard.json"):
        (spool.directory / name).write_text("mine")
    disk.add(spool, 3)
    again = reopened(disk)
    disk.spools.pop().close(remove=True)
    assert sorted(os.listdir(again.directory)) == ["my.shard", "my.shard.json", "notes.txt"]


def test_the_quota_evicts_the_oldest_uploaded_and_never_what_waits(disk: Disk) -> None:
    spool = disk.spool(max_bytes=4 * MIB)
    disk.add(spool, 1)
    for step in (2, 3, 4):
        disk.add(spool, step, uploaded=True)
    disk.add(spool, 5)
    disk.add(spool, 6)
    assert steps(spool) == [1, 4, 5, 6]
    disk.add(spool, 7)
    with pytest.raises(DiskFull) as raised:
        disk.add(spool, 8)
    assert (raised.value.path, raised.value.need, raised.value.free) == (str(spool.directory), MIB, 0)
    assert steps(spool) == [1, 5, 6, 7]
    assert spool.used_bytes == 4 * MIB


def test_space_that_must_stay_free_counts_like_the_quota(disk: Disk) -> None:
    spool = disk.spool(keep_free_bytes=10 * MIB)
    disk.add(spool, 1)
    disk.free = 10 * MIB + MIB // 2
    with pytest.raises(DiskFull, match=f"{MIB} bytes are needed, {MIB // 2} may be used"):
        disk.add(spool, 2)
    assert steps(spool) == [1]


def test_a_write_that_fails_leaves_nothing_and_books_nothing(disk: Disk) -> None:
    spool = disk.spool()

    def fail(file: FileWriter) -> Receipt:
        file.write(b"half of it")
        raise StorageError("the Snapshot is bad")

    with pytest.raises(StorageError, match="the Snapshot is bad"):
        spool.add(key(1), MIB, fail)
    assert os.listdir(spool.directory) == [".lock"]
    assert spool.used_bytes == 0


def test_two_uploaded_steps_are_kept_to_be_read_from(disk: Disk) -> None:
    spool = disk.spool()
    for step in (1, 2, 3):
        for rank in (0, 1):
            disk.add(spool, step, 1000, uploaded=True, rank=rank)
            spool.mark_acknowledged(key(step, rank))
    assert [(e.receipt.step, e.receipt.shard.rank) for e in spool.entries()] == [(2, 0), (2, 1), (3, 0), (3, 1)]
    assert not spool.has_unsent


def test_a_receipt_that_an_ended_attempt_never_delivered_keeps_no_shard(disk: Disk) -> None:
    spool = disk.spool()
    disk.add(spool, 1, uploaded=True)
    assert spool.has_unsent
    newer = Attempt(number=2, nonce="00000002")
    content = b"newer"
    receipt = receipt_of(2, content)
    name = shard_key(StepKey(step=2, attempt=newer), 0)
    receipt = receipt.model_copy(
        update={"attempt": AttemptRecord.of(newer), "shard": receipt.shard.model_copy(update={"key": name})}
    )

    def write(file: FileWriter) -> Receipt:
        file.write(content)
        return receipt

    spool.add(name, MIB, write)
    spool.mark_uploaded(name, receipt)
    spool.mark_acknowledged(name)
    assert not spool.has_unsent


def test_one_keeper_at_a_time(disk: Disk) -> None:
    disk.spool()
    with pytest.raises(StorageError, match="in use by a living Keeper"):
        disk.spool()


def test_a_directory_of_somebody_else_is_refused(disk: Disk, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    disk.root.mkdir()
    (disk.root / "run").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="belongs to somebody else"):
        disk.spool()


def test_closing_for_good_leaves_the_folders_of_other_nodes(disk: Disk) -> None:
    spool = disk.spool()
    (spool.directory.parent / "other-node").mkdir()
    disk.add(spool, 1)
    disk.spools.pop().close(remove=True)
    assert os.listdir(disk.root / "run") == ["other-node"]


def test_what_a_lost_node_left_can_be_removed_by_name(disk: Disk) -> None:
    spool = disk.spool()
    disk.add(spool, 1)
    (spool.directory / ".raysume-tmp-0123").write_bytes(b"half")
    disk.spools.pop().close(remove=False)
    (spool.directory / "notes.txt").write_text("mine")
    remove_spool(spool.directory)
    assert os.listdir(spool.directory) == ["notes.txt"]
    (spool.directory / "notes.txt").unlink()
    remove_spool(spool.directory)
    assert not spool.directory.parent.exists()
    remove_spool(spool.directory)


@pytest.mark.parametrize(
    ("mode", "url", "is_on"),
    [
        ("auto", "s3://bucket/run", True),
        ("auto", "file:///data/run", False),
        ("auto", "memory://run", False),
        ("off", "s3://bucket/run", False),
        ("on", "file:///data/run", True),
    ],
)
def test_which_runs_have_one(tmp_path: Path, mode: str, url: str, is_on: bool) -> None:
    config = LocalDiskConfig(mode=mode, directory=str(tmp_path), keep_free_bytes=0)
    spool = open_spool(config, url, "run", "node")
    assert (spool is not None) == is_on
    if spool is not None:
        spool.close(remove=True)


def test_auto_does_without_where_the_disk_is_too_full_and_on_refuses_to_start(tmp_path: Path) -> None:
    full = LocalDiskConfig(mode="auto", directory=str(tmp_path), keep_free_bytes=1 << 60)
    assert open_spool(full, "s3://bucket/run", "run", "node") is None
    assert os.listdir(tmp_path) == []
    blocked = tmp_path / "file"
    blocked.write_text("no directory")
    config = LocalDiskConfig(mode="on", directory=str(blocked))
    with pytest.raises(StorageError, match="the local-disk Tier cannot be used"):
        open_spool(config, "s3://bucket/run", "run", "node")


def test_what_nodes_of_a_dead_cluster_left_goes_and_what_a_living_or_unknown_one_has_stays(tmp_path: Path) -> None:
    config = LocalDiskConfig(mode="on", directory=str(tmp_path), keep_free_bytes=0)
    long_ago = time.time() - 3600.0

    def left_by(node: str, *, is_dead: bool, touched_s: float) -> Path:
        directory = spool_directory(config, "run", node)
        spool = Spool(directory, config, run_id="run")
        spool.add(key(10), MIB, writing(10, b"x" * 1000))
        if is_dead:
            spool.close(remove=False)
        for path in (*directory.iterdir(), directory):
            os.utime(path, (touched_s, touched_s))
        return directory

    dead = left_by("dead", is_dead=True, touched_s=long_ago)
    alive = left_by("alive", is_dead=False, touched_s=long_ago)
    replaced = left_by("replaced", is_dead=True, touched_s=time.time())
    foreign = tmp_path / "run" / "foreign"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    os.utime(foreign, (long_ago, long_ago))
    Spool(spool_directory(config, "run", "new"), config, run_id="run").close(remove=True)
    assert [path.exists() for path in (dead, alive, replaced, foreign / "notes.txt")] == [False, True, True, True]

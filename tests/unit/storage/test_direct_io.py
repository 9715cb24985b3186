"""Real files: the file system of the test's directory, and a tmpfs, which takes no O_DIRECT on older kernels."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest

from storage.direct_io import DiskFull, check_room, new_file
from storage.errors import StorageError

SIZES = [0, 1, 511, 4096, (4 << 20) - 1, 4 << 20, (4 << 20) + 1, (9 << 20) + 777]


def written(path: Path, content: bytes, *, direct: bool, piece: int = 100_003) -> bytes:
    with new_file(path, direct=direct) as file:
        for start in range(0, len(content), piece):
            file.write(memoryview(content)[start : start + piece])
    return path.read_bytes()


@pytest.mark.parametrize("size", SIZES)
def test_direct_and_buffered_writes_give_equal_files(tmp_path: Path, size: int) -> None:
    content = random.Random(size).randbytes(size)
    assert written(tmp_path / "direct", content, direct=True) == content
    assert written(tmp_path / "buffered", content, direct=False) == content
    assert sorted(os.listdir(tmp_path)) == ["buffered", "direct"]


@pytest.mark.parametrize("refusal", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_refuses_the_flag_at_open_gets_buffered_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int
) -> None:
    real_open = os.open

    def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(refusal, "no O_DIRECT here")
        return real_open(path, flags, mode)

    monkeypatch.setattr("storage.direct_io.os.open", refuse)
    content = random.Random(1).randbytes(5 << 20)
    with new_file(tmp_path / "file", direct=True) as file:
        assert not file.is_direct
        file.write(content)
    assert (tmp_path / "file").read_bytes() == content


def test_a_file_system_that_refuses_the_flag_at_the_first_write_gets_buffered_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_write, tries = os.write, []

    def refuse_once(descriptor: int, data: bytes) -> int:
        tries.append(len(data))
        if len(tries) == 1:
            raise OSError(errno.EINVAL, "not aligned enough")
        return real_write(descriptor, data)

    monkeypatch.setattr("storage.direct_io.os.write", refuse_once)
    content = random.Random(2).randbytes((8 << 20) + 5)
    assert written(tmp_path / "file", content, direct=True) == content
    assert len(tries) > 1


def test_writes_that_are_cut_short_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write = os.write

    def write_less(descriptor: int, data: memoryview) -> int:
        return real_write(descriptor, data[: max(1, len(data) // 2)])

    monkeypatch.setattr("storage.direct_io.os.write", write_less)
    content = random.Random(3).randbytes((4 << 20) + 1234)
    assert written(tmp_path / "file", content, direct=False) == content


def test_an_error_in_between_leaves_neither_the_file_nor_a_temporary_one(tmp_path: Path) -> None:
    def half(path: Path) -> None:
        with new_file(path) as file:
            file.write(b"half")
            raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        half(tmp_path / "file")
    assert os.listdir(tmp_path) == []


def test_a_new_file_replaces_the_old_one_only_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with new_file(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"


def test_a_full_disk_is_named_with_what_was_needed_and_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("storage.direct_io.os.write", full)
    with pytest.raises(DiskFull, match="5 bytes are needed") as raised, new_file(tmp_path / "file") as file:
        file.write(b"bytes")
    assert (raised.value.path, raised.value.need) == (str(tmp_path / "file"), 5)
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_not_there_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be written"), new_file(tmp_path / "no" / "file"):
        pass


def test_room_is_checked_against_what_must_stay_free(tmp_path: Path) -> None:
    check_room(tmp_path, 60, 40, free=lambda _: 100)
    with pytest.raises(DiskFull) as raised:
        check_room(tmp_path, 61, 40, free=lambda _: 100)
    assert (raised.value.need, raised.value.free) == (61, 60)

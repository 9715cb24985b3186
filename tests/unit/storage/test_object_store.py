"""The conformance suite on memory, local files and fsspec's own memory; then what is special to local files.

Real: the file system. A lost process is played by an exception out of the middle of a write.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import threading
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from storage.config import StoreConfig
from storage.deadlines import Patience, call_within
from storage.errors import ObjectMissing, StoreRefused, StoreUnavailable
from storage.fsspec_store import FsspecStore, url_without_credentials
from storage.local_store import LocalStore
from storage.memory_store import MemoryStore
from storage.object_store import ObjectStore
from storage.open_store import open_store
from storage.s3_store import part_bytes
from tests.unit.storage.object_store_conformance import ObjectStoreConformance


class TestConformance(ObjectStoreConformance):
    @pytest.fixture(params=["memory", "local", "fsspec", "retrying"])
    def store(self, request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
        match request.param:
            case "memory":
                return MemoryStore("conformance")
            case "local":
                return LocalStore(tmp_path / "run")
            case "fsspec":
                return FsspecStore(f"memory://{secrets.token_hex(8)}/run")
            case _:
                return open_store(f"file://{tmp_path}/run", StoreConfig(retries=0))


class TestFsspecFileConformance(ObjectStoreConformance):
    creates_are_atomic = False  # fsspec offers no create-only write for files; LocalStore is the one for them

    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        return FsspecStore(f"file://{tmp_path}/run")


class _DropsOut(BaseException):
    """Stands for the death of the process."""


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_write_that_dies_leaves_the_older_object_and_no_listed_remains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    store = LocalStore(tmp_path)
    store.put("commits/1", b"old")

    def die(*_: object) -> None:
        raise _DropsOut

    with monkeypatch.context() as patch:
        patch.setattr(os, function, die)
        patch.setattr(Path, "unlink", lambda *_, **__: None)  # a dead process cleans nothing up
        with pytest.raises(_DropsOut):
            store.put("commits/1", b"new")
    assert store.get("commits/1") == b"old"
    assert [entry.key for entry in store.list("")] == ["commits/1"]
    assert len(list((tmp_path / "commits").iterdir())) == 2


def test_file_and_folder_are_synced_before_a_put_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = os.fsync

    def record(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    LocalStore(tmp_path / "run").put("commits/1", b"x")
    assert Path(synced[0]).parent == tmp_path / "run" / "commits"
    assert synced[1:4] == [str(tmp_path / "run" / "commits"), str(tmp_path / "run"), str(tmp_path)]


def test_a_full_disk_is_an_unavailable_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreUnavailable, match="No space left"):
        LocalStore(tmp_path).put("k", b"x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("method", ["put", "create"])
def test_a_root_that_cannot_be_made_is_refused_at_once_with_the_reason(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store("/proc/raysume-run")  # even the superuser makes no directory there
    with pytest.raises(StoreRefused, match=r"/proc/raysume-run/lease cannot be created or written: .*No such file"):
        getattr(store, method)("lease/1", b"x")
    assert not [entry for entry in caplog.records if entry.levelno >= logging.WARNING], "nothing was tried again"


@pytest.mark.parametrize("method", ["put", "create"])
@pytest.mark.parametrize("under", ["run", "run/deeper"])
def test_a_root_that_is_a_file_or_below_one_takes_no_object(tmp_path: Path, method: str, under: str) -> None:
    (tmp_path / "run").write_text("not a folder")
    with pytest.raises(StoreRefused, match="cannot be created or written"):
        getattr(LocalStore(tmp_path / under), method)("k", b"x")


@pytest.mark.parametrize(
    ("number", "is_final"),
    [*((number, True) for number in (errno.EACCES, errno.EPERM, errno.EROFS)), (errno.ENOSPC, False)],
)
def test_a_refused_directory_is_final_and_a_full_disk_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_final: bool
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "mkdir", fail)
    with pytest.raises(StoreUnavailable, match=os.strerror(number)) as caught:
        LocalStore(tmp_path / "run").put("k", b"x")
    assert isinstance(caught.value, StoreRefused) == is_final


def test_a_folder_swept_away_while_it_is_made_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mkdir = Path.mkdir
    failures = [FileNotFoundError(errno.ENOENT, "swept"), FileExistsError(errno.EEXIST, "swept")]

    def swept(self: Path, *args: object, **options: object) -> None:
        if failures:
            raise failures.pop()
        mkdir(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", swept)
    LocalStore(tmp_path / "run").create("a/k", b"x")
    assert LocalStore(tmp_path / "run").get("a/k") == b"x"


@pytest.mark.parametrize("url", ["s3x://bucket/run", "simplecache::s3x://bucket/run"])
def test_an_unknown_protocol_is_refused_at_once(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(StoreRefused, match="protocol s3x:// is not known; known are file, s3, gs, az, memory"):
        open_store(url).list("commits/")
    assert not [entry for entry in caplog.records if entry.levelno >= logging.WARNING], "nothing was tried again"


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("", "expected a directory or a URL"),
        (" ", "expected a directory or a URL"),
        ("a\0b", "expected a directory or a URL"),
        ("s3:/bucket/run", "is s3://bucket/run meant"),
        ("file:/tmp/run", "is file:///tmp/run meant"),
        ("https://127.0.0.1:9/run", "web servers can be neither listed nor written to"),
        ("~nobody-of-that-name/run", "write ./~nobody"),
    ],
)
def test_a_slip_in_a_url_is_refused_instead_of_taken_for_a_new_place(url: str, told: str) -> None:
    with pytest.raises(StoreRefused, match=told):
        open_store(url)


def test_a_tilde_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_store("~/run").url == f"file://{tmp_path}/run"


def test_a_protocol_whose_package_is_missing_is_refused_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> None:
        raise ImportError("install gcsfs")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    with pytest.raises(StoreRefused, match=r"protocol gs:// needs a package .*: install gcsfs"):
        open_store("gs://bucket/run").get("k")


def test_a_root_that_is_a_file_is_refused_not_empty(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("not a folder")
    with pytest.raises(StoreRefused, match="not a directory"):
        LocalStore(tmp_path / "run").list("commits/")


def test_pipes_and_links_to_nothing_or_to_themselves_are_no_objects(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("commits/a", b"x")
    (tmp_path / "commits/lost").symlink_to("nowhere")
    (tmp_path / "commits/self").symlink_to("self")
    os.mkfifo(tmp_path / "commits/pipe")
    assert [entry.key for entry in store.list("")] == ["commits/a"]


def test_a_root_whose_name_is_too_long_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(StoreRefused, match="File name too long"):
        open_store(str(tmp_path / ("x" * 300))).list("commits/")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_folder_is_refused_not_empty(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("commits/1", b"x")
    (tmp_path / "commits").chmod(0)
    try:
        with pytest.raises(StoreRefused, match="access denied"):
            store.list("commits/")
    finally:
        (tmp_path / "commits").chmod(0o700)


def test_a_denied_listing_is_refused_not_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    store.put("commits/1", b"x")

    def deny(_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", deny)
    with pytest.raises(StoreRefused, match="access denied"):
        store.list("commits/")


def test_deleting_the_last_object_removes_its_empty_folders(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("shards/step-1/a/x", b"1")
    store.delete(["shards/step-1/a/x"])
    assert list(tmp_path.iterdir()) == []


def test_a_call_that_never_returns_is_given_up_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    filesystem = fsspec.filesystem("memory")
    monkeypatch.setattr(type(filesystem), "pipe_file", lambda *_, **__: release.wait(60))
    try:
        with pytest.raises(StoreUnavailable, match=r"no answer within 0\.05 s"):
            FsspecStore("memory://stuck").put("k", b"x", deadline_s=0.05)
    finally:
        release.set()


def test_memory_urls_of_one_name_are_one_store() -> None:
    name = secrets.token_hex(8)
    open_store(f"memory://{name}").put("k", b"x")
    assert open_store(f"memory://{name}/").get("k") == b"x"
    with pytest.raises(ObjectMissing):
        open_store(f"memory://{name}-other").get("k")


def test_a_plain_path_and_its_file_url_are_one_store(tmp_path: Path) -> None:
    open_store(str(tmp_path)).put("k", b"x")
    assert open_store(f"file://{tmp_path}").get("k") == b"x"


def test_a_url_is_told_without_credentials() -> None:
    assert url_without_credentials("s3://key:secret@bucket/run/?token=1") == "s3://bucket/run"


@pytest.mark.parametrize("size", [1, 64 << 20, 100 << 30, 5 << 40])
def test_parts_grow_with_the_object_and_stay_below_ten_thousand(size: int) -> None:
    assert -(-size // part_bytes(size)) <= 10_000
    assert part_bytes(size) <= 5 << 30


@pytest.mark.parametrize("kind", [LocalStore, FsspecStore])
def test_what_interrupted_writes_left_is_removed_once_it_is_old_and_nothing_else(tmp_path: Path, kind: type) -> None:
    store = kind(f"{tmp_path}/run" if kind is LocalStore else f"file://{tmp_path}/run")
    store.put("shards/a/kept", b"x")
    folder = tmp_path / "run" / "shards" / "a"
    names = {
        "old": ".raysume-tmp-0123456789abcdef",
        "new": ".raysume-tmp-fedcba9876543210",
        "foreign": ".raysume-tmp-mine",
    }
    for name in names.values():
        (folder / name).write_bytes(b"half")
    for name in ("old", "foreign"):
        os.utime(folder / names[name], (1.0, 1.0))
    assert store.abort_uploads("other/", older_than_s=0.0) == 0
    assert store.abort_uploads("shards/", older_than_s=3600.0) == 1
    assert sorted(path.name for path in folder.iterdir()) == sorted([names["new"], names["foreign"], "kept"])
    assert store.abort_uploads("shards/", older_than_s=0.0) == 1
    assert store.get("shards/a/kept") == b"x"


def test_a_write_through_fsspec_that_fails_leaves_the_older_object_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FsspecStore(f"file://{tmp_path}/run")
    store.put("k", b"old")
    real = type(store._filesystem()).pipe_file

    def half(self: object, path: str, value: bytes, **options: object) -> None:
        real(self, path, value[: len(value) // 2], **options)
        raise OSError(errno.EIO, "injected")

    monkeypatch.setattr(type(store._filesystem()), "pipe_file", half)
    with pytest.raises(StoreUnavailable, match="injected"):
        store.put("k", b"newer")
    assert store.get("k") == b"old"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["k"]


@pytest.mark.parametrize("operation", ["put", "get", "list", "delete", "create", "get_range"])
def test_a_hung_mount_is_given_up_at_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    store = LocalStore(tmp_path / "run")
    store.put("a/k", b"old")
    release = threading.Event()
    function = {"put": "fsync", "create": "fsync", "list": "walk", "delete": "unlink"}.get(operation, "fstat")

    def hang(*_: object, **__: object) -> None:
        assert release.wait(60)
        raise OSError(errno.EIO, "the mount came back")

    calls: dict[str, Callable[[], object]] = {
        "put": lambda: store.put("a/k", b"new", deadline_s=0.1),
        "create": lambda: store.create("a/n", b"new", deadline_s=0.1),
        "get": lambda: store.get("a/k", deadline_s=0.1),
        "get_range": lambda: store.get_range("a/k", 0, 1, deadline_s=0.1),
        "list": lambda: store.list("a/", deadline_s=0.1),
        "delete": lambda: store.delete(["a/k"], deadline_s=0.1),
    }
    with monkeypatch.context() as patch:
        patch.setattr(os, function, hang)
        with pytest.raises(StoreUnavailable, match=r"no answer within 0\.1 s"):
            calls[operation]()
        release.set()
    assert store.get("a/k") == b"old"


def test_a_write_that_comes_back_late_does_not_replace_what_was_written_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path)
    release, is_over = threading.Event(), threading.Event()
    real_fsync, real_unlink = os.fsync, Path.unlink

    def hang(descriptor: int) -> None:
        assert release.wait(60)
        real_fsync(descriptor)

    def unlink(self: Path, missing_ok: bool = False) -> None:
        real_unlink(self, missing_ok=missing_ok)
        is_over.set()

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", hang)
        with pytest.raises(StoreUnavailable):
            store.put("k", b"stale", deadline_s=0.1)
    store.put("k", b"newer")
    monkeypatch.setattr(Path, "unlink", unlink)
    release.set()
    assert is_over.wait(30), "the late write cleans up after itself"
    assert store.get("k") == b"newer"
    assert [path.name for path in tmp_path.iterdir()] == ["k"]


def test_a_slow_file_system_that_moves_on_is_not_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chunk that gets through is a sign of life: a large read outlasts the deadline of a single wait."""
    beats: list[float] = []
    monkeypatch.setattr(Patience, "beat", lambda _, more_s=0.0: beats.append(more_s))
    store = LocalStore(tmp_path, min_bytes_per_s=1e6)
    store.put("large", bytes(40 << 20))
    assert max(beats) == pytest.approx(41.9, abs=0.1)
    beats.clear()
    assert len(store.get("large")) == 40 << 20
    assert len(beats) == 3


def test_a_call_in_a_thread_raises_what_it_raised_and_keeps_no_buffer() -> None:
    data = bytearray(100)
    with pytest.raises(ZeroDivisionError):
        call_within(lambda _: 1 // 0, 5.0)
    view = memoryview(data)
    assert call_within(lambda _, view=view: len(view), 5.0) == 100  # type: ignore[misc]
    view.release()
    assert call_within(lambda _: os.getpid(), 5.0) == os.getpid()
    data.extend(b"x")  # fails while anything holds a view of it


def test_an_endpoint_with_credentials_in_it_is_refused_without_repeating_them() -> None:
    with pytest.raises(ValueError, match="credentials do not belong") as caught:
        StoreConfig(endpoint_url="http://user:hunter2hunter2@host")
    assert "hunter2" not in str(caught.value)

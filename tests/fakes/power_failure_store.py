"""What a disk may hold after a power failure: a record of file calls, from which possible states are made by seed.

The model grants no more than POSIX does. Bytes are safe after fsync of their file, names after fsync of their folder.
Of everything else any part may be lost: single sectors of a write, a name without its file's bytes, the bytes without
the name, a removal that was later than another. A rename within one folder is one change.
"""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.fakes.os_tap import Call, tapped

__all__ = ["DiskRecord", "Mark", "materialise", "recording"]

SECTOR_BYTES = 512
TOP = 0


@dataclass(frozen=True, slots=True)
class Write:
    file: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Resize:
    file: int
    size: int


@dataclass(frozen=True, slots=True)
class Sync:
    node: int


@dataclass(frozen=True, slots=True)
class Names:
    """One change of names: each (folder, name) now leads to a node, or to none."""

    changes: tuple[tuple[int, str, int | None], ...]


@dataclass(frozen=True, slots=True)
class Mark:
    """Something the writer said at this moment, e.g. that a step is committed."""

    word: str
    value: int


Event = Write | Resize | Sync | Names | Mark


@dataclass
class DiskRecord:
    """All that happened below ``top``, an empty folder that is itself safe."""

    top: Path
    events: list[Event] = field(default_factory=list)
    folders: set[int] = field(default_factory=lambda: {TOP})
    honours_sync: bool = True
    _nodes: dict[int, int] = field(default_factory=dict)
    _next: int = TOP + 1

    def __post_init__(self) -> None:
        self._nodes[os.stat(self.top).st_ino] = TOP

    def mark(self, word: str, value: int) -> None:
        self.events.append(Mark(word, value))

    def __call__(self, call: Call, perform: Callable[[], Any]) -> Any:
        return getattr(self, f"_on_{call.name}", lambda _, perform: perform())(call, perform)

    def _is_inside(self, path: str) -> bool:
        return path.startswith(f"{self.top}/")

    def _node_of(self, path: str) -> int | None:
        try:
            return self._nodes.get(os.lstat(path).st_ino)
        except FileNotFoundError:
            return None

    def _place(self, path: str) -> tuple[int, str]:
        folder, _, name = path.rpartition("/")
        node = self._node_of(folder)
        assert node is not None, f"{folder} was not made under the eyes of this record"
        return node, name

    def _new_node(self, path: str) -> int:
        node, self._next = self._next, self._next + 1
        self._nodes[os.lstat(path).st_ino] = node
        return node

    def _on_open(self, call: Call, perform: Callable[[], Any]) -> Any:
        (path,) = call.paths
        existed = os.path.lexists(path)
        fd = perform()
        if self._is_inside(path) and not existed:
            self.events.append(Names(((*self._place(path), self._new_node(path)),)))
        elif self._is_inside(path) and call.flags & os.O_TRUNC:
            self.events.append(Resize(self._known(path), 0))
        return fd

    def _known(self, path: str) -> int:
        node = self._node_of(path)
        assert node is not None, path
        return node

    def _on_write(self, call: Call, perform: Callable[[], Any]) -> Any:
        node = self._nodes.get(os.fstat(call.fd).st_ino) if stat.S_ISREG(os.fstat(call.fd).st_mode) else None
        offset = os.lseek(call.fd, 0, os.SEEK_CUR) if node is not None and call.offset is None else call.offset
        written = perform()
        if node is not None and offset is not None:
            self.events.append(Write(node, offset, bytes(call.data[:written])))
        return written

    def _on_ftruncate(self, call: Call, perform: Callable[[], Any]) -> Any:
        result = perform()
        node = self._nodes.get(os.fstat(call.fd).st_ino)
        if node is not None:
            self.events.append(Resize(node, os.fstat(call.fd).st_size))
        return result

    _on_posix_fallocate = _on_ftruncate

    def _on_fsync(self, call: Call, perform: Callable[[], Any]) -> Any:
        result = perform()
        node = self._nodes.get(os.fstat(call.fd).st_ino)
        if node is not None and self.honours_sync:
            self.events.append(Sync(node))
        return result

    _on_fdatasync = _on_fsync

    def _on_mkdir(self, call: Call, perform: Callable[[], Any]) -> Any:
        result = perform()
        (path,) = call.paths
        if self._is_inside(path):
            node = self._new_node(path)
            self.folders.add(node)
            self.events.append(Names(((*self._place(path), node),)))
        return result

    def _on_unlink(self, call: Call, perform: Callable[[], Any]) -> Any:
        (path,) = call.paths
        place = self._place(path) if self._is_inside(path) and os.path.lexists(path) else None
        result = perform()
        if place:
            self.events.append(Names(((*place, None),)))
        return result

    _on_remove = _on_rmdir = _on_unlink

    def _on_rename(self, call: Call, perform: Callable[[], Any]) -> Any:
        source, target = call.paths
        node = self._node_of(source)
        old = (*self._place(source), None) if self._is_inside(source) else None
        result = perform()
        if self._is_inside(target):
            assert node is not None, source
            self.events.append(Names(((*self._place(target), node), *([old] if old else []))))
        return result

    _on_replace = _on_rename

    def _on_link(self, call: Call, perform: Callable[[], Any]) -> Any:
        source, target = call.paths
        result = perform()
        if self._is_inside(target):
            self.events.append(Names(((*self._place(target), self._known(source)),)))
        return result


@contextmanager
def recording(top: Path, *, honours_sync: bool = True) -> Iterator[DiskRecord]:
    """Record what this process does below ``top`` while the block runs; the calls really happen, too."""
    record = DiskRecord(top, honours_sync=honours_sync)
    with tapped(record):
        yield record


def materialise(record: DiskRecord, cut: int, seed: int, target: Path) -> list[Mark]:
    """Write to ``target`` one state that the disk may be in when power fails after ``cut`` events.

    Returns what had been said by then.
    """
    events = record.events[:cut]
    fate = _Fate(random.Random(seed))
    files = _contents(events, fate)
    tree = _names(events, fate)
    _write_folder(record, TOP, tree, files, target)
    return [event for event in events if isinstance(event, Mark)]


class _Fate:
    """Decides what of the unsynced survives; each seed leans another way."""

    def __init__(self, source: random.Random) -> None:
        self._source = source
        self._names, self._bytes = (source.choice((0.0, 0.1, 0.5, 0.9, 1.0)) for _ in range(2))

    def keeps_name(self) -> bool:
        return self._source.random() < self._names

    def keeps_sector(self) -> bool:
        return self._source.random() < self._bytes

    def of_write(self) -> Literal["kept", "lost", "torn", "zeros"]:
        if self._source.random() < self._bytes:
            return "kept"
        return self._source.choice(("lost", "torn", "zeros"))


def _contents(events: list[Event], fate: _Fate) -> dict[int, bytes]:
    safe: dict[int, bytearray] = {}
    pending: dict[int, list[Write | Resize]] = {}
    for event in events:
        if isinstance(event, Write | Resize):
            pending.setdefault(event.file, []).append(event)
        elif isinstance(event, Sync):
            for change in pending.pop(event.node, []):
                _apply(safe.setdefault(event.node, bytearray()), change)
    for file, changes in pending.items():
        for change in changes:
            _apply_in_part(safe.setdefault(file, bytearray()), change, fate)
    return {file: bytes(content) for file, content in safe.items()}


def _apply(content: bytearray, change: Write | Resize) -> None:
    size = change.size if isinstance(change, Resize) else max(len(content), change.offset + len(change.data))
    del content[size:]
    content.extend(bytes(size - len(content)))
    if isinstance(change, Write):
        content[change.offset : change.offset + len(change.data)] = change.data


def _apply_in_part(content: bytearray, change: Write | Resize, fate: _Fate) -> None:
    kind = fate.of_write()
    if kind == "lost":
        return
    if kind == "kept" or isinstance(change, Resize):
        _apply(content, change)
        return
    if kind == "zeros":  # the new length arrived, the bytes did not
        _apply(content, Resize(change.file, max(len(content), change.offset + len(change.data))))
        return
    for start in range(0, len(change.data), SECTOR_BYTES):
        if fate.keeps_sector():
            part = change.data[start : start + SECTOR_BYTES]
            _apply(content, Write(change.file, change.offset + start, part))


def _names(events: list[Event], fate: _Fate) -> dict[int, dict[str, int]]:
    last_sync = {event.node: number for number, event in enumerate(events) if isinstance(event, Sync)}
    tree: dict[int, dict[str, int]] = {}
    for number, event in enumerate(events):
        if not isinstance(event, Names):
            continue
        by_folder: dict[int, bool] = {}
        for folder, name, node in event.changes:
            if folder not in by_folder:
                by_folder[folder] = last_sync.get(folder, -1) > number or fate.keeps_name()
            if not by_folder[folder]:
                continue
            if node is None:
                tree.setdefault(folder, {}).pop(name, None)
            else:
                tree.setdefault(folder, {})[name] = node
    return tree


def _write_folder(
    record: DiskRecord, folder: int, tree: dict[int, dict[str, int]], files: dict[int, bytes], target: Path
) -> None:
    target.mkdir(parents=True)
    for name, node in tree.get(folder, {}).items():
        if node in record.folders:
            _write_folder(record, node, tree, files, target / name)
        else:
            (target / name).write_bytes(files.get(node, b""))

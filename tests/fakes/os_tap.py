"""A tap on this process's file and socket calls: a hook sees each one with its bytes, and performs it.

What lies above is the project's real code on a real file system. Python-level calls are tapped (`os`, `open`, `pathlib`
and what is built on them); bytes written through a mapping of a file are not seen.
"""

from __future__ import annotations

import builtins
import io
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from unittest.mock import patch

__all__ = ["Call", "Hook", "tapped"]

_MODES_THAT_WRITE = frozenset("wax+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call before it happens. ``offset`` None: where the descriptor stands.

    ``perform_part`` writes the first so many bytes of ``data`` and no more.
    """

    name: str
    paths: tuple[str, ...] = ()
    fd: int = -1
    flags: int = 0
    data: bytes | memoryview = b""
    offset: int | None = None
    length: int = 0
    perform_part: Callable[[int], None] | None = None


class Hook(Protocol):
    """Sees every call; it must perform it once and give back its result, unless it ends the process."""

    def __call__(self, call: Call, perform: Callable[[], Any]) -> Any: ...


@contextmanager
def tapped(hook: Hook) -> Iterator[None]:
    """While the block runs, all tapped calls of all threads go through ``hook``."""
    opener = _tapped_open(hook)
    with ExitStack() as stack:
        for name, function in _file_functions(hook).items():
            stack.enter_context(patch.object(os, name, function))
        stack.enter_context(patch.object(socket.socket, "send", _tapped_send(hook)))
        stack.enter_context(patch.object(builtins, "open", opener))
        stack.enter_context(patch.object(io, "open", opener))
        yield


def _file_functions(hook: Hook) -> dict[str, Callable[..., Any]]:
    functions = {"open": _tapped_os_open(hook), "write": _tapped_write(hook), "pwrite": _tapped_pwrite(hook)}
    functions |= {"writev": _tapped_writev(hook), "pwritev": _tapped_pwritev(hook)}
    functions |= {name: _tapped_descriptor(hook, name) for name in ("fsync", "fdatasync", "ftruncate")}
    functions |= {"posix_fallocate": _tapped_descriptor(hook, "posix_fallocate")}
    functions |= {name: _tapped_pair(hook, name) for name in ("rename", "replace", "link")}
    return functions | {name: _tapped_path(hook, name) for name in ("unlink", "remove", "mkdir", "rmdir", "truncate")}


def _resolved(path: Any, dir_fd: int | None) -> str:
    name = os.fsdecode(path)
    return os.path.abspath(name if dir_fd is None else os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), name))


def _tapped_os_open(hook: Hook) -> Callable[..., int]:
    original = os.open

    def tap(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        call = Call(name="open", paths=(_resolved(path, dir_fd),), flags=flags)
        return int(hook(call, lambda: original(path, flags, mode, dir_fd=dir_fd)))

    return tap


def _tapped_write(hook: Hook) -> Callable[..., int]:
    original = os.write

    def tap(fd: int, data: Any) -> int:
        view = memoryview(data).cast("B")
        call = Call(name="write", fd=fd, data=view, perform_part=lambda size: _ignore(original(fd, view[:size])))
        return int(hook(call, lambda: original(fd, view)))

    return tap


def _tapped_pwrite(hook: Hook) -> Callable[..., int]:
    original = os.pwrite

    def tap(fd: int, data: Any, offset: int) -> int:
        view = memoryview(data).cast("B")
        call = Call(
            name="write",
            fd=fd,
            data=view,
            offset=offset,
            perform_part=lambda size: _ignore(original(fd, view[:size], offset)),
        )
        return int(hook(call, lambda: original(fd, view, offset)))

    return tap


def _tapped_writev(hook: Hook) -> Callable[..., int]:
    original, plain = os.writev, os.write

    def tap(fd: int, buffers: Sequence[Any]) -> int:
        view = memoryview(b"".join(buffers))
        call = Call(name="write", fd=fd, data=view, perform_part=lambda size: _ignore(plain(fd, view[:size])))
        return int(hook(call, lambda: original(fd, buffers)))

    return tap


def _tapped_pwritev(hook: Hook) -> Callable[..., int]:
    original, plain = os.pwritev, os.pwrite

    def tap(fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
        view = memoryview(b"".join(buffers))
        call = Call(
            name="write",
            fd=fd,
            data=view,
            offset=offset,
            perform_part=lambda size: _ignore(plain(fd, view[:size], offset)),
        )
        return int(hook(call, lambda: original(fd, buffers, offset, flags)))

    return tap


def _tapped_descriptor(hook: Hook, name: str) -> Callable[..., Any]:
    original = getattr(os, name)

    def tap(fd: Any, *args: int) -> Any:
        number = fd if isinstance(fd, int) else fd.fileno()
        return hook(Call(name=name, fd=number, length=sum(args)), lambda: original(fd, *args))

    return tap


def _tapped_pair(hook: Hook, name: str) -> Callable[..., Any]:
    original = getattr(os, name)

    def tap(source: Any, target: Any, **options: Any) -> Any:
        paths = _resolved(source, options.get("src_dir_fd")), _resolved(target, options.get("dst_dir_fd"))
        return hook(Call(name=name, paths=paths), lambda: original(source, target, **options))

    return tap


def _tapped_path(hook: Hook, name: str) -> Callable[..., Any]:
    original = getattr(os, name)

    def tap(path: Any, *args: int, **options: Any) -> Any:
        call = Call(name=name, paths=(_resolved(path, options.get("dir_fd")),), length=sum(args))
        return hook(call, lambda: original(path, *args, **options))

    return tap


def _tapped_send(hook: Hook) -> Callable[..., int]:
    original = socket.socket.send

    def tap(self: socket.socket, data: Any, *args: int) -> int:
        view = memoryview(data).cast("B")
        call = Call(
            name="send", fd=self.fileno(), data=view, perform_part=lambda size: _ignore(original(self, view[:size]))
        )
        return int(hook(call, lambda: original(self, data, *args)))

    return tap


def _tapped_open(hook: Hook) -> Callable[..., Any]:
    """`open` as `io` describes it, on a raw file whose every write is tapped. Reading stays as it is."""
    original = builtins.open

    class TappedFile(io.FileIO):
        def write(self, data: Any) -> int:
            view = memoryview(data).cast("B")
            call = Call(
                name="write",
                fd=self.fileno(),
                data=view,
                perform_part=lambda size: _ignore(super(TappedFile, self).write(view[:size])),
            )
            return int(hook(call, lambda: super(TappedFile, self).write(data)))

        def truncate(self, size: int | None = None) -> int:
            length = self.tell() if size is None else size
            call = Call(name="ftruncate", fd=self.fileno(), length=length)
            return int(hook(call, lambda: super(TappedFile, self).truncate(length)))

    def tap(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **options: Any) -> Any:
        if isinstance(file, int) or not _MODES_THAT_WRITE & set(mode):
            return original(file, mode, buffering, *args, **options)
        raw_mode = mode.replace("b", "").replace("t", "")
        opener = options.pop("opener", None) or (lambda path, flags: os.open(path, flags, 0o666))
        raw = TappedFile(file, raw_mode, opener=opener)
        if buffering == 0:
            return raw
        buffered = io.BufferedRandom(raw) if "+" in raw_mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *args, **options)

    return tap


def _ignore(_: object) -> None:
    pass

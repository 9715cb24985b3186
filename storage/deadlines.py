"""A deadline for calls that cannot be interrupted: they run in a daemon thread, and the caller stops waiting.

The thread of a call that was given up stays where it is until the operating system lets it go; it holds up neither
the caller nor the interpreter's exit. It must not publish anything afterwards: see `Patience.check`.
"""

from __future__ import annotations

import errno
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["Patience", "call_within"]

T = TypeVar("T")

_MAX_IDLE = 8
_MAX_THREADS = 256

_Job = tuple[Callable[["Patience"], Any], "Patience", "queue.SimpleQueue[tuple[bool, Any]]"]


class Patience:
    """How long the caller still waits; a call that moves on says so with `beat`."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._due_s = time.monotonic() + deadline_s
        self._is_given_up = False

    def beat(self, more_s: float = 0.0) -> None:
        """The call moved on: the deadline starts again, ``more_s`` longer for what comes next."""
        self._due_s = time.monotonic() + self._deadline_s + more_s

    def check(self) -> None:
        """Raise where the caller left: a late call must not replace what was written after it."""
        if self._is_given_up:
            raise TimeoutError(errno.ETIMEDOUT, "the caller stopped waiting")

    def left_s(self) -> float:
        return self._due_s - time.monotonic()

    def give_up(self) -> None:
        self._is_given_up = True


class _Threads:
    """Daemon threads that are used again once their call came back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[_Job]] = []
        self._num = 0

    def give(self, job: _Job) -> None:
        with self._lock:
            if self._idle:
                self._idle.pop().put(job)
                return
            if self._num >= _MAX_THREADS:
                raise OSError(errno.EBUSY, f"{self._num} earlier calls have not come back")
            self._num += 1
        jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        jobs.put(job)
        threading.Thread(target=self._serve, args=(jobs,), name="store-call", daemon=True).start()

    def _serve(self, jobs: queue.SimpleQueue[_Job]) -> None:
        while True:
            _carry_out(jobs.get())  # keeps no reference: the call may hold a buffer that is to be unmapped
            with self._lock:
                if len(self._idle) >= _MAX_IDLE:
                    self._num -= 1
                    return
                self._idle.append(jobs)


def _carry_out(job: _Job) -> None:
    call, patience, answer = job
    try:
        answer.put((True, call(patience)))
    except BaseException as error:  # noqa: BLE001 - handed to the caller, who raises it
        answer.put((False, error))


_threads = _Threads()


def _renew() -> None:
    global _threads
    _threads = _Threads()


os.register_at_fork(after_in_child=_renew)


def call_within(call: Callable[[Patience], T], deadline_s: float) -> T:
    """What ``call`` returns or raises; TimeoutError once it did not `beat` for ``deadline_s``."""
    patience = Patience(deadline_s)
    answer: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
    _threads.give((call, patience, answer))
    while True:
        try:
            is_result, value = answer.get(timeout=max(0.0, patience.left_s()))
        except queue.Empty:
            if patience.left_s() > 0:
                continue
            patience.give_up()
            raise TimeoutError(errno.ETIMEDOUT, f"no answer within {deadline_s:g} s") from None
        if is_result:
            result: T = value
            return result
        raise value

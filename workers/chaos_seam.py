"""The one door for chaos into a worker: raises an exception in its training thread when told to from outside.

It exists only in processes of a local cluster whose chaos schedule asks for it; nobody else sets the variable. The
exception strikes between two bytecodes, wherever the training thread is, as an error of the user's code would.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from pathlib import Path
from typing import Final

__all__ = ["CHAOS_DIRECTORY_VARIABLE", "ChaosError", "open_seam", "strike"]

CHAOS_DIRECTORY_VARIABLE: Final = "RAYSUME_CHAOS_DIRECTORY"
_TRAINING_THREAD: Final = "train-"
_AWAITED_S: Final = 60.0
_LOOK_S: Final = 0.02

_log = logging.getLogger(__name__)


class ChaosError(Exception):
    """Stands for an error of the training code."""

    def __init__(self) -> None:
        super().__init__("raised on purpose by the chaos schedule")


def open_seam(directory: str) -> None:
    """Wait, in a thread, for a word in the pipe ``directory``/PID and raise ChaosError for each one."""
    pipe = Path(directory) / str(os.getpid())
    os.mkfifo(pipe)
    threading.Thread(target=_listen, args=(pipe,), name="chaos-seam", daemon=True).start()


def strike(directory: Path, pid: int) -> None:
    """Raise in the training thread of process ``pid``. OSError when nobody listens there."""
    # Without waiting: a worker that has gone left its pipe behind.
    descriptor = os.open(directory / str(pid), os.O_WRONLY | os.O_NONBLOCK)
    try:
        os.write(descriptor, b"raise\n")
    finally:
        os.close(descriptor)


def _listen(pipe: Path) -> None:
    while True:
        with pipe.open("rb") as words:
            for _ in words:
                _raise_in_training()


def _raise_in_training() -> None:
    """Between two Worlds nothing trains: the deed is told as done, so it is done as soon as there is somebody."""
    until = time.monotonic() + _AWAITED_S
    while not (threads := _training_threads()) and time.monotonic() < until:
        time.sleep(_LOOK_S)
    for thread in threads:
        _log.warning("chaos: raising in %s", thread.name)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(ChaosError))
    if not threads:
        _log.error("chaos: there is no training thread to raise in")


def _training_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(_TRAINING_THREAD)]

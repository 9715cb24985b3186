"""One server as a child process: started, waited for, paused, killed, stopped.

The child binds its port itself and prints `ready PORT`, so no port is guessed and no time is slept.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

__all__ = ["ServerNotReady", "ServerProcess"]


class ServerNotReady(RuntimeError):
    """A server did not come up; the message holds the end of what it wrote."""


class ServerProcess:
    """A child process that prints `ready PORT` once it listens."""

    def __init__(self, name: str, command: Sequence[str], directory: Path, ready_s: float = 30.0) -> None:
        self.directory = directory
        self.port = 0
        self._name = name
        self._command = list(command)
        self._ready_s = ready_s
        self._log = directory / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self._name} was never started"
        return self._process.pid

    def start(self) -> Self:
        """Start it, again on the same port after a stop or kill, and wait until it listens."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._command, str(self.port)], stdout=subprocess.PIPE, stderr=log, start_new_session=True
            )
        self.port = self._wait_ready(self._process)
        return self

    def pause(self) -> None:
        """A stalled store: connections are accepted by the kernel, nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def proceed(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """A crash: nothing is flushed. `start` brings the server back on the same port."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def _wait_ready(self, process: subprocess.Popen[bytes]) -> int:
        assert process.stdout is not None
        deadline = time.monotonic() + self._ready_s
        line = b""
        while not line.endswith(b"\n"):
            readable, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            got = os.read(process.stdout.fileno(), 256) if readable else b""
            if not got:
                self.kill()
                written = self._log.read_text(errors="replace")[-2000:]
                raise ServerNotReady(f"{self._name} was not ready within {self._ready_s} s; it wrote:\n{written}")
            line += got
        return int(line.split()[1])

    def _end(self, number: signal.Signals) -> None:
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.send_signal(number)
            try:
                process.wait(5.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(5.0)
        if process.stdout is not None:
            process.stdout.close()
        self._process = None

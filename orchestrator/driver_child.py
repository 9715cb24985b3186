"""A driver as a child process: its command line, its life and its output.

The child has its own process group, so that Ctrl-C reaches it once and through us, and dies with this process.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from orchestrator.own_python import child_environment, child_python

__all__ = ["DriverChild", "driver_command"]

_PR_SET_PDEATHSIG: Final = 1
_OUTPUT_END_S: Final = 5.0


def driver_command(
    config_path: Path,
    overrides: Sequence[str],
    *,
    ray_address: str,
    events_path: Path,
    json_output: bool,
    loop_options: Sequence[str] = (),
    asked: Sequence[str] = (),
) -> list[str]:
    """The command line of one driver. Values pass as they are: no shell reads them."""
    options = ["--ray-address", ray_address, "--events-file", str(events_path), "--under-supervisor", *loop_options]
    if asked:
        options += ["--asked", json.dumps(asked)]
    if json_output:
        options.append("--json")
    return child_python("orchestrator", "run", *options, "--", str(config_path), *overrides)


class DriverChild:
    """One running driver. Its stderr goes line by line to ``on_line``, its stdout is kept until `copy_output`."""

    def __init__(self, command: Sequence[str], on_line: Callable[[str], None]) -> None:
        libc = ctypes.CDLL(None, use_errno=True)  # before the fork: loading a library after it may deadlock

        def die_with_parent() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        self._process = subprocess.Popen(
            command,
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.PIPE,
            process_group=0,
            preexec_fn=die_with_parent,
        )
        self._reader = threading.Thread(target=self._forward_lines, args=(on_line,), name="driver-lines", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, timeout_s: float) -> int | None:
        """The exit code (negative: killed by that signal), or None when it still runs after ``timeout_s``."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def send(self, number: int) -> None:
        """Send a signal to the driver; nothing when it is gone."""
        self._process.send_signal(number)

    def close(self) -> None:
        """Kill it if it still runs, reap it and take the rest of its lines."""
        self._process.kill()
        self._process.wait()
        self._reader.join(_OUTPUT_END_S)

    def copy_output(self) -> None:
        """Copy what it wrote to stdout to ours."""
        self._output.seek(0)
        sys.stdout.flush()
        shutil.copyfileobj(self._output, sys.stdout.buffer)
        sys.stdout.flush()

    def _forward_lines(self, on_line: Callable[[str], None]) -> None:
        if self._process.stderr is None:
            return
        for line in self._process.stderr:
            on_line(line.decode("utf-8", "replace").rstrip("\n"))

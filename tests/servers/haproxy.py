"""HAProxy in front of an S3 store: faults by percentage, changed while it runs.

Needs Debian's haproxy. For a plain delay, or to hold uploads, DelayProxy needs nothing.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Literal, Self

from tests.servers.process import ServerNotReady

__all__ = ["Fault", "HaproxyProxy"]

Fault = Literal["slow_down", "internal_error", "reset", "hang", "delay_ms"]
_FAULTS: tuple[Fault, ...] = ("slow_down", "internal_error", "reset", "hang", "delay_ms")

_DELAY_LUA = """core.register_action("wait_ms", {"http-req"}, function(txn)
  core.msleep(tonumber(txn:get_var("txn.delay_ms")) or 0)
end)
"""


def _error(code: str) -> str:
    return f'"<?xml version=\\"1.0\\"?><Error><Code>{code}</Code><Message>injected</Message></Error>"'


def _configuration(directory: Path, listen_fd: int, backend_port: int) -> str:
    percent = "\n".join(
        f"  http-request set-var(txn.{fault}) str({fault}),map_str_int({directory}/faults.map,0)" for fault in _FAULTS
    )
    xml = "content-type application/xml"
    actions = (
        ("slow_down", f"return status 503 {xml} hdr Retry-After 1 string {_error('SlowDown')}"),
        ("internal_error", f"return status 500 {xml} string {_error('InternalError')}"),
        ("hang", "silent-drop"),
        ("reset", "reject"),
    )
    # One draw per fault: with a shared draw the larger percentage would swallow the smaller one.
    draws = "\n".join(
        f"  http-request set-var(txn.draw) rand(100)\n"
        f"  http-request {action} if {{ var(txn.draw),sub(txn.{fault}) lt 0 }}"
        for fault, action in actions
    )
    return f"""global
  stats socket {directory}/admin.sock mode 600 level admin
  lua-load {directory}/delay.lua
  nbthread 1
  maxconn 500
defaults
  mode http
  timeout connect 5s
  timeout client 120s
  timeout server 120s
frontend store
  bind fd@{listen_fd}
{percent}
  http-request lua.wait_ms if {{ var(txn.delay_ms) -m int gt 0 }}
{draws}
  default_backend store
backend store
  server store 127.0.0.1:{backend_port}
"""


class HaproxyProxy:
    """`set(slow_down=20)` makes every fifth request answer 503, from the next request on."""

    def __init__(self, backend_port: int) -> None:
        self._backend_port = backend_port
        self._process: subprocess.Popen[bytes] | None = None
        # Not under pytest's directory: the path of a UNIX socket has to stay short.
        self._directory = Path(tempfile.mkdtemp(prefix="raysume-haproxy-"))
        self.port = 0

    @staticmethod
    def is_installed() -> bool:
        return shutil.which("haproxy") is not None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, ready_s: float = 10.0) -> Self:
        with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
            self.port = listener.getsockname()[1]
            self._write_files(listener.fileno())
            with (self._directory / "haproxy.log").open("wb") as log:
                self._process = subprocess.Popen(
                    ["haproxy", "-db", "-f", str(self._directory / "haproxy.cfg")],
                    stdout=log,
                    stderr=log,
                    pass_fds=[listener.fileno()],
                    start_new_session=True,
                )
        self._wait_ready(ready_s)
        return self

    def set(self, **percentages: int) -> None:
        """Set faults, e.g. `slow_down=20, delay_ms=50`; the others stay as they are."""
        for fault, value in percentages.items():
            if fault not in _FAULTS:
                raise ValueError(f"no fault named {fault!r}; there are {', '.join(_FAULTS)}")
            answer = self._command(f"set map {self._directory}/faults.map {fault} {value}")
            if answer.strip():
                raise RuntimeError(f"haproxy refused to set {fault} to {value}: {answer.strip()}")

    def clear(self) -> None:
        self.set(**dict.fromkeys(_FAULTS, 0))

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(5.0)
            self._process = None
        shutil.rmtree(self._directory, ignore_errors=True)

    def _write_files(self, listen_fd: int) -> None:
        (self._directory / "delay.lua").write_text(_DELAY_LUA)
        (self._directory / "faults.map").write_text("".join(f"{fault} 0\n" for fault in _FAULTS))
        (self._directory / "haproxy.cfg").write_text(_configuration(self._directory, listen_fd, self._backend_port))

    def _wait_ready(self, ready_s: float) -> None:
        assert self._process is not None
        deadline = time.monotonic() + ready_s
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                self._command("show info")
            except (FileNotFoundError, ConnectionRefusedError):
                time.sleep(0.02)
            else:
                return
        written = (self._directory / "haproxy.log").read_text(errors="replace")[-2000:]
        self.stop()
        raise ServerNotReady(f"haproxy was not ready within {ready_s} s; it wrote:\n{written}")

    def _command(self, line: str) -> str:
        with socket.socket(socket.AF_UNIX) as admin:
            admin.settimeout(5.0)
            admin.connect(str(self._directory / "admin.sock"))
            admin.sendall(line.encode() + b"\n")
            return b"".join(iter(lambda: admin.recv(65536), b"")).decode()

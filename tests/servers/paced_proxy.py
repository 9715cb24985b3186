"""A link of limited bandwidth in front of a server: a process that passes bytes on, those to the server at a set pace.

It knows no protocol. All connections share the one line, and little more than what is on it is taken from a client, as
a slow network would: so what goes up takes the time its bytes need, and costs the server's machine next to nothing.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from tests.servers.process import ServerProcess

__all__ = ["PacedProxy"]

_CHUNK_BYTES = 1 << 18
_BURST_S = 0.005


class PacedProxy(ServerProcess):
    """Passes connections on to ``backend_port``; at most ``bytes_per_s`` go up, all of them together."""

    def __init__(self, directory: Path, backend_port: int, bytes_per_s: float) -> None:
        command = [sys.executable, "-m", "tests.servers.paced_proxy", str(backend_port), str(bytes_per_s)]
        super().__init__("paced-proxy", command, directory)


class _Line:
    """Gives each piece the time it takes."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = time.monotonic()
        self._lock = threading.Lock()

    def carry(self, num_bytes: int) -> None:
        with self._lock:
            self._free_s = max(self._free_s, time.monotonic() - _BURST_S) + num_bytes / self._bytes_per_s
            left_s = self._free_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)


def _pass_on(source: socket.socket, target: socket.socket, line: _Line | None) -> None:
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with contextlib.suppress(OSError):
        while taken := source.recv_into(buffer):
            if line is not None:
                line.carry(taken)
            target.sendall(buffer[:taken])
    for end, way in ((target, socket.SHUT_WR), (source, socket.SHUT_RD)):
        with contextlib.suppress(OSError):
            end.shutdown(way)


def _serve(backend_port: int, bytes_per_s: float, port: int) -> None:
    line = _Line(bytes_per_s)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _CHUNK_BYTES)
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
        sys.stdout.write(f"ready {listener.getsockname()[1]}\n")
        sys.stdout.flush()
        while True:
            client, _ = listener.accept()
            backend = socket.create_connection(("127.0.0.1", backend_port))
            for end in (client, backend):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=_pass_on, args=(client, backend, line), daemon=True).start()
            threading.Thread(target=_pass_on, args=(backend, client, None), daemon=True).start()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    _serve(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))

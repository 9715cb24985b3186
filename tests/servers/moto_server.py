"""moto's S3 server as a child process: create-only puts are exact, everything is lost when it stops."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.servers.process import ServerProcess

__all__ = ["MotoServer"]

_SCRIPT = """
import sys, threading
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", int(sys.argv[1]), verbose=False)
server.start()
print("ready", server.get_host_and_port()[1], flush=True)
threading.Event().wait()
"""


class MotoServer(ServerProcess):
    """Accepts any credentials; these are only there so that a client has some."""

    access_key = "testing"
    secret_key = "testing"
    script = _SCRIPT

    def __init__(self, directory: Path) -> None:
        super().__init__("moto", [sys.executable, "-P", "-c", _SCRIPT], directory)

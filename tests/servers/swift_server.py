"""OpenStack Swift with its S3 API as one child process: a real, durable S3 store without root.

It checks SigV4 signatures and upload checksums, and what it acknowledged survives `kill` and `start`.
Its create-only put is not atomic, so it must not be used to prove that a lease has one holder.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

from tests.servers.process import ServerProcess

__all__ = ["SwiftServer", "keeps_xattrs"]

_SCRIPT = Path(__file__).with_name("swift_process.py")


def keeps_xattrs(directory: Path) -> bool:
    """Whether Swift can keep object metadata there: it stores them as user extended attributes."""
    probe = directory / "xattr-probe"
    probe.touch()
    try:
        os.setxattr(probe, "user.raysume", b"1")
    except OSError as error:
        if error.errno in (errno.ENOTSUP, errno.EPERM):
            return False
        raise
    finally:
        probe.unlink()
    return True


class SwiftServer(ServerProcess):
    """Swift's account, container, object and proxy servers in one process, over `directory`."""

    access_key = "raysume:tester"
    secret_key = "loopback-only"

    def __init__(self, directory: Path) -> None:
        command = [sys.executable, "-P", str(_SCRIPT), str(directory), self.access_key, self.secret_key]
        super().__init__("swift", command, directory)

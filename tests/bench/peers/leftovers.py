"""What a killed node leaves in this machine's shared memory goes with it, as it would with a machine of its own."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

__all__ = ["remove_arenas"]


def remove_arenas(node_ids: Iterable[str]) -> None:
    """Remove the shared memory of these nodes, whatever run it was of."""
    for node_id in node_ids:
        for directory in Path("/dev/shm").glob(f"raysume-*-{node_id}"):
            shutil.rmtree(directory, ignore_errors=True)

"""Bytes: encoded, placed, recorded, read back, verified and deleted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from storage.dcp_standalone import RaysumeReader, RaysumeWriter

__all__ = ["RaysumeReader", "RaysumeWriter"]


def __getattr__(name: str) -> Any:
    # Only who asks for these two loads torch: everything that verifies or lists Checkpoints runs without it.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from storage import dcp_standalone

    return getattr(dcp_standalone, name)

"""What the command line tells one driver beside its configuration. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["DriverOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverOptions:
    """How one driver process is started.

    ``ray_address`` None: the cluster that Ray finds, or a fresh local one. ``events_path``: local file that events are
    appended to as well. ``asked``: what stood behind `raysume run`, for the suggestions of the report; empty where a
    script started the Run.
    """

    ray_address: str | None = None
    events_path: Path | None = None
    json_output: bool = False
    show_progress: bool = True
    asked: tuple[str, ...] = ()

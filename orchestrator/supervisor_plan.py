"""What a supervised run is made of: the plan, and what is asked of cluster and driver. Values and Protocols."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from orchestrator.chaos import ChaosAction
from orchestrator.config import RunConfig
from orchestrator.local_cluster import LocalNode

__all__ = ["Cluster", "Driver", "SupervisorPlan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorPlan:
    """What to run and what to break. ``overrides`` hold everything that the command line changed in the file,
    ``loop_options`` the options that name a training loop of the user's own. ``asked``: see DriverOptions."""

    config: RunConfig
    config_path: Path
    overrides: tuple[str, ...]
    num_nodes: int
    actions: tuple[ChaosAction, ...]
    events_path: Path
    run_id: str
    json_output: bool = False
    show_progress: bool = True
    loop_options: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()


class Cluster(Protocol):
    """What the supervisor asks of a cluster (LocalCluster, or a test's)."""

    @property
    def address(self) -> str: ...

    @property
    def nodes(self) -> dict[int, LocalNode]: ...

    def add_node(self) -> LocalNode: ...

    def kill_node(self, number: int) -> LocalNode: ...

    def bury(self, node: LocalNode) -> None: ...

    def drain_node(self, number: int, *, notice_s: float) -> LocalNode: ...

    def cut_node(self, number: int) -> LocalNode: ...

    def restart_head(self) -> int: ...


class Driver(Protocol):
    """What the supervisor asks of a driver process (DriverChild, or a test's)."""

    @property
    def pid(self) -> int: ...

    def wait(self, timeout_s: float) -> int | None: ...

    def send(self, number: int) -> None: ...

    def close(self) -> None: ...

    def copy_output(self) -> None: ...

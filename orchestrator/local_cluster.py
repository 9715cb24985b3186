"""A Ray cluster of several nodes on this machine, owned by this process: starts, adds, drains and really kills nodes.

It knows nothing of Runs or schedules. The cluster ends within seconds when this process is killed.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from orchestrator.errors import SupervisorError

__all__ = ["LOCAL_DIRECTORY_VARIABLE", "LocalCluster", "LocalNode", "descendants", "is_running", "prepare_environment"]

logger = logging.getLogger(__name__)

LOCAL_DIRECTORY_VARIABLE: Final = "RAYSUME_LOCAL_DIRECTORY"  # a node's own disk, as its processes see it
_OBJECT_STORE_BYTES: Final = 100 * 1024 * 1024
_LOOPBACK: Final = "127.0.0.1"
_DRAIN_REASON_PREEMPTION: Final = 2  # ray.core.generated.autoscaler_pb2.DrainNodeReason
_DEATH_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalNode:
    """One started node. ``number`` counts from 1 and is never used again; ``node_id`` is Ray's."""

    number: int
    node_id: str
    raylet_pid: int
    directory: Path
    handle: Any  # ray._private.node.Node, which has no public type


def prepare_environment() -> None:
    """Set what Ray reads when it is imported. Must come before the first import of ray in this process."""
    defaults = {
        "OMP_NUM_THREADS": "1",
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # Without this a driver turns 127.0.0.1 into the machine's outer address, where nothing listens.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    if "RAY_AUTH_MODE" not in os.environ:
        # Loopback is open to every user of the machine; children inherit the token, others do not have it.
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


class LocalCluster:
    """A head without CPUs and nodes with ``node_resources`` each. Close it in any case.

    ``with_dashboard``: also what `ray job submit` talks to, at `dashboard_url`.
    """

    def __init__(self, *, node_resources: Mapping[str, float], with_dashboard: bool = False) -> None:
        prepare_environment()
        from ray.cluster_utils import Cluster

        logging.getLogger("ray").setLevel(logging.WARNING)
        self._resources = dict(node_resources)
        self._root = Path(tempfile.mkdtemp(prefix="raysume-nodes-"))
        self._nodes: dict[int, LocalNode] = {}
        self._started = 0
        head = {
            "num_cpus": 0,
            "object_store_memory": _OBJECT_STORE_BYTES,
            "include_dashboard": with_dashboard,
            "node_ip_address": _LOOPBACK,
        }
        if with_dashboard:
            head |= {"dashboard_host": _LOOPBACK, "dashboard_port": _free_port(), "temp_dir": str(self._root / "ray")}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        if with_dashboard:
            # Ray's job server asks this file, not its own head, which cluster of the machine a job belongs to.
            (self._root / "ray" / "ray_current_cluster").write_text(self.address)
        head_node: Any = self._cluster.head_node  # untyped: None until the head runs, which it does here
        self._node_ids: list[str] = [head_node.node_id]

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    @property
    def dashboard_url(self) -> str:
        """Where jobs are submitted to; empty without a dashboard."""
        head: Any = self._cluster.head_node  # untyped: None until the head runs, which it does here
        return f"http://{head.webui_url}" if head.webui_url else ""

    @property
    def nodes(self) -> dict[int, LocalNode]:
        """The live nodes by number; the head is not among them."""
        return dict(self._nodes)

    @property
    def started_node_ids(self) -> tuple[str, ...]:
        """Every node that ever was in this cluster, the head and the dead ones too; also after `close`."""
        return tuple(self._node_ids)

    def add_node(self) -> LocalNode:
        """Start one more node and wait until the cluster knows it."""
        self._started += 1
        number = self._started
        directory = self._root / f"node-{number}"
        directory.mkdir()
        others = {name: value for name, value in self._resources.items() if name not in ("CPU", "GPU")}
        handle = self._cluster.add_node(
            num_cpus=math.ceil(self._resources.get("CPU", 1)),
            num_gpus=math.ceil(self._resources.get("GPU", 0)),
            resources=others,
            object_store_memory=_OBJECT_STORE_BYTES,
            node_ip_address=_LOOPBACK,
            labels={"raysume-node": f"node-{number}"},
            env_vars={LOCAL_DIRECTORY_VARIABLE: str(directory)},
        )
        self._node_ids.append(handle.node_id)
        raylet_pid = handle.all_processes["raylet"][0].process.pid
        node = LocalNode(
            number=number, node_id=handle.node_id, raylet_pid=raylet_pid, directory=directory, handle=handle
        )
        self._nodes[number] = node
        return node

    def kill_node(self, number: int) -> LocalNode:
        """SIGKILL every process of the node at once, as a power cut would. Files are left to `bury`."""
        node = self._nodes.pop(number)
        # A stopped raylet cannot start one more worker between the look and the kill.
        _send(node.raylet_pid, signal.SIGSTOP)
        for pid in [node.raylet_pid, *descendants(node.raylet_pid)]:
            _send(pid, signal.SIGKILL)
        return node

    def bury(self, node: LocalNode) -> None:
        """Reap a killed node and remove its local disk."""
        self._cluster.remove_node(node.handle, allow_graceful=False)
        deadline = time.monotonic() + _DEATH_TIMEOUT_S
        while is_running(node.raylet_pid):
            if time.monotonic() > deadline:
                raise SupervisorError(f"raylet {node.raylet_pid} of node {node.number} outlived its SIGKILL")
            time.sleep(0.01)
        shutil.rmtree(node.directory, ignore_errors=True)

    def drain_node(self, number: int, *, notice_s: float) -> LocalNode:
        """Give the cluster notice that a node goes away in ``notice_s``. Killing it then is up to the caller."""
        from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled, without stubs

        node = self._nodes[number]
        is_accepted, why = GcsClient(address=self.address).drain_node(
            node.node_id,
            _DRAIN_REASON_PREEMPTION,
            f"notice of {notice_s:g} s",
            int((time.time() + notice_s) * 1000),
        )
        if not is_accepted:
            raise SupervisorError(f"node {number} does not accept its drain notice: {why}")
        return node

    def close(self) -> None:
        """End every node and the head, and remove the nodes' disks."""
        self._nodes.clear()
        try:
            self._cluster.shutdown()
        finally:
            shutil.rmtree(self._root, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        return int(probe.getsockname()[1])


def descendants(pid: int) -> list[int]:
    """Every process below ``pid``, nearest first."""
    children: dict[int, list[int]] = {}
    for child, parent in _parents():
        children.setdefault(parent, []).append(child)
    found = list(children.get(pid, []))
    for above in found:  # grows while it is walked
        found.extend(children.get(above, []))
    return found


def is_running(pid: int) -> bool:
    """False once the process is gone, or dead and only waiting for its parent to notice."""
    stat = _stat(pid)
    return stat is not None and stat[0] not in ("Z", "X")


def _parents() -> Iterator[tuple[int, int]]:
    for entry in os.listdir("/proc"):
        stat = _stat(int(entry)) if entry.isdigit() else None
        if stat is not None:
            yield int(entry), int(stat[1])


def _stat(pid: int) -> list[str] | None:
    """State, parent and the rest of /proc/PID/stat; None when the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name stands in brackets and may hold anything, brackets too.
    return text.rpartition(")")[2].split()


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        logger.debug("process %s was gone before %s", pid, number.name)

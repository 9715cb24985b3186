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
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from orchestrator.chaos_disk import make_nodes_root, mount_disk, remove_stale_disks, unmount_disks
from orchestrator.errors import SupervisorError
from orchestrator.netns import PrivateNetwork, remove_stale_networks
from orchestrator.processes import descendants, is_running, send_signal
from workers.chaos_seam import CHAOS_DIRECTORY_VARIABLE

__all__ = [
    "LOCAL_DIRECTORY_VARIABLE",
    "Fittings",
    "LocalCluster",
    "LocalNode",
    "chaos_directory",
    "descendants",
    "is_running",
    "prepare_environment",
]

logger = logging.getLogger(__name__)

LOCAL_DIRECTORY_VARIABLE: Final = "RAYSUME_LOCAL_DIRECTORY"  # a node's own disk, as its processes see it
_OBJECT_STORE_BYTES: Final = 100 * 1024 * 1024
_LOOPBACK: Final = "127.0.0.1"
_DRAIN_REASON_PREEMPTION: Final = 2  # ray.core.generated.autoscaler_pb2.DrainNodeReason
_DEATH_TIMEOUT_S: Final = 10.0
_SEAMS: Final = "seams"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fittings:
    """What the machine of a local cluster must have so that certain faults can be injected; nothing by default.

    ``disk_bytes``: each node has a disk of its own of that size. ``has_seams``: exceptions can be raised in workers.
    ``has_durable_head``: the head's control store can be killed and comes back with what it knew.
    ``has_own_networks``: each node has an address of its own and a link that can be cut.
    """

    disk_bytes: int | None = None
    has_seams: bool = False
    has_durable_head: bool = False
    has_own_networks: bool = False


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

    def __init__(
        self, *, node_resources: Mapping[str, float], with_dashboard: bool = False, fittings: Fittings | None = None
    ) -> None:
        prepare_environment()
        from ray.cluster_utils import Cluster

        logging.getLogger("ray").setLevel(logging.WARNING)
        remove_stale_disks()
        remove_stale_networks()
        self._resources = dict(node_resources)
        self._fittings = fittings or Fittings()
        self._network = PrivateNetwork() if self._fittings.has_own_networks else None
        self._root = make_nodes_root()
        self._nodes: dict[int, LocalNode] = {}
        self._cut: list[LocalNode] = []
        self._started = 0
        head = {
            "num_cpus": 0,
            "object_store_memory": _OBJECT_STORE_BYTES,
            "include_dashboard": with_dashboard,
            "node_ip_address": self.host,
        }
        if self._fittings.has_durable_head:
            (self._root / "head").mkdir()
            head["_system_config"] = {"gcs_storage": "rocksdb", "gcs_storage_path": str(self._root / "head")}
        if with_dashboard:
            head |= {"dashboard_host": _LOOPBACK, "dashboard_port": _free_port(), "temp_dir": str(self._root / "ray")}
        try:
            self._cluster = Cluster(initialize_head=True, head_node_args=head)
        except BaseException:
            self._remove_traces()
            raise
        if with_dashboard:
            # Ray's job server asks this file, not its own head, which cluster of the machine a job belongs to.
            (self._root / "ray" / "ray_current_cluster").write_text(self.address)
        head_node: Any = self._cluster.head_node  # untyped: None until the head runs, which it does here
        self._node_ids: list[str] = [head_node.node_id]

    @property
    def host(self) -> str:
        """The address of this machine that every node reaches."""
        return _LOOPBACK if self._network is None else self._network.gateway

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
        if self._fittings.disk_bytes is not None:
            mount_disk(directory, self._fittings.disk_bytes)
        if self._network is None:
            handle = self._start_node(number, directory, _LOOPBACK)
        else:
            address = self._network.add(number)
            with self._network.inside(number):
                handle = self._start_node(number, directory, address)
        self._node_ids.append(handle.node_id)
        raylet_pid = handle.all_processes["raylet"][0].process.pid
        node = LocalNode(
            number=number, node_id=handle.node_id, raylet_pid=raylet_pid, directory=directory, handle=handle
        )
        self._nodes[number] = node
        return node

    def _start_node(self, number: int, directory: Path, address: str) -> Any:
        others = {name: value for name, value in self._resources.items() if name not in ("CPU", "GPU")}
        return self._cluster.add_node(
            num_cpus=math.ceil(self._resources.get("CPU", 1)),
            num_gpus=math.ceil(self._resources.get("GPU", 0)),
            resources=others,
            object_store_memory=_OBJECT_STORE_BYTES,
            node_ip_address=address,
            labels={"raysume-node": f"node-{number}"},
            env_vars=self._variables(directory),
        )

    def _variables(self, directory: Path) -> dict[str, str]:
        """What the processes of a node find in their environment."""
        variables = {LOCAL_DIRECTORY_VARIABLE: str(directory)}
        if self._fittings.disk_bytes is not None:
            variables["TMPDIR"] = str(directory)  # where the local-disk Tier lies, unless it is told otherwise
        if self._fittings.has_seams:
            seams = directory / _SEAMS
            seams.mkdir()
            variables[CHAOS_DIRECTORY_VARIABLE] = str(seams)
        if self._network is not None:
            # The machine's name leads to an address that the node does not have.
            variables["GLOO_SOCKET_IFNAME"] = self._network.interface
        return variables

    def kill_node(self, number: int) -> LocalNode:
        """SIGKILL every process of the node at once, as a power cut would. Files are left to `bury`."""
        node = self._nodes.pop(number)
        # A stopped raylet cannot start one more worker between the look and the kill.
        send_signal(node.raylet_pid, signal.SIGSTOP)
        for pid in [node.raylet_pid, *descendants(node.raylet_pid)]:
            send_signal(pid, signal.SIGKILL)
        return node

    def bury(self, node: LocalNode) -> None:
        """Reap a killed node and remove its local disk."""
        self._cluster.remove_node(node.handle, allow_graceful=False)
        deadline = time.monotonic() + _DEATH_TIMEOUT_S
        while is_running(node.raylet_pid):
            if time.monotonic() > deadline:
                raise SupervisorError(f"raylet {node.raylet_pid} of node {node.number} outlived its SIGKILL")
            time.sleep(0.01)
        unmount_disks(node.directory)
        shutil.rmtree(node.directory, ignore_errors=True)
        if self._network is not None:
            self._network.remove(node.number)

    def cut_node(self, number: int) -> LocalNode:
        """Take the node's link down: nothing that is sent to or from it arrives, and nobody is told.

        Its processes live on until `close`; the node is no longer among `nodes`.
        """
        if self._network is None:
            raise SupervisorError("the nodes of this cluster share one network")
        self._network.cut(number)
        node = self._nodes.pop(number)
        self._cut.append(node)
        return node

    def restart_head(self) -> int:
        """SIGKILL the head's control store and start it again at the same address; returns the killed pid."""
        if not self._fittings.has_durable_head:
            raise SupervisorError("the head of this cluster forgets everything when it is killed")
        head: Any = self._cluster.head_node  # untyped: None until the head runs, which it does here
        pid = int(head.all_processes["gcs_server"][0].process.pid)
        head.kill_gcs_server()
        head.start_gcs_server()
        return pid

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
            for node in self._cut:
                # What was cut off cannot be told to end.
                for pid in [node.raylet_pid, *descendants(node.raylet_pid)]:
                    send_signal(pid, signal.SIGKILL)
            self._cluster.shutdown()
        finally:
            self._remove_traces()

    def _remove_traces(self) -> None:
        unmount_disks(self._root)
        shutil.rmtree(self._root, ignore_errors=True)
        if self._network is not None:
            self._network.close()


def chaos_directory(node: LocalNode) -> Path:
    """Where the processes of ``node`` listen for chaos, in a cluster that has seams."""
    return node.directory / _SEAMS


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        return int(probe.getsockname()[1])

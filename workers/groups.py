"""The process groups of one Attempt: found together through a store outside the ranks, closed once, from any thread.

The ranks first meet at a counter, so a rank that never comes is named as such and the wait can be given up. Closing
also drops every reference held here: gloo's connections, and so the neighbours' waiting calls, end only when the last
reference to a group is gone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh

from workers.contract import AttemptSpec
from workers.errors import AttemptAbandoned, FormingFailed
from workers.mesh import join_group, leave_group, world_mesh
from workers.wires import StoreWire, Wires

__all__ = ["Groups"]

_log = logging.getLogger(__name__)
_CONNECT_S = 10.0
_LOOK_S = 0.2

T = TypeVar("T")


class Groups:
    """The default group, its mesh, and a control group of its own for the one all-reduce a step."""

    def __init__(self, spec: AttemptSpec, device: torch.device, shard_size: int | None = None) -> None:
        self._spec, self._device, self._shard_size = spec, device, shard_size
        self._lock = threading.Lock()
        self._control: dist.ProcessGroup | None = None
        self._mesh: DeviceMesh | None = None
        self._wires: Wires | None = None
        self._store_wire: StoreWire | None = None
        self._is_joined = self._is_formed = self._is_closed = False

    def form(self, check: Callable[[], None]) -> None:
        """Join both groups. ``check`` is called while waiting for the other ranks and may raise to give up."""
        spec = self._spec
        store_wire = StoreWire(spec.store_port)
        store: Store = TCPStore(
            spec.store_host,
            spec.store_port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=min(_CONNECT_S, spec.group_timeout_s)),
        )
        store_wire.note()
        store = PrefixStore(spec.attempt.label, store)
        self._meet(store, check)
        store.set_timeout(timedelta(seconds=spec.group_timeout_s))
        wires = Wires()
        with self._lock:
            self._wires, self._store_wire = wires, store_wire
        # The lock is not held while joining, which can block: a close meanwhile is made good right after.
        join_group(
            store, rank=spec.rank, world_size=spec.world.size, device=self._device, timeout_s=spec.group_timeout_s
        )
        with self._lock:
            self._is_joined = True
            if self._is_closed:
                self._leave()
                raise AttemptAbandoned(spec.attempt.label, "it was closed while forming")
            self._mesh = world_mesh(self._device, self._shard_size)
            self._control = dist.new_group(timeout=timedelta(seconds=spec.group_timeout_s))
            wires.note()
            self._is_formed = True

    @property
    def mesh(self) -> DeviceMesh:
        with self._lock:
            return self._open(self._mesh)

    def start_sum(self, vector: torch.Tensor) -> dist.Work:
        """Begin to sum ``vector`` over all ranks on the control group, in place."""
        with self._lock:
            control = self._open(self._control)
        work: dist.Work | None = dist.all_reduce(vector, op=dist.ReduceOp.SUM, group=control, async_op=True)
        assert work is not None  # this process is a member of the group
        return work

    def barrier(self) -> None:
        """Wait for all ranks, at most the group's time-out."""
        self.start_sum(torch.zeros((), device=self._device)).wait()

    def cut(self) -> None:
        """End calls that still wait although the groups are closed, and a `close` that waits for them: for a machine
        that has vanished without a word. Only for calls that wait already: gloo can lose one that begins just then.
        """
        # Without the lock, which a close that waits holds.
        wires, self._wires = self._wires, None
        store_wire, self._store_wire = self._store_wire, None
        is_forming = not self._is_formed
        if store_wire is not None and is_forming:
            store_wire.cut()  # a rank that has arrived and then vanished never tells where it listens
        if wires is not None:
            if is_forming:
                wires.note()  # whatever is there by now
            wires.cut(num_ranks=self._spec.world.size if is_forming else 0)

    def close(self) -> None:
        """End both groups. Safe to call again and from another thread; errors of a broken group are logged."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            mesh, self._control, self._mesh = self._mesh, None, None
            if mesh is not None:
                # torch's DTensor caches keep a mesh for the life of the process, and a mesh its groups: without this
                # a neighbour that waits would not see this rank go. A mesh with no group of its own finds it by name.
                mesh._pg_registry.clear()
            if self._is_joined:
                self._leave()

    def _leave(self) -> None:
        try:
            leave_group()
        except (RuntimeError, ValueError, AssertionError) as error:
            _log.warning("attempt %s: closing its groups: %s", self._spec.attempt.label, error)

    def _open(self, part: T | None) -> T:
        if part is None:
            raise AttemptAbandoned(self._spec.attempt.label, "its process groups are closed")
        return part

    def _meet(self, store: Store, check: Callable[[], None]) -> None:
        spec, started_at = self._spec, time.monotonic()
        if store.add("arrived", 1) == spec.world.size:
            store.set("all-arrived", "yes")
        while True:
            check()
            try:
                store.wait(["all-arrived"], timedelta(seconds=_LOOK_S))
                return
            except dist.DistStoreError:
                waited_s = time.monotonic() - started_at
                if waited_s >= spec.group_timeout_s:
                    num_arrived = store.add("arrived", 0)
                    label, size = spec.attempt.label, spec.world.size
                    raise FormingFailed(label, spec.rank, size, num_arrived, waited_s) from None

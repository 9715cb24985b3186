"""The process group of one Attempt and the device mesh over it.

Membership is decided elsewhere: ranks and the rendezvous store come in as arguments, and nothing is read from the
environment.
"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["REPLICA_DIM", "SHARD_DIM", "fitting_shard_size", "join_group", "leave_group", "world_mesh"]

REPLICA_DIM = "replica"
SHARD_DIM = "shard"


def join_group(store: Store, *, rank: int, world_size: int, device: torch.device, timeout_s: float) -> None:
    """Make the default group of this process. ``store`` must be fresh for the Attempt (a PrefixStore of its label)."""
    if dist.is_initialized():
        raise RuntimeError("a process group of an earlier Attempt is still open: leave it first")
    # torch names groups by a counter, sets it back only when a default group is destroyed, and has counted by the time
    # that making one fails: ranks that failed unequally often would look for each other under different names for ever.
    dist.distributed_c10d._world.group_count = 0
    excepthook = sys.excepthook
    try:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
    finally:
        sys.excepthook = excepthook  # torch wraps it anew each time, one layer an Attempt


def leave_group() -> None:
    """Close the default group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def world_mesh(device: torch.device, shard_size: int | None = None) -> DeviceMesh:
    """The mesh of all ranks of the current default group. Made anew per Attempt: a mesh outlives no group.

    ``shard_size``: of two dimensions, replicas of so many ranks each, or of the next larger number that divides the
    World, so that no rank ever holds more than it was meant to. Collective then.
    """
    ranks = torch.arange(dist.get_world_size())
    if shard_size is None:
        return DeviceMesh(device.type, ranks.tolist(), mesh_dim_names=(SHARD_DIM,))
    cut = fitting_shard_size(len(ranks), shard_size)
    return DeviceMesh(device.type, ranks.view(-1, cut).tolist(), mesh_dim_names=(REPLICA_DIM, SHARD_DIM))


def fitting_shard_size(world_size: int, shard_size: int) -> int:
    """The smallest divisor of ``world_size`` that is at least ``shard_size``; the whole World where there is none."""
    return next((size for size in range(shard_size, world_size) if world_size % size == 0), world_size)

"""The process group of one Attempt and the device mesh over it; nothing that torch keeps per process outlives them.

Membership is decided elsewhere: ranks and the rendezvous store come in as arguments, and nothing is read from the
environment.
"""

from __future__ import annotations

import logging
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, _unregister_all_process_groups
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _random

__all__ = ["REPLICA_DIM", "SHARD_DIM", "fitting_shard_size", "join_group", "leave_group", "world_mesh"]

_log = logging.getLogger(__name__)
REPLICA_DIM = "replica"
SHARD_DIM = "shard"


def join_group(store: Store, *, rank: int, world_size: int, device: torch.device, timeout_s: float) -> None:
    """Make the default group of this process. ``store`` must be fresh for the Attempt (a PrefixStore of its label)."""
    if dist.is_initialized():  # what was to close it was struck just before: nobody uses it any more
        _log.warning("a process group of an earlier Attempt was still open; it is closed now")
    try:
        leave_group()
    except (RuntimeError, ValueError, AssertionError) as error:
        _log.warning("a process group of an earlier Attempt is forgotten, since it could not be closed: %s", error)
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
    except BaseException:
        leave_group()  # made already where the barrier behind it failed (TORCH_DIST_INIT_BARRIER)
        raise
    finally:
        sys.excepthook = excepthook  # torch wraps it anew each time, one layer an Attempt


def leave_group() -> None:
    """Close the default group, if there is one. Where that fails the groups are forgotten all the same."""
    try:
        if dist.is_initialized():
            dist.destroy_process_group()
    finally:
        _forget_groups()


def _forget_groups() -> None:
    """What would make this process differ for ever from one that is fresh.

    torch names groups by a counter, which it sets back only when all went well to the end: ranks that failed unequally
    often would look for each other under different names. A group that it could not destroy would forbid the next one.
    And a rank's first random draw on a DTensor is a collective, for the sake of which it keeps that there was one.
    """
    world = distributed_c10d._world
    distributed_c10d._update_default_pg(None)
    by_group: list[dict[Any, Any]] = [world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config]
    by_group += [world.pg_to_tag, world.tags_to_pg, world.pg_coalesce_state]
    for known in by_group:
        known.clear()
    _unregister_all_process_groups()
    world.group_count = 0
    _random._rng_tracker = None


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

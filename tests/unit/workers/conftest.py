"""A real gloo group of one rank, for the tests of sharded models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh

from workers.mesh import join_group, leave_group, world_mesh


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    device = torch.device("cpu")
    torch.set_num_threads(1)
    join_group(HashStore(), rank=0, world_size=1, device=device, timeout_s=30.0)
    yield world_mesh(device)
    leave_group()

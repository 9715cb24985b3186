"""What each rank process of `test_dcp_standalone` does: plain torch in worlds of several sizes, one by one.

Every phase writes one JSON file per rank; the test in the parent process judges them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from storage import RaysumeReader, RaysumeWriter
from storage.config import CheckpointConfig
from storage.dcp_standalone import load, own_errors
from tests.fakes.small_training import build_state, train_step
from workers.names import named_parameters
from workers.snapshot import capture

NUM_PROCESSES = 3
_GROUP_TIMEOUT = timedelta(seconds=60)
ASYNC_STEPS = 15
ASYNC_ELEMENTS = 12 << 20  # 48 MiB of float32
REPLICAS = {"a": 300_000, "b": 200_000, "c": 100_000, "d": 90_000}


def run(rank: int, folder: Path, phases: list[tuple[str, int]]) -> None:
    """All ``phases`` (name, world size) in order, as far as ``rank`` is a member of their worlds."""
    torch.set_num_threads(1)
    for name, size in phases:
        if rank < size:
            store = FileStore(str(folder / f"store-{name}"), size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_GROUP_TIMEOUT)
            report = _PHASES[name.partition("-")[0]](folder, rank, size)
            dist.barrier()
            dist.destroy_process_group()
            (folder / f"{name}-{rank}.json").write_text(json.dumps(report))


def _replicated(value: float) -> dict[str, Any]:
    return {name: torch.full((count,), value) for name, count in REPLICAS.items()}


def _save_replicated(folder: Path, rank: int, size: int) -> dict[str, Any]:
    """As under DDP: the same tensors on each rank, and one plain value that differs."""
    del size
    state = {"model": _replicated(1.0), "lr": 0.5, "pos": 100 + rank}
    config = CheckpointConfig(encoding="raw")
    dcp.save(state, storage_writer=RaysumeWriter(folder / "replicated", step=1, config=config))
    return {}


def _load_replicated(folder: Path, rank: int, size: int) -> dict[str, Any]:
    del rank, size
    state = {"model": _replicated(0.0), "lr": 0.0, "pos": -1}
    refused = ""
    try:
        load(state, RaysumeReader(folder / "replicated"))
    except Exception as error:  # noqa: BLE001  judged by the test
        refused = f"{type(error).__name__}: {error}"
        load(state, RaysumeReader(folder / "replicated", allow_partial=True))
    return {
        "pos": state["pos"],
        "lr": state["lr"],
        "ones": all(bool((tensor == 1).all()) for tensor in state["model"].values()),
        "refused": refused,
    }


def _sharded(folder: Path, rank: int, size: int) -> dict[str, torch.Tensor]:
    """A sharded model with optimizer and awkward shapes; tied names are there twice, as a state_dict has them."""
    del folder, rank
    state = build_state(_mesh(size), seed=3)
    train_step(state, weight=1 / size)
    tensors = capture(state, rank=0, world_size=1, rng=False).tensors
    parameters = dict(named_parameters(state.model))
    tensors["model.head.weight"] = parameters["embedding.weight"]
    return tensors


def _mesh(size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))


def _save_sharded(folder: Path, rank: int, size: int) -> dict[str, Any]:
    tensors = _sharded(folder, rank, size)
    dcp.save({"tensors": tensors}, storage_writer=RaysumeWriter(folder / "sharded", step=1))
    return {"digests": _digests(tensors)}


def _load_sharded(folder: Path, rank: int, size: int) -> dict[str, Any]:
    tensors = _sharded(folder, rank, size)
    for tensor in tensors.values():
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().zero_()
    dcp.load({"tensors": tensors}, storage_reader=RaysumeReader(folder / "sharded"))
    return {"digests": _digests(tensors)}


def _digests(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    found = {}
    for name, tensor in tensors.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found[name] = f"{tuple(full.shape)} {hashlib.sha256(full.detach().contiguous().numpy().tobytes()).hexdigest()}"
    return found


def _fail(folder: Path, rank: int, size: int) -> dict[str, Any]:
    """Rank 1 alone has something that cannot be stored; the next save is good."""
    del size
    state: dict[str, Any] = {"w": torch.ones(4), "thing": {1} if rank == 1 else 2}
    message = ""
    try:
        with own_errors("save"):
            dcp.save(state, storage_writer=RaysumeWriter(folder / "failed", step=1))
    except Exception as error:  # noqa: BLE001  judged by the test
        message = " ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    dcp.save({"w": torch.ones(4)}, storage_writer=RaysumeWriter(folder / "failed", step=2))
    return {"message": message}


def _train_beside_async_saves(folder: Path, rank: int, size: int) -> dict[str, Any]:
    """A save every step on a group of its own, while every step all-reduces on the default group."""
    own = dist.new_group(backend="gloo", timeout=_GROUP_TIMEOUT)
    weights = torch.zeros(ASYNC_ELEMENTS)
    pending = None
    for step in range(1, ASYNC_STEPS + 1):
        weights.fill_(step)
        for _ in range(20):
            total = torch.ones(1000)
            dist.all_reduce(total)
            assert bool((total == size).all())
        if pending is not None:
            pending.result(timeout=60)
        writer = RaysumeWriter(folder / "async", step=step, keep=2)
        pending = dcp.async_save({"w": weights, "step": step}, storage_writer=writer, process_group=own)
    weights.fill_(-1)
    loaded = {"w": torch.zeros(ASYNC_ELEMENTS), "step": 0}
    reader = RaysumeReader(folder / "async")
    dcp.load(loaded, storage_reader=reader, process_group=own)
    return {
        "groups": [own.group_name, dist.group.WORLD.group_name],
        "step": loaded["step"],
        "values": loaded["w"].unique().tolist(),
        "rank": rank,
    }


_PHASES: dict[str, Callable[[Path, int, int], dict[str, Any]]] = {
    "save_replicated": _save_replicated,
    "load_replicated": _load_replicated,
    "save_sharded": _save_sharded,
    "load_sharded": _load_sharded,
    "fail": _fail,
    "async": _train_beside_async_saves,
}

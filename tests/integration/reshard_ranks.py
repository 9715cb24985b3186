"""What each rank process of `test_reshard` does: one process takes part in worlds of several sizes, one after another.

Every phase writes one JSON file per rank; the test in the parent process judges them.
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from storage.local_store import LocalStore
from storage.manifest import Receipt
from tests.fakes.recording_sink import RecordingSink
from tests.fakes.small_training import build_state, commit, newest_plan, save, train_step
from workers.mesh import join_group, leave_group, world_mesh
from workers.names import named_parameters
from workers.plain_state import NotPlain
from workers.resume import restore
from workers.snapshot import RANK_TRACKER, capture
from workers.state import TrainingState

NUM_PROCESSES = 5
FRESH_SIZES = (1, 2, 3)
SAVE_SIZE = 4
LOAD_SIZES = (4, 3, 5, 1, 5)
_CPU = torch.device("cpu")


def run(rank: int, folder: Path) -> None:
    """All phases in order, as far as ``rank`` is a member of their worlds."""
    torch.set_num_threads(1)
    torch.manual_seed(1234)  # the same everywhere: only what a phase sets itself may differ between ranks
    phases: list[tuple[str, int]] = [(f"fresh-{size}", size) for size in FRESH_SIZES]
    phases += [("save", SAVE_SIZE)]
    phases += [(f"load-{index}-{size}", size) for index, size in enumerate(LOAD_SIZES)]
    for name, size in phases:
        # The next world forms only after rank 0 has ended this one, its commit included.
        if rank < size:
            store = FileStore(str(folder / f"store-{name}"), size)
            join_group(store, rank=rank, world_size=size, device=_CPU, timeout_s=60.0)
            report = _phase(name, world_mesh(_CPU), rank, size, folder)
            leave_group()
            (folder / f"{name}-{rank}.json").write_text(json.dumps(report))


def _phase(name: str, mesh: DeviceMesh, rank: int, size: int, folder: Path) -> dict[str, Any]:
    if name.startswith("fresh"):
        return {"digests": digests(build_state(mesh, seed=3))}
    store = LocalStore(folder / "run")
    if name == "save":
        return _save(mesh, rank, size, folder, store)
    state = build_state(mesh, seed=77, init_weights=False)
    own, drifting = _add_trackers(state, rank, is_fresh=True)
    dict(named_parameters(state.model))["frozen_later"].requires_grad_(False)
    report = restore(state, newest_plan(store), store, rank=rank, world_size=size)
    return {
        "digests": digests(state),
        "progress": asdict(state.progress),
        "lr": [group["lr"] for group in state.optimizer.param_groups],
        "draws": draws(),
        "reseeded": report.reseeded,
        "own": own.told(),
        "drifting": drifting.position,
        "lines": report.lines,
        "loss": train_step(state, weight=1 / size),
    }


def _save(mesh: DeviceMesh, rank: int, size: int, folder: Path, store: LocalStore) -> dict[str, Any]:
    torch.manual_seed(1000 + rank)
    np.random.seed(1000 + rank)
    random.seed(1000 + rank)
    state = build_state(mesh, seed=3)
    own, _ = _add_trackers(state, rank, is_fresh=False)
    train_step(state, weight=1 / size)
    train_step(state, weight=1 / size)
    dict(named_parameters(state.model))["frozen_later"].requires_grad_(False)
    train_step(state, weight=1 / size)
    sink = RecordingSink()
    result = save(state, store, sink, rank=rank, world_size=size)
    assert result.staged
    (folder / f"receipt-{rank}.json").write_text(sink.receipts[0].model_dump_json())
    report = {
        "digests": digests(state),
        "progress": asdict(state.progress),
        "lr": [group["lr"] for group in state.optimizer.param_groups],
        "own": own.told(),
        "refused": _refused(state),
        "draws": draws(),
        "loss": train_step(state, weight=1 / size),
    }
    dist.barrier()
    if rank == 0:
        files = [folder / f"receipt-{other}.json" for other in range(size)]
        commit(store, [Receipt.model_validate_json(file.read_text()) for file in files])
    return report


def _refused(state: TrainingState) -> list[str]:
    """What is said of optimizer state that another World could not be given."""
    said: list[str] = []
    few = dict(named_parameters(state.model))["few"]
    entries = state.optimizer.state[few]
    assert isinstance(few, DTensor)
    for wrong in (torch.zeros(2), few.detach().sum(1)):
        entries["factored"] = wrong
        try:
            capture(state, rank=0, world_size=SAVE_SIZE)
        except NotPlain as error:
            said.append(str(error))
        del entries["factored"]
    return said


class Position:
    """A rank's own number, and as many values as its number says."""

    def __init__(self, position: int, size: int) -> None:
        self.position, self.values = position, torch.full((size,), float(position))

    def told(self) -> list[float]:
        return [self.position, *self.values.tolist()]

    def state_dict(self) -> dict[str, Any]:
        return {"pos": self.position, "values": self.values}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position, self.values = state_dict["pos"], state_dict["values"]


def _add_trackers(state: TrainingState, rank: int, *, is_fresh: bool) -> tuple[Position, Position]:
    """One of the rank's own, and one that differs from rank to rank where it should not."""
    own = Position(0 if is_fresh else 100 + rank, 1 + rank)
    drifting = Position(0 if is_fresh else 200 + rank, 1)
    state.rank_trackers["loader"], state.trackers["drifting"] = own, drifting
    return own, drifting


def digests(state: TrainingState) -> dict[str, str]:
    """Digest of every whole tensor of the state but those that are a rank's own. Collective."""
    found: dict[str, str] = {}
    for name, tensor in capture(state, rank=0, world_size=1, rng=False).tensors.items():
        if name.startswith(RANK_TRACKER):
            continue
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found[name] = f"{tuple(full.shape)} {hashlib.sha256(full.detach().contiguous().numpy().tobytes()).hexdigest()}"
    return found


def draws() -> list[float]:
    """The next number of each generator."""
    return [float(torch.rand(1)), float(np.random.rand()), random.random()]

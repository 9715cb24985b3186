"""What each rank process of `test_parallelism` does: the same training sharded, replicated and alone, at several sizes.

Every phase writes one JSON file per rank; the test in the parent process judges them.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from storage.local_store import LocalStore
from storage.manifest import Receipt
from storage.replicas import ReplicasDisagree
from tests.fakes.recording_sink import RecordingSink
from tests.fakes.small_training import (
    OPTIM,
    TOTAL_STEPS,
    OddModel,
    build_state,
    commit,
    newest_plan,
    save,
)
from workers.config import ModelConfig
from workers.mesh import join_group, leave_group, world_mesh
from workers.models import materialize
from workers.names import named_parameters
from workers.optim import build_optimizer, build_scheduler
from workers.replicated import accumulate_in_double
from workers.resume import restore
from workers.snapshot import capture
from workers.state import TrainingState
from workers.stream import Leaf
from workers.train_step import TrainStep

Kind = Literal["fsdp", "hsdp", "ddp", "alone"]

NUM_LEAVES = 5
STEPS = 3
NUM_PROCESSES = 4
SIZES = (1, 2, 3)
SHARD_SIZE = 2  # of hsdp: two replicas in a World of four, one in a World of three
KINDS: tuple[Kind, ...] = ("alone", "fsdp", "hsdp", "ddp")
SAVED: dict[Kind, int] = {"alone": 1, "fsdp": 2, "hsdp": 4, "ddp": 2}
TRAINED: tuple[tuple[Kind, int], ...] = (
    ("alone", 1),
    *((kind, size) for kind in KINDS[1:] for size in SIZES),
    ("hsdp", 4),
)
LOADED: tuple[tuple[Kind, int], ...] = (("alone", 1), ("fsdp", 3), ("hsdp", 4), ("ddp", 2), ("ddp", 1))
FLIPPED: dict[Kind, str] = {"ddp": "single", "fsdp": "temperature", "hsdp": "few"}
_CPU = torch.device("cpu")


class Branchy(OddModel):
    """One parameter that few leaves use, one that none does, one that does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Parameter(torch.empty(5))
        self.never = nn.Parameter(torch.empty(5))
        self.frozen = nn.Parameter(torch.empty(5), requires_grad=False)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for parameter in (self.rare, self.never, self.frozen):
            if parameter is not None:
                nn.init.uniform_(parameter, 0.5, 1.0)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = super().forward(ids)
        if ids[0, 0] == 1:
            logits = logits * self.rare.mean()
        return logits * self.frozen.mean()


class Leaves:
    """The leaves of one rank: ids that tell step and leaf."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def leaves(self, step: int) -> Iterator[Leaf]:
        for index in range(self._rank, -(-NUM_LEAVES // self._size) * self._size, self._size):
            number = min(index, NUM_LEAVES - 1)
            ids = (torch.arange(12).view(3, 4) * (step + 1) + number).remainder(7)
            yield Leaf(
                index=number,
                is_surplus=index >= NUM_LEAVES,
                input_ids=ids,
                labels=ids.roll(1, 1),
                sample_ids=(torch.arange(3) + 3 * number).numpy(),
            )


def run(rank: int, folder: Path) -> None:
    """All phases in order, as far as ``rank`` is a member of their worlds."""
    torch.set_num_threads(1)
    phases: list[tuple[str, int]] = [(f"train-{kind}-{size}", size) for kind, size in TRAINED]
    phases += [(f"load-{saved}-{kind}-{size}", size) for saved in KINDS for kind, size in LOADED]
    phases += [(f"branchy-ddp-{size}", size) for size in SIZES] + [("branchy-alone-1", 1)]
    phases += [(f"double-ddp-{size}", size) for size in SIZES]
    phases += [("flip-ddp-3", 3), ("flip-ddp-2", 2), ("flip-fsdp-3", 3), ("flip-hsdp-4", 4)]
    for name, size in phases:
        if rank < size:
            store = FileStore(str(folder / f"store-{name}"), size)
            join_group(store, rank=rank, world_size=size, device=_CPU, timeout_s=60.0)
            mesh = world_mesh(_CPU, SHARD_SIZE if "hsdp" in name.split("-")[-2] else None)
            report = _phase(name, mesh, rank, size, folder)
            leave_group()
            (folder / f"{name}-rank-{rank}.json").write_text(json.dumps(report))


def _phase(name: str, mesh: DeviceMesh, rank: int, size: int, folder: Path) -> dict[str, Any]:
    what, *more = name.split("-")
    if what == "train":
        return _train(more[0], mesh, rank, size, folder)  # type: ignore[arg-type]
    if what == "load":
        return _load(more[0], more[1], mesh, rank, size, folder)  # type: ignore[arg-type]
    if what == "flip":
        return _flip(more[0], mesh, rank, size, folder / name)  # type: ignore[arg-type]
    with torch.device("meta"):
        model = Branchy() if what == "branchy" else OddModel()
    state = make(more[0], mesh, model)  # type: ignore[arg-type]
    if what == "double":
        accumulate_in_double(state.model)
    norms = train(state, rank, size)
    return {
        "norms": norms,
        "digests": digests(state),
        "values": values(state),
        "with_moments": sorted(name for name, p in named_parameters(state.model) if p in state.optimizer.state),
    }


def make(kind: Kind, mesh: DeviceMesh, model: nn.Module | None = None, *, init_weights: bool = True) -> TrainingState:
    """``alone``: a plain module that nothing of a World has touched."""
    if model is None:
        with torch.device("meta"):
            model = OddModel()
    if kind != "alone":
        config = ModelConfig(parallelism=kind, shard_size=SHARD_SIZE if kind == "hsdp" else None)
        return build_state(mesh, seed=3, model=model, init_weights=init_weights, config=config)
    materialize(model, "cpu", 3, init_weights=init_weights)
    optimizer = build_optimizer(model, OPTIM)
    scheduler = build_scheduler(optimizer, OPTIM, TOTAL_STEPS)
    return TrainingState(model=model, optimizer=optimizer, scheduler=scheduler)


def train(state: TrainingState, rank: int, size: int, *, clip_norm: float = 0.5) -> list[float]:
    """Steps as a Session takes them; the gradient norms."""
    norms = []
    for number in range(state.progress.step + 1, state.progress.step + 1 + STEPS):
        step = TrainStep(
            number,
            state=state,
            stream=Leaves(rank, size),  # type: ignore[arg-type]
            device=_CPU,
            num_leaves=NUM_LEAVES,
            rank=rank,
            world_size=size,
            clip_norm=clip_norm,
            measured=False,
            check=lambda: None,
        )
        for leaf in step.leaves():
            logits = state.model(leaf.input_ids)
            step.backward(leaf, nn.functional.cross_entropy(logits.flatten(0, 1), leaf.labels.flatten()))
        norms.append(step.apply().item())
        state.progress.step = number
    return norms


def _train(kind: Kind, mesh: DeviceMesh, rank: int, size: int, folder: Path) -> dict[str, Any]:
    state = make(kind, mesh)
    norms = train(state, rank, size)
    sink = RecordingSink()
    assert save(state, LocalStore(folder / f"run-{kind}-{size}"), sink, rank=rank, world_size=size).staged
    receipts = gathered(sink.receipts[0])
    if rank == 0:
        commit(LocalStore(folder / f"run-{kind}-{size}"), receipts)
    report = {
        "norms": norms,
        "digests": digests(state),
        "values": values(state),
        "lr": [group["lr"] for group in state.optimizer.param_groups],
        "scheduler": state.scheduler.state_dict()["last_epoch"],
        "names": sorted(capture(state, rank=rank, world_size=size).tensors),
        "shards": sorted(
            name
            for name, tensor in capture(state, rank=0, world_size=1, rng=False).tensors.items()
            if isinstance(tensor, DTensor)
        ),
        "is_whole": all(not isinstance(parameter, DTensor) for parameter in state.model.parameters()),
    }
    reference = weakref.ref(state.model)
    del state
    return report | {"is_freed": reference() is None}


def _load(saved: Kind, kind: Kind, mesh: DeviceMesh, rank: int, size: int, folder: Path) -> dict[str, Any]:
    store = LocalStore(folder / f"run-{saved}-{SAVED[saved]}")
    state = make(kind, mesh, init_weights=False)
    restore(state, newest_plan(store), store, rank=rank, world_size=size)
    return {
        "digests": digests(state),
        "progress": asdict(state.progress),
        "lr": [group["lr"] for group in state.optimizer.param_groups],
        "scheduler": state.scheduler.state_dict()["last_epoch"],
        "next_norms": train(state, rank, size),
    }


def _flip(kind: Kind, mesh: DeviceMesh, rank: int, size: int, folder: Path) -> dict[str, Any]:
    """Two saves: a healthy one, and one after a bit of one weight has changed on rank 1."""
    state = make(kind, mesh)
    train(state, rank, size)
    said = []
    for is_healthy in (True, False):
        if rank == 1 and not is_healthy:
            with torch.no_grad():
                weight = dict(named_parameters(state.model))[FLIPPED[kind]].detach()
                local = weight.to_local() if isinstance(weight, DTensor) else weight
                local.view(torch.int32).bitwise_xor_(1 << 3)
        if not is_healthy:
            train(state, rank, size)
        sink = RecordingSink()
        save(state, LocalStore(folder), sink, rank=rank, world_size=size)
        receipts = gathered(sink.receipts[0])
        try:
            if rank == 0:
                commit(LocalStore(folder), receipts)
            said.append("committed")
        except ReplicasDisagree as error:
            said.append(str(error))
    return {"said": said}


def gathered(receipt: Receipt) -> list[Receipt]:
    texts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(texts, receipt.model_dump_json())
    return [Receipt.model_validate_json(text) for text in texts]


def _whole(state: TrainingState) -> Iterator[tuple[str, torch.Tensor]]:
    """Every whole tensor of the state but the RNG's. Collective."""
    for name, tensor in capture(state, rank=0, world_size=1, rng=False).tensors.items():
        yield name, (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().contiguous()


def digests(state: TrainingState) -> dict[str, str]:
    return {name: hashlib.sha256(full.numpy().tobytes()).hexdigest()[:16] for name, full in _whole(state)}


def values(state: TrainingState) -> dict[str, list[float]]:
    return {name: full.double().flatten().tolist() for name, full in _whole(state) if name.startswith("model.")}

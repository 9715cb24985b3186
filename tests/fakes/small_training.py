"""A model of awkward shapes with its optimizer, and the few calls that save and commit it without Ray."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch
from pydantic import JsonValue
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from storage.commit_log import CommitLog
from storage.config import CheckpointConfig
from storage.direct import DirectKeeper
from storage.keeper_protocol import ReceiptSink
from storage.keys import Attempt
from storage.manifest import AttemptRecord, Commit, Receipt
from storage.merge import merge_receipts
from storage.object_store import ObjectStore
from storage.restore import plan_restore
from storage.sources import RestorePlan
from tests.fakes.recording_sink import RecordingSink
from workers.config import ModelConfig, OptimConfig
from workers.models import materialize
from workers.optim import build_optimizer, build_scheduler
from workers.parallelize import parallelize, reduced_gradients, scale_gradients
from workers.snapshot import capture
from workers.staging import Stager, StageResult
from workers.state import Progress, TrainingState

RUN_ID = "run"
ATTEMPT = Attempt(number=1, nonce="0badcafe")
OPTIM = OptimConfig(lr=0.1, warmup_steps=5, weight_decay=0.0, clip_norm=1e9)
TOTAL_STEPS = 100
NO_BLOCKS = ModelConfig(config={"model_type": "llama"})


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.dropout(self.linear(self.norm(x)))
        return out


class OddModel(nn.Module):
    """Fewer rows than ranks, one element, no dimension, tied weights, buffers stored and recomputed."""

    count: torch.Tensor
    scale: torch.Tensor

    def __init__(self, num_blocks: int = 2, width: int = 5, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(num_blocks))
        self.single = nn.Parameter(torch.empty(1))
        self.wide = nn.Parameter(torch.empty(1, 17))
        self.few = nn.Parameter(torch.empty(3, width))
        self.temperature = nn.Parameter(torch.empty(()))
        self.frozen_later = nn.Parameter(torch.empty(6, width))
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.empty((), dtype=torch.int64))
        self.register_buffer("scale", torch.empty(3), persistent=False)

    def reset_parameters(self) -> None:
        for parameter in (self.single, self.wide, self.few, self.temperature, self.frozen_later):
            if parameter is not None:
                nn.init.uniform_(parameter, 0.5, 1.0)

    def reset_buffers(self) -> None:
        self.count.fill_(3)
        self.scale.copy_(torch.tensor([1.0, 0.5, 0.25]))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        bias = (
            (self.few * self.scale.to(self.few.dtype)[:, None]).sum(0) * self.single
            + self.wide.mean()
            + self.frozen_later.sum(0)
        )
        logits: torch.Tensor = self.head((x + bias) * self.temperature)
        return logits


def build_state(
    mesh: DeviceMesh,
    *,
    seed: int = 0,
    model: nn.Module | None = None,
    init_weights: bool = True,
    config: ModelConfig = NO_BLOCKS,
) -> TrainingState:
    """A sharded `OddModel` (or ``model``, made on meta) with optimizer and scheduler."""
    if model is None:
        with torch.device("meta"):
            model = OddModel()
    parallelize(model, config, mesh)
    materialize(model, "cpu", seed, init_weights=init_weights)
    optimizer = build_optimizer(model, OPTIM)
    return TrainingState(
        model=model,
        optimizer=optimizer,
        scheduler=build_scheduler(optimizer, OPTIM, TOTAL_STEPS),
        progress=Progress(),
    )


def train_step(state: TrainingState, *, weight: float = 1.0) -> float:
    """One optimizer step on a fixed batch; ``weight`` is 1 / world size. Returns the loss."""
    ids = torch.arange(12).remainder(7).view(3, 4)
    logits = state.model(ids)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.roll(1, 1).flatten())
    torch.autograd.backward(loss * weight)
    scale_gradients(reduced_gradients(state.model), OPTIM.clip_norm)
    state.optimizer.step()
    state.scheduler.step()
    state.optimizer.zero_grad(set_to_none=True)
    state.progress.step += 1
    state.progress.position += ids.shape[0]
    state.progress.tokens += ids.numel()
    return float(loss.detach())


def save(
    state: TrainingState, store: ObjectStore, sink: ReceiptSink, *, rank: int = 0, world_size: int = 1
) -> StageResult:
    """Capture, stage and ship the state of one rank."""
    with DirectKeeper(store, sink, CheckpointConfig()) as keeper:
        stager = Stager(keeper, RUN_ID, os.getpid())
        result = stager.stage(
            capture(state, rank=rank, world_size=world_size),
            attempt=ATTEMPT,
            step=state.progress.step,
            rank=rank,
            world_size=world_size,
            wait_s=5.0,
        )
        stager.close()
        return result


def commit(
    store: ObjectStore,
    receipts: Sequence[Receipt],
    *,
    attempt: Attempt = ATTEMPT,
    metadata: Mapping[str, JsonValue] | None = None,
) -> None:
    """Make the Checkpoint real."""
    log = CommitLog(store, RUN_ID)
    manifest = merge_receipts(receipts, time_utc="2026-01-01T00:00:00Z", metadata=metadata or {}, ledger=None)
    stored = log.write_manifest(manifest)
    log.append(
        Commit(
            run_id=RUN_ID,
            step=manifest.step,
            attempt=AttemptRecord.of(attempt),
            base_step=0,
            time_utc=manifest.time_utc,
            manifest_key=stored.key,
            manifest_bytes=stored.num_bytes,
            manifest_digest=stored.digest,
            stored_bytes=manifest.stored_bytes,
        )
    )


def newest_plan(store: ObjectStore, *, allow_partial: bool = False) -> RestorePlan:
    """The plan of the next Attempt."""
    attempt = Attempt(number=ATTEMPT.number + 1, nonce="11111111")
    plan = plan_restore(CommitLog(store, RUN_ID), attempt=attempt, allow_partial=allow_partial)
    assert plan is not None
    return plan


def save_alone(
    state: TrainingState, store: ObjectStore, *, metadata: Mapping[str, JsonValue] | None = None
) -> RestorePlan:
    """Save and commit a world of one; the plan that restores it."""
    sink = RecordingSink()
    save(state, store, sink)
    commit(store, sink.receipts, metadata=metadata)
    return newest_plan(store)

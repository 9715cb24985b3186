"""A real coordinator over a store in memory, and the Receipts and reports that tests give it."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from orchestrator.committer import Committer
from orchestrator.coordinator import Coordinator
from orchestrator.patient_store import PatientStore
from orchestrator.save_config import SavePolicyConfig
from storage.commit_log import CommitLog
from storage.config import CheckpointConfig
from storage.keys import Attempt, StepKey, shard_key
from storage.manifest import AttemptRecord, ChunkPlace, Receipt, ShardRecord, TensorLayout
from storage.memory_store import MemoryStore
from workers.contract import StepReport

FIRST = Attempt(number=1, nonce="0000aaaa")
SECOND = Attempt(number=2, nonce="0000aaaa")
RUN = "run-1"
WAIT_S = 10.0


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Ticking(Clock):
    """A clock that moves a little at each look, so that bounded waits end."""

    def __call__(self) -> float:
        self.now += 1e-4
        return self.now


def make(
    config: CheckpointConfig | None = None,
    clock: Clock | None = None,
    memory: MemoryStore | None = None,
    pause: Callable[[], object] = lambda: None,
    policy: SavePolicyConfig | None = None,
) -> tuple[Coordinator, CommitLog, MemoryStore]:
    store = memory or MemoryStore()
    config = config or CheckpointConfig(every_steps=10)
    counter = itertools.count()
    patient = PatientStore(store, limit_s=3600.0, pause=lambda _: pause())
    committer = Committer(
        run_id=RUN,
        store=patient,
        config=config,
        metadata={"git_commit": None},
        now_utc=lambda: f"2026-01-01T00:00:{next(counter) % 60:02d}Z",
        monotonic=clock or Ticking(),
    )
    coordinator = Coordinator(
        committer=committer,
        store=patient,
        config=config,
        policy=policy or SavePolicyConfig(),
        total_steps=100,
        monotonic=clock or Ticking(),
    )
    return coordinator, CommitLog(store, RUN), store


def receipt(store: MemoryStore, attempt: Attempt, step: int, rank: int, world_size: int = 2) -> Receipt:
    key = shard_key(StepKey(step=step, attempt=attempt), rank)
    store.put(key, b"x" * 10)
    layout = TensorLayout(
        dtype="float32",
        shape=(world_size, 3),
        level="L1",
        chunks=(ChunkPlace(rank=rank, offsets=(rank, 0), sizes=(1, 3)),),
    )
    return Receipt(
        run_id=RUN,
        step=step,
        attempt=AttemptRecord.of(attempt),
        world_size=world_size,
        shard=ShardRecord(rank=rank, key=key, size=10, digest="0" * 32, index_bytes=1, index_digest="0" * 32),
        tensors={"model.weight": layout},
        shared_state={"progress": {"step": step}} if rank == 0 else None,
        stall_s=0.1 * (rank + 1),
        upload_s=0.2,
    )


def report(step: int) -> StepReport:
    return StepReport(
        step=step,
        loss=1.0 / step,
        grad_norm=1.0,
        lr=0.1,
        tokens=step * 8,
        position=step * 4,
        sample_chain=f"{step:032x}",
        step_s=0.1,
        finished_at_s=0.0,
    )


def commit_step(coordinator: Coordinator, store: MemoryStore, attempt: Attempt, step: int) -> None:
    for rank in range(2):
        assert coordinator.deliver(receipt(store, attempt, step, rank))
    assert coordinator.wait_settled(step, WAIT_S)

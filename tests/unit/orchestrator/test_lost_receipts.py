"""Saves that will never be whole, as after the death of a Keeper, and rank 0's cadence: the run is saved again after.

Real: the coordinator and what rank 0 binds. A World of two ranks is played without processes.
"""

from __future__ import annotations

import itertools

from orchestrator.committer import Committer
from orchestrator.coordinator import Coordinator
from orchestrator.patient_store import PatientStore
from orchestrator.save_config import SavePolicyConfig
from orchestrator.signals import SaveFailed
from storage.config import CheckpointConfig
from storage.keys import Attempt, StepKey, shard_key
from storage.manifest import AttemptRecord, ChunkPlace, Receipt, ShardRecord, TensorLayout
from storage.memory_store import MemoryStore
from workers.contract import ExchangeRequest
from workers.order_plan import OrderBinder

ATTEMPT = Attempt(number=1, nonce="0000aaaa")
EVERY_STEPS = 5
WAIT_S = 10.0
_STEP_S = 6.0


class PlayedWorld:
    """Two ranks of which the second takes part in the saves of some steps only."""

    def __init__(self) -> None:
        ticks = itertools.count()
        self.store = MemoryStore()
        config = CheckpointConfig(every_steps=EVERY_STEPS)
        patient = PatientStore(self.store, limit_s=3600.0, pause=lambda _: None)
        committer = Committer(
            run_id="run-1",
            store=patient,
            config=config,
            metadata={},
            now_utc=lambda: f"2026-01-01T00:00:{next(ticks) % 60:02d}Z",
            monotonic=lambda: next(ticks) * 1e-4,
        )
        self.coordinator = Coordinator(
            committer=committer,
            store=patient,
            config=config,
            policy=SavePolicyConfig(),
            total_steps=10_000,
            monotonic=lambda: next(ticks) * 1e-4,
        )
        self.coordinator.begin_attempt(ATTEMPT, world_size=2, base_step=0)
        self.now_s = 0.0
        self.binder = OrderBinder(total_steps=10_000, every_steps=EVERY_STEPS, monotonic=lambda: self.now_s)
        self.bound: list[int] = []

    def train(self, steps: range, *, second_rank_delivers: bool) -> None:
        for step in steps:
            self.now_s = step * _STEP_S
            binding = self.binder.bind(step, None)
            news = ExchangeRequest(
                attempt=ATTEMPT,
                bound=() if binding.bound is None else (binding.bound,),
                skipped=() if binding.skipped_step is None else (binding.skipped_step,),
            )
            self.coordinator.exchange(news)
            if binding.bound is not None:
                self._save(binding.bound.step, second_rank_delivers=second_rank_delivers)
            self.binder.settle(self.coordinator.exchange(ExchangeRequest(attempt=ATTEMPT)).settled_steps)

    def _save(self, step: int, *, second_rank_delivers: bool) -> None:
        self.bound.append(step)
        for rank in (0, 1) if second_rank_delivers else (0,):
            self.coordinator.deliver(self._receipt(step, rank))
        if second_rank_delivers:
            assert self.coordinator.wait_settled(step, WAIT_S)

    def _receipt(self, step: int, rank: int) -> Receipt:
        key = shard_key(StepKey(step=step, attempt=ATTEMPT), rank)
        self.store.put(key, b"x" * 10)
        place = ChunkPlace(rank=rank, offsets=(rank, 0), sizes=(1, 3))
        return Receipt(
            run_id="run-1",
            step=step,
            attempt=AttemptRecord.of(ATTEMPT),
            world_size=2,
            shard=ShardRecord(rank=rank, key=key, size=10, digest="0" * 32, index_bytes=1, index_digest="0" * 32),
            tensors={"model.weight": TensorLayout(dtype="float32", shape=(2, 3), level="L1", chunks=(place,))},
            shared_state={"progress": {"step": step}} if rank == 0 else None,
            stall_s=0.1,
            upload_s=0.2,
        )


def test_saves_that_a_keeper_took_along_do_not_keep_the_cadence_from_saving_for_good() -> None:
    world = PlayedWorld()
    world.train(range(1, 12), second_rank_delivers=False)
    lost = tuple(world.bound)
    assert set(world.coordinator.pending()) == set(lost)
    world.train(range(12, 60), second_rank_delivers=True)
    saved = [step for step in world.bound if world.coordinator.has_committed(step)]
    # No longer than until the fourth that falls due; from there on each of them again.
    assert saved[0] <= lost[-1] + 4 * EVERY_STEPS
    assert saved == list(range(saved[0], world.bound[-1] + 1, EVERY_STEPS))
    assert world.coordinator.pending() == {}
    world.coordinator.close()


def test_a_rank_that_never_delivers_lets_no_receipts_gather_without_end() -> None:
    world = PlayedWorld()
    world.train(range(1, 1000), second_rank_delivers=False)
    assert len(world.bound) > 40
    assert len(world.coordinator.pending()) <= 8
    given_up = [signal.step for signal in world.coordinator.drain_signals() if isinstance(signal, SaveFailed)]
    assert given_up == world.bound[: len(given_up)]
    world.coordinator.close()

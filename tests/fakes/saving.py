"""Whole saves with the real code and without torch: every rank's Snapshot by a Keeper to Receipts, then the Commit."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from orchestrator.committer import Committer
from storage.buffer_map import map_buffer
from storage.config import CheckpointConfig
from storage.direct import DirectKeeper
from storage.keeper import Keeper
from storage.keeper_protocol import KeeperPort
from storage.keys import Attempt, StepKey
from storage.object_store import ObjectStore
from tests.fakes.recording_sink import RecordingSink
from tests.fakes.snapshot_writer import fill, lease_for, make_header, sealed

__all__ = ["KEEP", "RUN", "committer_for", "save_all_ranks", "values"]

RUN = "run"
KEEP = 3
FLUSH_S = 30.0


def values(step: int, rank: int) -> dict[str, NDArray[np.float32]]:
    """What ``rank`` holds at ``step``: tensors of uneven sizes, one smaller than a block of a disk."""
    random = np.random.default_rng([step, rank])
    return {
        "bias": np.full((3,), step + rank / 8, np.float32),
        "weight": random.normal(size=(80, 96)).astype(np.float32),
    }


def committer_for(store: ObjectStore, *, orphan_grace_s: float) -> Committer:
    """The real one. What was left behind ``orphan_grace_s`` ago is swept."""
    return Committer(
        run_id=RUN,
        store=store,
        config=CheckpointConfig(keep=KEEP, orphan_grace_s=orphan_grace_s, max_outage_s=orphan_grace_s or 1e-3),
        metadata={},
        now_utc=lambda: "2026-01-01T00:00:00.000Z",
        monotonic=time.monotonic,
    )


def save_all_ranks(
    committer: Committer,
    keeper: DirectKeeper | Keeper,
    box: RecordingSink,
    *,
    attempt: Attempt,
    step: int,
    base_step: int,
    world_size: int,
) -> None:
    """One save: lease, fill and seal for every rank, wait for the Receipts, commit."""
    box.receipts.clear()
    for rank in range(world_size):
        _stage(keeper, attempt, step, rank, world_size)
    if isinstance(keeper, Keeper) and not keeper.flush(FLUSH_S):
        raise AssertionError(f"step {step}: not shipped in {FLUSH_S} s: {keeper.status()}")
    if box.failures:
        raise AssertionError(f"step {step}: {box.failures}")
    # What a Keeper before this one had spooled comes as well, for nobody.
    receipts = [receipt for receipt in box.receipts if receipt.step_key == StepKey(step=step, attempt=attempt)]
    # The metric makes step 2 the best one: it outlives the newest few.
    committer.commit(receipts, base_step=base_step, loss=1.0, metric=abs(step - 2), ledger=None)


def _stage(keeper: KeeperPort, attempt: Attempt, step: int, rank: int, world_size: int) -> None:
    arrays = values(step, rank)
    header, num_bytes = make_header(arrays, run_id=RUN, attempt=attempt, step=step, rank=rank, world_size=world_size)
    lease = lease_for(keeper, header, num_bytes)
    if lease is None:
        raise AssertionError(f"step {step} rank {rank}: no buffer")
    with map_buffer(lease.path, lease.num_bytes) as buffer:
        digest = fill(buffer, header, arrays)
    keeper.seal(sealed(header, lease, digest))

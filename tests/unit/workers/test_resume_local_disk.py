"""A rank resumes from the copy on its own disk; real: FSDP2 on gloo, the record path, the files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from storage.memory_store import MemoryStore
from storage.sources import RestorePlan
from storage.spool_files import spool_file
from tests.fakes.small_training import build_state, save_alone, train_step
from workers.resume import RestoreReport, restore
from workers.snapshot import capture
from workers.state import TrainingState


@pytest.fixture
def saved(mesh: DeviceMesh, tmp_path: Path) -> tuple[TrainingState, RestorePlan, MemoryStore, Path]:
    """A trained state, its Checkpoint, and a copy of its one Shard on the disk."""
    store, state = MemoryStore(), build_state(mesh)
    for _ in range(2):
        train_step(state)
    plan = save_alone(state, store)
    key = plan.shards[0].location
    copy = spool_file(tmp_path, key)
    copy.write_bytes(store.get(key))
    return state, plan, store, copy


def resumed_equal(
    mesh: DeviceMesh, state: TrainingState, plan: RestorePlan, store: MemoryStore, disk: Path
) -> RestoreReport:
    resumed = build_state(mesh, seed=99, init_weights=False)
    report = restore(resumed, plan, store, rank=0, world_size=1, local_directory=disk)
    before, after = capture(state, rank=0, world_size=1), capture(resumed, rank=0, world_size=1)
    for name, tensor in before.tensors.items():
        if not name.startswith("rng."):
            whole, other = (getattr(t, "full_tensor", lambda t=t: t)() for t in (tensor, after.tensors[name]))
            assert torch.equal(whole.detach(), other.detach()), name
    return report


def test_the_local_copy_is_read_and_the_store_gives_the_manifest_alone(
    mesh: DeviceMesh, saved: tuple[TrainingState, RestorePlan, MemoryStore, Path]
) -> None:
    state, plan, store, copy = saved
    store.delete([plan.shards[0].location])
    report = resumed_equal(mesh, state, plan, store, copy.parent)
    assert report.bytes_by_tier["object-storage"] == 0
    assert report.bytes_by_tier["local-disk"] == report.bytes_read > 0
    assert "source: local-disk" in report.lines[-1]


def test_a_copy_with_one_flipped_bit_gives_equal_values_from_the_store(
    mesh: DeviceMesh, saved: tuple[TrainingState, RestorePlan, MemoryStore, Path]
) -> None:
    state, plan, store, copy = saved
    content = bytearray(copy.read_bytes())
    content[len(content) // 3] ^= 4
    copy.write_bytes(content)
    report = resumed_equal(mesh, state, plan, store, copy.parent)
    assert report.bytes_by_tier["local-disk"] == 0
    assert "source: object-storage" in report.lines[-1]
    assert not copy.exists()

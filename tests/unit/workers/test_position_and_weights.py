"""Weights and the position in the data are of one Commit, or not there at all (case B45). Datasets live in memory."""

from __future__ import annotations

import uuid

import torch
from torch.distributed.device_mesh import DeviceMesh

from storage.commit_log import CommitLog
from storage.memory_store import MemoryStore
from storage.object_store import ObjectStore
from storage.sources import RestorePlan
from tests.fakes.recording_sink import RecordingSink
from tests.fakes.small_training import RUN_ID, build_state, newest_plan, save, save_alone, train_step
from tests.fakes.token_datasets import write_numbered_rows
from workers.config import DataConfig
from workers.dataset import TokenDataset
from workers.resume import restore
from workers.sample_order import sample_ids
from workers.state import TrainingState
from workers.stream import LeafStream

BATCH = 2


class Run:
    """A model that is stepped and the stream that feeds it: position and weights move together."""

    def __init__(
        self, mesh: DeviceMesh, rows: TokenDataset, store: ObjectStore, plan: RestorePlan | None = None
    ) -> None:
        data = DataConfig(url="memory://", sequence_length=4, global_batch=BATCH, micro_batch=BATCH)
        self.state: TrainingState = build_state(mesh, seed=0 if plan is None else 99)
        if plan is not None:
            restore(self.state, plan, store, rank=0, world_size=1)
        self.stream = LeafStream(rows, data, 0, 0, 1)
        self.stream.seek(self.state.progress.step + 1, self.state.progress.position)

    def step(self) -> list[int]:
        """The ids of the step's batch."""
        progress = self.state.progress
        position = progress.position
        (leaf,) = self.stream.leaves(progress.step + 1)
        train_step(self.state)
        progress.position = position + BATCH
        return [int(row) for row in leaf.sample_ids]

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.state.model.state_dict().items()}


def rows_of(num_rows: int) -> TokenDataset:
    url = f"memory://{uuid.uuid4()}"
    write_numbered_rows(url, num_rows)
    return TokenDataset.open(url, "train")


def test_shards_of_a_later_step_without_their_commit_move_neither_the_weights_nor_the_position(
    mesh: DeviceMesh,
) -> None:  # case B45
    store, rows = MemoryStore(), rows_of(40)
    unbroken = Run(mesh, rows, store)
    for _ in range(3):
        unbroken.step()
    save_alone(unbroken.state, store)
    weights = unbroken.weights()
    fourth = unbroken.step()
    save(unbroken.state, store, RecordingSink())  # all bytes of step 4 are there, but nobody committed them
    fifth = unbroken.step()
    resumed = Run(mesh, rows, store, newest_plan(store))
    progress = resumed.state.progress
    assert (progress.step, progress.position) == (3, 3 * BATCH)
    assert all(torch.equal(value, weights[name]) for name, value in resumed.weights().items())
    assert (resumed.step(), resumed.step()) == (fourth, fifth)
    assert [*fourth, *fifth] == sample_ids(0, 40, 3 * BATCH, 2 * BATCH).tolist()
    unbroken.stream.close()
    resumed.stream.close()


def test_one_manifest_names_the_shards_and_holds_the_position(mesh: DeviceMesh) -> None:
    store, rows = MemoryStore(), rows_of(40)
    run = Run(mesh, rows, store)
    for _ in range(5):
        run.step()
    save_alone(run.state, store)
    run.stream.close()
    log = CommitLog(store, RUN_ID)
    (commit,) = log.all_commits()
    manifest = log.read_manifest(commit)
    progress = manifest.shared_state["progress"]
    assert isinstance(progress, dict)
    assert (commit.step, progress["step"], progress["position"]) == (5, 5, 5 * BATCH)
    assert any("wide" in name for name in manifest.tensors)
    assert not [entry.key for entry in store.list("") if "position" in entry.key or "loader" in entry.key]

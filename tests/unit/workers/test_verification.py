"""A Checkpoint of a sharded Llama is loaded whole, without groups, and its probe taken again. All of it real."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from storage.commit_log import CommitLog
from storage.config import CheckpointConfig
from storage.direct import DirectKeeper
from storage.errors import ProofFailed, StoreRefused
from storage.keys import Attempt
from storage.memory_store import MemoryStore
from storage.sources import RestorePlan
from tests.fakes.rank_processes import make_spec
from tests.fakes.recording_sink import RecordingSink
from tests.fakes.small_training import ATTEMPT, RUN_ID, build_state, commit, newest_plan
from tests.fakes.token_datasets import write_numbered_rows
from tests.fakes.worker_settings import TINY_LLAMA, make_settings
from workers.data_identity import DATA_TRACKER
from workers.dataset import TokenDataset
from workers.loading import WarmParts
from workers.loss import mean_token_loss
from workers.models import ModelTemplate, instantiate
from workers.names import named_parameters
from workers.parallelize import reduced_gradients, scale_gradients
from workers.proof import Proof, ProofRecord, attach
from workers.settings import WorkerSettings
from workers.side_by_side import ResumeDiffers
from workers.snapshot import Capture, capture
from workers.staging import Stager
from workers.state import TrainingState
from workers.stream import Leaf
from workers.verification import LoadChecker


class Named:
    """A tracker of the loop's own."""

    def state_dict(self) -> dict[str, Any]:
        return {"name": "x", "values": torch.arange(3)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@pytest.fixture(scope="module")
def template() -> ModelTemplate:
    return ModelTemplate.build(TINY_LLAMA)


@pytest.fixture
def settings(tmp_path: Path) -> WorkerSettings:
    write_numbered_rows(str(tmp_path), 24, sequence_length=16)
    return make_settings(str(tmp_path))


def trained(mesh: DeviceMesh, template: ModelTemplate, settings: WorkerSettings) -> TrainingState:
    state = build_state(mesh, model=instantiate(template), config=settings.model)
    state.trackers = {DATA_TRACKER: Named()}
    for step in range(2):
        tokens = torch.arange(34).view(2, 17) + step
        ids = tokens.numpy()[:, 0]
        leaf = Leaf(index=0, is_surplus=False, input_ids=tokens[:, :-1], labels=tokens[:, 1:], sample_ids=ids)
        torch.autograd.backward(mean_token_loss(state.model, leaf))
        scale_gradients(reduced_gradients(state.model), 1.0)
        state.optimizer.step()
        state.scheduler.step()
        state.optimizer.zero_grad()
        state.progress.step += 1
    return state


def probed(state: TrainingState, settings: WorkerSettings) -> ProofRecord:
    parts = WarmParts(
        device=torch.device("cpu"),
        template=None,
        dataset=TokenDataset.open(settings.data.url, "train"),
        validation=None,
        stager=None,  # type: ignore[arg-type]
    )
    spec = make_spec(Attempt(number=1, nonce="0badcafe"), 0, 1, 1)
    proof = Proof(settings, spec, parts, loss=mean_token_loss, is_causal_lm=True)
    proof.prepare(None)
    record = proof.take(state, state.progress.step, is_pressed=False)
    assert record is not None
    return record


def saved(
    store: MemoryStore, state: TrainingState, record: ProofRecord | None, change: Callable[[Any], None] = lambda _: None
) -> RestorePlan:
    sink = RecordingSink()
    snapshot: Capture = capture(state, rank=0, world_size=1)
    attach(snapshot, record)
    change(snapshot.shared_state)
    with DirectKeeper(store, sink, CheckpointConfig()) as keeper:
        stager = Stager(keeper, RUN_ID, os.getpid())
        stager.stage(snapshot, attempt=ATTEMPT, step=state.progress.step, rank=0, world_size=1, wait_s=5.0)
        stager.close()
    commit(store, sink.receipts)
    assert [one.step for one in CommitLog(store, RUN_ID).commits()] == [2]
    return newest_plan(store)


def test_the_probe_gives_the_recorded_loss_to_the_bit_without_any_group(
    mesh: DeviceMesh, template: ModelTemplate, settings: WorkerSettings
) -> None:
    store, state = MemoryStore(), trained(mesh, template, settings)
    record = probed(state, settings)
    finding = LoadChecker(settings).check(saved(store, state, record), store)
    assert (finding.loss, finding.expected, finding.note) == (record.loss, record.loss, None)


def test_half_precision_is_computed_as_the_sharded_model_does(
    mesh: DeviceMesh, template: ModelTemplate, settings: WorkerSettings
) -> None:
    model = settings.model.model_copy(update={"compute_dtype": "bfloat16"})
    settings = replace(settings, model=model)
    store, state = MemoryStore(), trained(mesh, template, settings)
    record = probed(state, settings)
    finding = LoadChecker(settings).check(saved(store, state, record), store)
    assert finding.loss == pytest.approx(record.loss, rel=0.01)


def test_weights_that_were_changed_before_they_were_encoded_fail_although_every_digest_is_right(
    mesh: DeviceMesh, template: ModelTemplate, settings: WorkerSettings
) -> None:
    store, state = MemoryStore(), trained(mesh, template, settings)
    record = probed(state, settings)
    with torch.no_grad():
        dict(named_parameters(state.model))["model.layers.0.mlp.up_proj.weight"].mul_(1.0001)
    plan = saved(store, state, record)
    with pytest.raises(ProofFailed, match=repr(record.loss)) as caught:
        LoadChecker(settings).check(plan, store)
    assert caught.value.key == plan.manifest_key


def test_a_checkpoint_that_contradicts_itself_is_refused(
    mesh: DeviceMesh, template: ModelTemplate, settings: WorkerSettings
) -> None:
    store, state = MemoryStore(), trained(mesh, template, settings)

    def other_lr(shared: Any) -> None:
        shared["optimizer"]["groups"][0]["settings"]["lr"] = 0.5

    plan = saved(store, state, probed(state, settings), other_lr)
    with pytest.raises(ResumeDiffers, match="scheduled lr of group 0"):
        LoadChecker(settings).check(plan, store)


def test_another_model_or_a_missing_probe_says_nothing_against_a_checkpoint(
    mesh: DeviceMesh, template: ModelTemplate, settings: WorkerSettings
) -> None:
    store, state = MemoryStore(), trained(mesh, template, settings)
    plan = saved(store, state, None)
    finding = LoadChecker(settings).check(plan, store)
    assert (finding.is_loaded, finding.loss) == (True, None)
    assert "without one" in (finding.note or "")
    deeper = settings.model.model_copy(update={"config": {**settings.model.config, "num_hidden_layers": 3}})
    other = LoadChecker(replace(settings, model=deeper)).check(plan, store)
    assert (other.is_loaded, other.loss) == (False, None)
    assert "layers.2" in (other.note or "")


def test_data_that_this_process_may_not_read_says_nothing_against_a_checkpoint(
    mesh: DeviceMesh, template: ModelTemplate, settings: WorkerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken for an outage of the Checkpoint's store, it would be loaded again and again without end."""
    store, state = MemoryStore(), trained(mesh, template, settings)
    plan = saved(store, state, probed(state, settings))

    def refuse(*_: object) -> None:
        raise StoreRefused("get", "dataset.json", "403")

    monkeypatch.setattr("workers.verification.open_rows", refuse)
    finding = LoadChecker(settings).check(plan, store)
    assert (finding.is_loaded, finding.loss) == (True, None)
    assert "probe could not be read" in (finding.note or "")

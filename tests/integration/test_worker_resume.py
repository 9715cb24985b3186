"""A worker group goes on from a stored Checkpoint. Real: processes, gloo, FSDP2, Keepers, store, Manifest, restore."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from storage.commit_log import CommitLog
from storage.keys import StepKey
from storage.merge import merge_receipts
from storage.open_store import open_store
from storage.sources import RestorePlan, ShardLocation
from tests.fakes.rank_processes import Ended, Trio
from tests.fakes.token_datasets import write_numbered_rows
from tests.fakes.worker_settings import make_settings
from workers.config import SourceConfig
from workers.contract import CauseKind, OutcomeKind
from workers.session import Session
from workers.settings import WorkerSettings

STEPS = 6


@pytest.fixture(scope="module")
def data_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = str(tmp_path_factory.mktemp("data"))
    write_numbered_rows(url, 200, sequence_length=16, validation_rows=12)
    return url


def plan_for(root: Path, ended: Sequence[Ended], step: int) -> RestorePlan:
    """Make the Manifest of ``step`` and the plan that reads it."""
    receipts = [receipt for one in ended for receipt in one.receipts if receipt.step == step]
    manifest = merge_receipts(receipts, time_utc="2026-01-01T00:00:00Z", metadata={}, ledger=None)
    log = CommitLog(open_store(str(root)), "run")
    key, num_bytes, digest = log.write_manifest(manifest)
    attempt = manifest.attempt.value()
    return RestorePlan(
        attempt=attempt,
        source=StepKey(step=step, attempt=attempt),
        root_url=str(root),
        manifest_key=key,
        manifest_bytes=num_bytes,
        manifest_digest=digest,
        shards=tuple(
            ShardLocation(rank=shard.rank, tier="object-storage", location=shard.key) for shard in manifest.shards
        ),
    )


def test_a_resumed_group_continues_the_unbroken_run_at_any_world_size(
    trio: Trio, data_url: str, tmp_path: Path
) -> None:
    trio.make(make_settings(data_url, every_steps=3, eval_every=2, total_steps=STEPS), tmp_path)
    unbroken = trio.run(2)
    plan = plan_for(tmp_path, unbroken, 3)
    for world_size in (2, 3, 1):
        resumed = trio.run(world_size, restore=plan)
        assert [e.outcome.kind for e in resumed] == [OutcomeKind.FINISHED] * world_size
        after, whole = resumed[0].reports, unbroken[0].reports[3:]
        assert [r.step for r in after] == [4, 5, 6]
        assert [r.loss for r in after] == pytest.approx([r.loss for r in whole], rel=1e-4)
        assert [r.lr for r in after] == pytest.approx([r.lr for r in whole], rel=0, abs=1e-15)
        assert [(r.position, r.tokens) for r in after] == [(r.position, r.tokens) for r in whole]
        assert [r.sample_chain for r in after] == [r.sample_chain for r in whole]
        assert [(e.step, e.best_step) for e in resumed[0].evals] == [
            (e.step, e.best_step) for e in unbroken[0].evals[1:]
        ]
        told = [trio.processes[rank].call("heartbeat").restored for rank in range(world_size)]
        assert [(one.attempt, one.step, one.bound) for one in told] == [
            (ended.outcome.attempt, 3, None) for ended in resumed
        ]
        assert all(one.bytes_by_tier["object-storage"] > 0 for one in told)
        if world_size == 2:
            assert [r.loss for r in after] == [r.loss for r in whole]
            assert resumed[0].outcome.weights_digest == unbroken[0].outcome.weights_digest


def test_a_flipped_byte_is_reported_with_its_step_and_object(trio: Trio, data_url: str, tmp_path: Path) -> None:
    trio.make(make_settings(data_url, total_steps=2), tmp_path)
    plan = plan_for(tmp_path, trio.run(2), 2)
    shard = plan.shards[1].location
    content = bytearray((tmp_path / shard).read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / shard).write_bytes(content)
    outcomes = [e.outcome for e in trio.run(2, restore=plan)]
    corrupt = [outcome.cause for outcome in outcomes if outcome.cause.kind is CauseKind.CORRUPT_CHECKPOINT]
    assert corrupt
    assert all((cause.corrupt_step, cause.corrupt_key) == (plan.source, shard) for cause in corrupt)
    assert {outcome.cause.kind for outcome in outcomes} <= {CauseKind.CORRUPT_CHECKPOINT, CauseKind.COLLECTIVE}


def test_another_model_is_refused_by_name_and_other_data_too(trio: Trio, data_url: str, tmp_path: Path) -> None:
    settings = make_settings(data_url, total_steps=2)
    trio.make(settings, tmp_path)
    plan = plan_for(tmp_path, trio.run(1), 2)
    deeper = settings.model.model_copy(update={"config": {**settings.model.config, "num_hidden_layers": 3}})
    trio.make(replace(settings, model=deeper, total_steps=4), tmp_path)
    cause = trio.run(1, restore=plan)[0].outcome.cause
    assert (cause.kind, cause.error_type) == (CauseKind.CHECKPOINT_MISMATCH, "ManifestMismatch")
    assert "layers.2" in cause.message
    trio.make(replace(settings, seed=99, total_steps=4), tmp_path)
    cause = trio.run(1, restore=plan)[0].outcome.cause
    assert (cause.kind, cause.error_type) == (CauseKind.CONFIGURATION, "DatasetChanged")
    assert "seed" in cause.message
    assert trio.run(1, restore=plan, data_override=True)[0].outcome.kind is OutcomeKind.FINISHED


def test_a_mix_goes_on_at_another_world_size_and_a_changed_weight_is_refused_by_name_or_recorded(
    trio: Trio, tmp_path: Path
) -> None:  # the kind of case B49
    urls = [str(tmp_path / name) for name in ("wiki", "code")]
    write_numbered_rows(urls[0], 60, sequence_length=16, vocab_size=200, validation_rows=4)
    write_numbered_rows(urls[1], 40, sequence_length=16, vocab_size=200, first_token=100, data_format="arrow")
    plain = make_settings(urls[0], every_steps=2, total_steps=4)

    def mixed(weight: float) -> WorkerSettings:
        sources = (SourceConfig(url=urls[0], weight=weight), SourceConfig(url=urls[1]))
        changes = {"url": "", "sources": sources, "shuffle": "blocks", "shuffle_window_groups": 2}
        return replace(plain, data=plain.data.model_copy(update=changes))

    trio.make(mixed(3), tmp_path)
    unbroken = trio.run(2)
    plan = plan_for(tmp_path, unbroken, 2)
    resumed = trio.run(3, restore=plan)
    assert [r.sample_chain for r in resumed[0].reports] == [r.sample_chain for r in unbroken[0].reports[2:]]
    trio.make(mixed(2), tmp_path)
    cause = trio.run(1, restore=plan)[0].outcome.cause
    assert (cause.kind, cause.error_type) == (CauseKind.CONFIGURATION, "DatasetChanged")
    assert "sources.wiki.weight (saved 3, now 2)" in cause.message
    ended = trio.run(1, restore=plan, data_override=True)
    assert ended[0].outcome.kind is OutcomeKind.FINISHED
    receipts = [receipt for receipt in ended[0].receipts if receipt.step == 4 and receipt.shared_state is not None]
    trackers: Any = receipts[-1].shared_state["trackers"]
    assert trackers["data"]["overrides"] == [{"field": "sources.wiki.weight", "saved": "3", "now": "2"}]


class Bigram(nn.Module):
    """A user's own model: no Hugging Face, one table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(257, 257)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.table(input_ids)
        return logits


class StepCount:
    """A user's tracker."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]


def train_a_bigram(session: Session) -> None:
    counter = StepCount()
    state = session.build(
        make_model=Bigram,
        make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
        make_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=2),
        make_trackers=lambda _: {"counter": counter},
    )
    assert state.trackers["counter"] is counter
    for step in session.steps():
        for leaf in step.leaves():
            logits = state.model(leaf.input_ids)
            step.backward(leaf, nn.functional.cross_entropy(logits.flatten(0, 1), leaf.labels.flatten()))
        step.apply()
        counter.steps += 1
        if counter.steps != step.number:
            raise ValueError(f"the tracker counted {counter.steps} steps at step {step.number}")
        session.step_end(step)


def test_a_users_own_model_optimizer_and_tracker_resume_too(trio: Trio, data_url: str, tmp_path: Path) -> None:
    settings = make_settings(data_url, every_steps=3, total_steps=STEPS)
    trio.make(settings, tmp_path, train_a_bigram)
    unbroken = trio.run(2)
    assert [e.outcome.kind for e in unbroken] == [OutcomeKind.FINISHED] * 2
    resumed = trio.run(2, restore=plan_for(tmp_path, unbroken, 3))
    assert [e.outcome.kind for e in resumed] == [OutcomeKind.FINISHED] * 2
    assert [r.loss for r in resumed[0].reports] == [r.loss for r in unbroken[0].reports[3:]]
    assert [r.lr for r in resumed[0].reports] == [r.lr for r in unbroken[0].reports[3:]]
    assert resumed[0].outcome.weights_digest == unbroken[0].outcome.weights_digest


def train_with_a_plain_backward(session: Session) -> None:
    for step in session.steps():
        for leaf in step.leaves():
            torch.autograd.backward(session.loss(leaf))
        step.apply()
        session.step_end(step)


def train_on_the_first_leaf_alone(session: Session) -> None:
    for step in session.steps():
        leaf = next(iter(step.leaves()))
        step.backward(leaf, session.loss(leaf))
        step.apply()
        session.step_end(step)


@pytest.mark.parametrize(
    ("loop", "words"),
    [
        (train_with_a_plain_backward, "0 of this rank's 4 leaves went through step.backward"),
        (train_on_the_first_leaf_alone, "1 of this rank's 4 leaves were taken before step.apply"),
    ],
)
def test_a_loop_that_leaves_a_leaf_out_of_the_sum_is_stopped_at_its_first_step(
    trio: Trio, data_url: str, tmp_path: Path, loop: Callable[[Session], None], words: str
) -> None:
    trio.make(make_settings(data_url, total_steps=2), tmp_path, loop)
    (ended,) = trio.run(1)
    assert (ended.outcome.cause.error_type, ended.outcome.last_step) == ("LoopMisused", 0)
    assert words in ended.outcome.cause.message

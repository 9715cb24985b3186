"""A resume is proven, or refused, by every rank alike. Real: processes, gloo, FSDP2, Keepers, store, restore."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from storage.commit_log import CommitLog
from storage.keys import Attempt
from storage.manifest import AttemptRecord, Commit
from storage.merge import merge_receipts
from storage.open_store import open_store
from storage.restore import plan_restore
from storage.sources import RestorePlan
from storage.verify import verify_commit
from tests.fakes.altered_checkpoint import alter, scale
from tests.fakes.rank_processes import Ended, Trio
from tests.fakes.token_datasets import write_numbered_rows
from tests.fakes.worker_settings import make_settings
from workers.contract import CauseKind, OutcomeKind
from workers.session import Session
from workers.stream import Leaf

UP_PROJ = "model.model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def data_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = str(tmp_path_factory.mktemp("data"))
    write_numbered_rows(url, 200, sequence_length=16, validation_rows=12)
    return url


def committed(root: Path, ended: Sequence[Ended], step: int) -> CommitLog:
    """Make what the Keepers stored of ``step`` a Checkpoint."""
    receipts = [receipt for one in ended for receipt in one.receipts if receipt.step == step]
    manifest = merge_receipts(receipts, time_utc="2026-01-01T00:00:00Z", metadata={}, ledger=None)
    log = CommitLog(open_store(str(root)), "run")
    stored = log.write_manifest(manifest)
    log.append(
        Commit(
            run_id="run",
            step=step,
            attempt=AttemptRecord.of(manifest.attempt.value()),
            base_step=0,
            time_utc=manifest.time_utc,
            manifest_key=stored.key,
            manifest_bytes=stored.num_bytes,
            manifest_digest=stored.digest,
            stored_bytes=manifest.stored_bytes,
        )
    )
    return log


def plan_of(root: Path) -> RestorePlan:
    attempt = Attempt(number=99, nonce="11111111")
    plan = plan_restore(CommitLog(open_store(str(root)), "run"), attempt=attempt)
    assert plan is not None
    return plan


def test_the_probe_gives_the_same_loss_at_every_world_size_and_a_changed_weight_is_found_by_all_ranks(
    trio: Trio, data_url: str, tmp_path: Path
) -> None:
    trio.make(make_settings(data_url, every_steps=2, total_steps=3), tmp_path)
    first = trio.run(2)
    assert [one.outcome.kind for one in first] == [OutcomeKind.FINISHED] * 2
    log = committed(tmp_path, first, 2)
    recorded: Any = log.read_manifest(log.commits()[0]).shared_state["proof"]
    for world_size in (2, 3, 1):
        resumed = trio.run(world_size, restore=plan_of(tmp_path))
        assert [one.outcome.kind for one in resumed] == [OutcomeKind.FINISHED] * world_size
        told = [trio.processes[rank].call("heartbeat").restored for rank in range(world_size)]
        assert {(one.proof.expected, one.proof.found, one.proof.tolerance) for one in told} == {
            (float(recorded["loss"]), float(recorded["loss"]), 0.0)
        }
        assert all(pair.is_equal for pair in told[0].side_by_side)
        assert {"step", "sample position", "lr of group 0"} <= {pair.name for pair in told[0].side_by_side}
    assert resumed[0].reports[0].loss == pytest.approx(first[0].reports[2].loss, rel=1e-4)

    alter(log.store, 2, values=scale(UP_PROJ, 1.001))
    altered = CommitLog(log.store, "run")
    assert verify_commit(log.store, altered, altered.commits()[0]).is_good, "digests cannot tell"
    causes = [one.outcome.cause for one in trio.run(3, restore=plan_of(tmp_path))]
    assert [(cause.kind, cause.error_type) for cause in causes] == [(CauseKind.CORRUPT_CHECKPOINT, "ProofFailed")] * 3
    assert {cause.corrupt_step for cause in causes} == {altered.commits()[0].step_key}
    assert {cause.corrupt_key for cause in causes} == {altered.commits()[0].manifest_key}
    assert all(word in causes[0].message for word in ("rank 0", "rank 2", recorded["loss"], "step 2"))


def test_a_checkpoint_that_contradicts_itself_trains_nobody(trio: Trio, data_url: str, tmp_path: Path) -> None:
    trio.make(make_settings(data_url, total_steps=2), tmp_path)
    log = committed(tmp_path, trio.run(2), 2)

    def other_lr(shared: Any) -> None:
        shared["optimizer"]["groups"][1]["settings"]["lr"] = 0.25

    alter(log.store, 2, shared_state=other_lr)
    trio.make(make_settings(data_url, total_steps=4), tmp_path)
    ended = trio.run(2, restore=plan_of(tmp_path))
    causes = [one.outcome.cause for one in ended]
    assert [(cause.kind, cause.error_type) for cause in causes] == [
        (CauseKind.CHECKPOINT_MISMATCH, "ResumeDiffers")
    ] * 2
    assert "scheduled lr of group 1" in causes[0].message
    assert "restored 0.25" in causes[0].message
    assert ended[0].reports == ()


class Bigram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(257, 257)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.table(input_ids)
        return logits


def bigram_loss(model: nn.Module, leaf: Leaf) -> torch.Tensor:
    return nn.functional.cross_entropy(model(leaf.input_ids).flatten(0, 1), leaf.labels.flatten())


def train_a_bigram(session: Session) -> None:
    session.build(make_model=Bigram, loss=bigram_loss)
    for step in session.steps():
        for leaf in step.leaves():
            step.backward(leaf, session.loss(leaf))
        step.apply()
        session.evaluate_if_due(step)
        session.step_end(step)


def test_a_loop_of_ones_own_is_proven_by_the_loss_that_it_brings(trio: Trio, data_url: str, tmp_path: Path) -> None:
    settings = make_settings(data_url, eval_every=1, total_steps=2)
    trio.make(settings, tmp_path, train_a_bigram)
    first = trio.run(2)
    assert [one.outcome.kind for one in first] == [OutcomeKind.FINISHED] * 2
    log = committed(tmp_path, first, 2)
    trio.make(make_settings(data_url, total_steps=3), tmp_path, train_a_bigram)
    assert [one.outcome.kind for one in trio.run(1, restore=plan_of(tmp_path))] == [OutcomeKind.FINISHED]
    proof = trio.processes[0].call("heartbeat").restored.proof
    assert (proof.found, proof.skipped) == (proof.expected, None)
    alter(log.store, 2, values=scale("model.table.weight", 2.0))
    cause = trio.run(1, restore=plan_of(tmp_path))[0].outcome.cause
    assert cause.error_type == "ProofFailed"

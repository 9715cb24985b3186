"""Samples that break a step are left out once. Real: rank processes, gloo, FSDP2, Keepers, store, restore."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from storage.commit_log import CommitLog
from storage.keys import StepKey
from storage.merge import merge_receipts
from storage.open_store import open_store
from storage.sources import RestorePlan, ShardLocation
from tests.fakes.audited import audit_of
from tests.fakes.rank_processes import Ended, Trio
from tests.fakes.token_datasets import write_numbered_rows
from tests.fakes.worker_settings import make_settings
from workers.contract import CauseKind, OutcomeKind, SkippedWindow
from workers.sample_order import chain, leaf_digest, sample_ids
from workers.session import Session
from workers.settings import WorkerSettings
from workers.state import EMPTY_CHAIN

STEPS, BAD_STEP, ROWS, SEED, BATCH, MICRO_BATCH = 8, 4, 200, 5, 8, 2
BAD_ROW = int(sample_ids(SEED, ROWS, (BAD_STEP - 1) * BATCH, BATCH)[3])
WINDOW = SkippedWindow(place=(BAD_STEP - 1) * BATCH, samples=BATCH, step=BAD_STEP, reason="not-finite")


def train_with_a_bad_row(session: Session) -> None:
    bad_row, factor = int(str(session.loop_config["bad_row"])), float(str(session.loop_config["factor"]))
    for step in session.steps():
        for leaf in step.leaves():
            loss = session.loss(leaf)
            step.backward(leaf, loss * factor if bad_row in leaf.sample_ids else loss)
        step.apply()
        session.step_end(step)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> WorkerSettings:
    """A save falls due at the bad step itself."""
    url = str(tmp_path_factory.mktemp("data"))
    write_numbered_rows(url, ROWS, sequence_length=16)
    made = make_settings(url, every_steps=2, total_steps=STEPS)
    return replace(made, loop_config={"bad_row": BAD_ROW, "factor": "nan"})


def plan_for(root: Path, ended: Sequence[Ended], step: int) -> RestorePlan:
    receipts = [receipt for one in ended for receipt in one.receipts if receipt.step == step]
    manifest = merge_receipts(receipts, time_utc="2026-01-01T00:00:00Z", metadata={}, ledger=None)
    key, num_bytes, digest = CommitLog(open_store(str(root)), "run").write_manifest(manifest)
    attempt = manifest.attempt.value()
    return RestorePlan(
        attempt=attempt,
        source=StepKey(step=step, attempt=attempt),
        root_url=str(root),
        manifest_key=key,
        manifest_bytes=num_bytes,
        manifest_digest=digest,
        shards=tuple(ShardLocation(rank=s.rank, tier="object-storage", location=s.key) for s in manifest.shards),
    )


def chain_without_the_window(step: int) -> str:
    """What the ledger must say after ``step``: every sample of the stream in order, the bad batch's left out."""
    batches = [number for number in range(STEPS + 1) if number != BAD_STEP - 1]
    digest = EMPTY_CHAIN
    for number in batches[:step]:
        ids = sample_ids(SEED, ROWS, number * BATCH, BATCH)
        digest = chain(digest, [leaf_digest(leaf) for leaf in ids.reshape(-1, MICRO_BATCH)])
    return digest


def assert_finished(ended: Sequence[Ended]) -> None:
    assert [(e.outcome.kind, e.outcome.cause) for e in ended] == [(OutcomeKind.FINISHED, None)] * len(ended)


def test_a_batch_that_gives_nan_is_left_out_once_and_everything_else_is_as_it_would_have_been(
    trio: Trio, settings: WorkerSettings, tmp_path: Path
) -> None:
    trio.make(settings, tmp_path, train_with_a_bad_row)
    broken = trio.run(2)
    causes = [ended.outcome.cause for ended in broken]
    told = [cause for cause in causes if cause.kind is CauseKind.BAD_STEP]
    assert told
    assert {cause.kind for cause in causes} <= {CauseKind.BAD_STEP, CauseKind.COLLECTIVE}
    assert all((cause.step, cause.windows) == (BAD_STEP, (WINDOW,)) for cause in told)
    assert {window.reason for cause in told for window in cause.windows} == {"not-finite"}
    assert {receipt.step for ended in broken for receipt in ended.receipts} == {2}, "a save of the bad step was staged"
    assert [report.step for report in broken[0].reports] == [1, 2, 3]

    resumed = trio.run(2, restore=plan_for(tmp_path, broken, 2), skipped=(WINDOW,))
    assert_finished(resumed)
    after = resumed[0].reports
    assert [(r.step, r.position) for r in after] == [(step, step * BATCH) for step in range(3, STEPS + 1)]
    assert [r.sample_chain for r in after] == [chain_without_the_window(step) for step in range(3, STEPS + 1)]

    unbroken = trio.run(2, skipped=(WINDOW,))
    assert_finished(unbroken)
    assert [r.loss for r in after] == [r.loss for r in unbroken[0].reports[2:]]
    assert resumed[0].outcome.weights_digest == unbroken[0].outcome.weights_digest

    carried = trio.run(3, restore=plan_for(tmp_path, resumed, 6))
    assert_finished(carried)
    assert [r.sample_chain for r in carried[0].reports] == [r.sample_chain for r in after[-2:]]
    report = audit_of((receipt for one in carried for receipt in one.receipts), carried[0].reports, STEPS)
    assert (report.findings, report.samples, report.missing, report.repeated) == ((), STEPS * BATCH, 0, 0)
    assert [(w.place, w.left_out, w.step, w.why) for w in report.skipped] == [(24, BATCH, BAD_STEP, "not-finite")]
    assert (report.worlds, report.lives) == ({2: 6, 3: 2}, 3)


def test_a_loss_spike_is_told_from_noise_only_where_that_is_asked_for(
    trio: Trio, settings: WorkerSettings, tmp_path: Path
) -> None:
    bad_step, total = 20, 22
    bad_row = int(sample_ids(SEED, ROWS, (bad_step - 1) * BATCH, BATCH)[0])
    spiking = replace(settings, total_steps=total, loop_config={"bad_row": bad_row, "factor": "1000"})
    trio.make(spiking, tmp_path / "off", train_with_a_bad_row)
    assert_finished(trio.run(1))
    trio.make(replace(spiking, loss_spike=3.0), tmp_path / "on", train_with_a_bad_row)
    (ended,) = trio.run(1)
    assert (ended.outcome.cause.kind, ended.outcome.cause.error_type) == (CauseKind.BAD_STEP, "LossSpike")
    assert ended.outcome.cause.windows == (SkippedWindow(place=152, samples=BATCH, step=bad_step),)


def test_a_nan_that_is_to_be_ignored_ends_nothing(trio: Trio, settings: WorkerSettings, tmp_path: Path) -> None:
    trio.make(replace(settings, must_be_finite=False), tmp_path, train_with_a_bad_row)
    ended = trio.run(2)
    assert_finished(ended)
    assert [r.loss != r.loss for r in ended[0].reports] == [step >= BAD_STEP for step in range(1, STEPS + 1)]

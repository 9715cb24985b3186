"""The audit over what real ranks saved. Real: rank processes, gloo, FSDP2, Keepers, store, restore; no Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.data_audit import AuditReport
from tests.fakes.audited import audit_of
from tests.fakes.rank_processes import Ended, Trio
from tests.fakes.token_datasets import write_numbered_rows
from tests.fakes.worker_settings import make_settings
from tests.integration.test_bad_windows import assert_finished, plan_for
from workers.settings import WorkerSettings

ROWS = 40


@pytest.fixture
def settings(tmp_path: Path) -> WorkerSettings:
    url = str(tmp_path / "data")
    write_numbered_rows(url, ROWS, sequence_length=16)
    return make_settings(url, every_steps=2, total_steps=4)


def audited(ended: Sequence[Ended], step: int) -> AuditReport:
    assert_finished(ended)
    report = audit_of((receipt for one in ended for receipt in one.receipts), ended[0].reports, step)
    assert (report.findings, report.missing, report.repeated) == ((), 0, 0)
    return report


def test_other_world_sizes_and_another_batch_on_the_way_are_one_proven_history(
    trio: Trio, settings: WorkerSettings, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    trio.make(settings, root)
    first = trio.run(3)
    report = audited(first, 4)
    assert (report.samples, report.batches, report.worlds, report.lives) == (32, (8,), {3: 4}, 1)

    data = settings.data.model_copy(update={"global_batch": 12, "micro_batch": 3})
    trio.make(replace(settings, data=data, total_steps=8), root)
    second = trio.run(2, restore=plan_for(root, first, 4), data_override=True)
    report = audited(second, 8)
    assert [one.step for one in second[0].reports] == [5, 6, 7, 8], "the planned last step, whatever a batch is"
    assert (report.samples, report.batches, report.worlds) == (32 + 48, (8, 12), {2: 4, 3: 4})
    assert (report.lives, report.num_chains) == (2, 2)
    (source,) = report.parts[0].sources
    assert (source.whole, source.partial) == (2, {}), "two epochs of 40 rows, each once"

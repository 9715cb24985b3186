"""A whole Run: its Checkpoints are verified beside it, one that no digest speaks against is found out on the resume.

Real: `raysume run` with its local cluster, two workers on gloo, the background verifier, the coordinator.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from orchestrator.exit_codes import ExitCode
from orchestrator.summary import summarize
from storage.commit_log import CommitLog
from storage.local_store import LocalStore
from storage.verified import read_verified
from storage.verify import verify_commit
from tests.fakes.altered_checkpoint import alter, scale
from tests.runs import RunProcess, make_run, write_rows

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

LONG = 100_000
UP_PROJ = "model.model.layers.0.mlp.up_proj.weight"


def test_checkpoints_are_verified_beside_a_run_and_one_of_other_weights_is_passed_over_by_the_next(
    tmp_path: Path,
) -> None:
    write_rows(str(tmp_path / "data"))
    checkpoint = {"every_steps": 40, "verify_load_per_core": 1e6, "memory": {"mode": "off"}}
    run = make_run(
        tmp_path / "job", str(tmp_path / "data"), steps=LONG, every_steps=40, settings={"checkpoint": checkpoint}
    )
    with RunProcess.of_cli(run, "--local-nodes", "2") as first:
        verified = first.wait_for("verified", 300)
        first.wait_for("committed", 120, lambda event: event["step"] > verified["step"])
        os.kill(first.pid, signal.SIGTERM)
        stopped = first.finish(120)
    assert stopped.exit_code == ExitCode.STOPPED, stopped.stderr[-3000:]
    assert (verified["by"], verified["note"]) == ("load", None)
    assert verified["loss"] == verified["expected"]
    summary = summarize(stopped.events)["verified"]
    assert summary["mode"] == "load"
    assert (summary["newest_step"] or 0) >= verified["step"]
    assert stopped.named("verify_failed") == []

    store = LocalStore(run.directory)
    log = CommitLog(store, run.run_id)
    commits = log.commits()
    before, newest = commits[-2], commits[-1]
    records = {commit.step: read_verified(store, commit.step_key) for commit in log.commits()}
    assert all(record is None or record.by == "load" for record in records.values())

    alter(store, newest.step, values=scale(UP_PROJ, 1.01))
    altered = CommitLog(store, run.run_id)
    assert verify_commit(store, altered, altered.commits()[-1]).is_good, "no digest knows"
    total = newest.step + 3
    with RunProcess.of_cli(run, "--local-nodes", "2", f"run.steps={total}") as second:
        result = second.finish(300)
    assert result.exit_code == ExitCode.SUCCESS, result.stderr[-3000:]
    started = [event for event in result.named("attempt_started") if event["attempt"] > newest.attempt.number]
    assert [event["restored_step"] for event in started] == [newest.step, before.step]
    [quarantined] = result.named("quarantined")
    assert (quarantined["step"], quarantined["key"]) == (newest.step, newest.manifest_key)
    assert "probe" in quarantined["reason"]
    restored = result.named("restored")[-1]
    assert restored["proof"]["found"] == restored["proof"]["expected"]
    assert ["step", str(before.step), str(before.step)] in restored["side_by_side"]
    assert CommitLog(store, run.run_id).commits()[-1].step == total

"""A Run whose optimizer moments are damaged in every Checkpoint: what the doctor says, and its advice carried out.

Real: `raysume run` with its local cluster, two workers on gloo, the commands as a user types them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator.cli import app
from orchestrator.exit_codes import ExitCode
from storage.commit_log import CommitLog
from storage.frames import read_index
from storage.local_store import LocalStore
from tests.runs import RunProcess, make_run, write_rows

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]


def damage_every_moment(root: Path) -> None:
    store = LocalStore(root)
    log = CommitLog(store, None)
    for commit in log.commits():
        for record in log.read_manifest(commit).shards:
            content = bytearray(store.get(record.key))
            whole = bytes(content)
            index = read_index(lambda offset, length, of=whole: of[offset : offset + length], record, step=commit.step)
            frames = [frame for chunk in index.chunks if chunk.level != "L1" for frame in chunk.frames]
            assert frames
            for frame in frames:
                content[frame.offset + frame.stored_bytes // 2] ^= 1
            store.put(record.key, bytes(content))


def test_the_doctors_advice_brings_a_run_without_moments_to_its_end(tmp_path: Path) -> None:
    write_rows(str(tmp_path / "data"))
    run = make_run(tmp_path / "job", str(tmp_path / "data"), steps=12, every_steps=4)
    with RunProcess.of_cli(run, "--local-nodes", "2") as first:
        assert first.finish(180).exit_code == ExitCode.SUCCESS
    damage_every_moment(run.directory)

    asked = CliRunner().invoke(app, ["doctor", str(run.directory), "--deep", "--json"])
    told = json.loads(asked.stdout)
    assert told["salvage"]["step"] == 12
    assert told["salvage"]["lost"] == ["L2"]
    (advice,) = [command for command in told["next"] if "L1 ONLY" in command]
    changes = [word for word in advice.partition("#")[0].split() if word.startswith("run.resume")]
    assert changes == ["run.resume=12", "run.resume_levels=L1"]

    with RunProcess.of_cli(run, "--local-nodes", "2", *changes, "run.steps=20") as second:
        result = second.finish(180)
    assert result.exit_code == ExitCode.SUCCESS, result.stderr[-3000:]
    started = result.named("attempt_started")[-1]
    assert (started["restored_step"], started["restored_levels"]) == (12, ["L1"])
    assert CommitLog(LocalStore(run.directory), None).commits()[-1].step == 20
    losses = [event["loss"] for event in result.named("step") if event["step"] > 12]
    assert all(loss == loss and loss < 10 for loss in losses)

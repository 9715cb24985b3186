"""`raysume checkpoints list` and `show` say what was verified, on a real directory."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from orchestrator.cli import app
from storage.keys import StepKey
from storage.manifest import AttemptRecord
from storage.open_store import open_store
from storage.verified import Means, VerifiedRecord, write_verified
from tests.fakes.checkpoints import save

runner = CliRunner()


def run_with_three(tmp_path: Path) -> str:
    store = open_store(str(tmp_path))
    keys = [save(store, step).step_key for step in (10, 20, 30)]
    made: list[tuple[StepKey, Means, float | None]] = [(keys[0], "digests", None), (keys[1], "load", 2.5)]
    for key, by, loss in made:
        write_verified(
            store,
            VerifiedRecord(
                step=key.step,
                attempt=AttemptRecord.of(key.attempt),
                time_utc="2026-01-02T03:04:05.678Z",
                by=by,
                loss=loss,
                expected=loss,
            ),
        )
    return str(tmp_path)


def test_the_list_says_how_each_was_verified_and_for_how_long_the_newest_was_not(tmp_path: Path) -> None:
    url = run_with_three(tmp_path)
    rows = json.loads(runner.invoke(app, ["checkpoints", "list", url, "--json"]).stdout)
    assert [(row["step"], row["verified"]) for row in rows] == [(10, "digests"), (20, "load"), (30, "no")]
    shown = runner.invoke(app, ["checkpoints", "list", url])
    header, *lines = shown.stdout.splitlines()
    assert "verified" in header
    assert [line.split()[0] for line in lines] == ["10", "20", "30"]
    assert "step 30 has not been verified for" in shown.stderr
    assert f"the newest verified one is of step 20; `raysume checkpoints verify {url}` checks now" in shown.stderr


def test_show_says_when_and_by_what(tmp_path: Path) -> None:
    url = run_with_three(tmp_path)
    for step, words in (
        ("10", "by digests at 2026-01-02 03:04:05 UTC"),
        ("20", "by load at 2026-01-02 03:04:05 UTC, its probe gave the loss 2.5 again"),
        ("30", "no"),
    ):
        assert json.loads(runner.invoke(app, ["checkpoints", "show", url, step, "--json"]).stdout)["verified"] == words
    assert "by load at" in runner.invoke(app, ["checkpoints", "show", url, "20"]).stdout

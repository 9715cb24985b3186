"""`raysume data audit` over real trees on the local disk, through typer's runner. No Ray."""

from __future__ import annotations

import json
import subprocess
import sys
from copy import copy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from orchestrator.cli import app
from orchestrator.cli_checkpoints import CheckpointsCode
from storage.commit_log import CommitLog
from storage.errors import StoreUnavailable
from storage.manifest import AttemptRecord, Commit
from storage.open_store import open_store
from tests.fakes.checkpoints import RUN, TIME, attempt, prepare, write_shards
from tests.fakes.sample_history import History
from workers.plain_state import to_plain
from workers.state import Progress

runner = CliRunner()


def commit(root: Path, progress: Progress, *, number: int, base_step: int = 0) -> None:
    """A Checkpoint of this progress: real but for the model in it."""
    log = CommitLog(open_store(str(root)), RUN)
    parts = prepare(progress.step, by=attempt(number))
    write_shards(log.store, parts)
    plain = to_plain(asdict(progress), "progress", {})
    identity = {"seed": 5, "total_rows": 60, "global_batch": 8}
    update = {
        "shared_state": {"progress": plain, "trackers": {"data": identity}},
        "metadata": {"config": {"data": {"micro_batch": 2}}},
    }
    stored = log.write_manifest(parts.manifest().model_copy(update=update))
    log.append(
        Commit(
            run_id=RUN, step=progress.step, attempt=AttemptRecord.of(attempt(number)), base_step=base_step,
            time_utc=TIME, manifest_key=stored.key, manifest_bytes=stored.num_bytes, manifest_digest=stored.digest,
            stored_bytes=1000,
        )
    )  # fmt: skip


def write_events(root: Path, *events: dict[str, Any]) -> None:
    (root / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def step_events(history: History, steps: range, number: int) -> list[dict[str, Any]]:
    return [{"event": "step", "attempt": number, "step": step, "sample_chain": history.told[step]} for step in steps]


def committed_run(root: Path) -> History:
    """Steps 4 and 9: attempt 1 made 6 steps on four ranks, of which 2 were lost, attempt 2 went on with three."""
    history = History()
    history.start(4)
    history.train(4)
    commit(root, history.progress, number=1)
    saved = copy(history.progress)
    history.train(2)
    lost = step_events(history, range(1, 7), 1)
    history.start(3, at=saved)
    history.train(5)
    commit(root, history.progress, number=2, base_step=4)
    write_events(
        root,
        {"event": "run_started", "is_new": True},
        {"event": "attempt_started", "attempt": 1, "restored_step": 0},
        *lost,
        {"event": "attempt_started", "attempt": 2, "restored_step": 4},
        *step_events(history, range(5, 10), 2),
    )
    return history


def told(root: Path, *options: str) -> tuple[int, dict[str, Any]]:
    ended = runner.invoke(app, ["data", "audit", str(root), "--json", *options])
    return ended.exit_code, json.loads(ended.stdout)


def test_a_run_is_proven_over_its_attempts_and_world_sizes(tmp_path: Path) -> None:
    committed_run(tmp_path)
    shown = runner.invoke(app, ["data", "audit", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    lines = {line.split("  ")[0]: line for line in shown.stdout.splitlines()}
    assert "72 in batches of 8" in lines["samples"]
    assert "1 whole, each of 60 rows once, and 12 in epoch 1" in lines["epochs"]
    assert lines["missing"].split() == ["missing", "0"]
    assert lines["repeated"].split() == ["repeated", "0"]
    assert "4 from step 1, 3 from step 5; in all 5 steps at 3, 4 steps at 4" in lines["world sizes"]
    assert "2 steps were trained and rolled back" in lines["done twice"]
    assert shown.stdout.splitlines()[-1].startswith("proven:")


def test_the_verdict_as_json_holds_exact_numbers(tmp_path: Path) -> None:
    committed_run(tmp_path)
    code, facts = told(tmp_path)
    assert code == 0
    assert (facts["is_proven"], facts["samples"], facts["missing"], facts["repeated"]) == (True, 72, 0, 0)
    assert (facts["worlds"], facts["lives"], facts["rolled_back"]) == ({"4": 4, "3": 5}, 2, 2)


def test_an_earlier_checkpoint_is_audited_when_asked_for(tmp_path: Path) -> None:
    committed_run(tmp_path)
    code, facts = told(tmp_path, "--step", "4")
    assert (code, facts["samples"], facts["worlds"], facts["rolled_back"]) == (0, 32, {"4": 4}, 0)


def test_a_run_without_events_is_proven_all_the_same(tmp_path: Path) -> None:
    committed_run(tmp_path)
    (tmp_path / "events.jsonl").unlink()
    code, facts = told(tmp_path)
    assert (code, facts["rolled_back"]) == (0, None)


def test_a_tampered_ledger_is_not_proven_and_its_step_is_named(tmp_path: Path) -> None:
    history = committed_run(tmp_path)
    exported = tmp_path / "ledger.jsonl"
    assert runner.invoke(app, ["data", "audit", str(tmp_path), "--export", str(exported)]).exit_code == 0
    assert runner.invoke(app, ["data", "audit", str(exported)]).exit_code == 0
    text = exported.read_text()
    assert "[[32,40]]" in text
    exported.write_text(text.replace("[[32,40]]", "[[32,16],[50,24]]"))
    ended = runner.invoke(app, ["data", "audit", str(exported)])
    assert ended.exit_code == CheckpointsCode.CORRUPT
    assert ended.stdout.splitlines()[-1] == "NOT PROVEN: the first that is not right is steps 5 to 9"
    assert "step 7: place 48 comes next, but it goes on at 50" in ended.stdout
    # The ranks saw other samples at step 6, and their chains are true to that.
    history.progress.sample_chain = history.told[9] = "a" * 32
    last = history.progress.ledger.rpartition("\n")
    history.progress.ledger = last[0] + "\n" + last[2].replace(history.ledger.trained[-1].chain, "a" * 32)
    write_events(
        tmp_path,
        {"event": "attempt_started", "attempt": 3, "restored_step": 4},
        *step_events(history, range(5, 6), 3),
        *({"event": "step", "attempt": 3, "step": step, "sample_chain": "a" * 32} for step in range(6, 10)),
    )
    commit(tmp_path, history.progress, number=3, base_step=4)
    ended = runner.invoke(app, ["data", "audit", str(tmp_path)])
    assert ended.exit_code == CheckpointsCode.CORRUPT
    assert ended.stdout.splitlines()[-1] == "NOT PROVEN: the first that is not right is step 6"


def test_a_checkpoint_of_a_release_without_ledgers_is_proven_by_its_chain(tmp_path: Path) -> None:
    history = History()
    history.start(2)
    history.train(5)
    history.progress.ledger = ""
    commit(tmp_path, history.progress, number=1)
    shown = runner.invoke(app, ["data", "audit", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert "steps 1 to 5 were saved by a release that kept no ledger" in shown.stdout
    history.start(3)
    history.train(2)
    commit(tmp_path, history.progress, number=2, base_step=5)
    code, facts = told(tmp_path)
    assert (code, facts["first_step"], facts["samples"], facts["assumed_steps"]) == (0, 1, 56, 5)
    assert (facts["worlds"], facts["lives"]) == ({"3": 2}, 1)


def test_what_an_older_release_did_not_record_and_nothing_bears_out_is_said_to_be_unproven(tmp_path: Path) -> None:
    history = History()
    history.start(2)
    history.train(1)
    history.batch = 16
    history.start(2)
    history.train(1)
    history.progress.ledger = ""
    commit(tmp_path, history.progress, number=1)
    code, facts = told(tmp_path)
    assert (code, facts["exit_code"]) == (CheckpointsCode.CORRUPT, CheckpointsCode.CORRUPT)
    assert "kept no ledger" in facts["error"]
    history.batch = 8
    history.start(3)
    history.train(2)
    commit(tmp_path, history.progress, number=2, base_step=2)
    shown = runner.invoke(app, ["data", "audit", str(tmp_path)])
    assert shown.exit_code == 0
    assert "not recorded before step 3: 24 samples" in shown.stdout


def test_the_ways_to_end_without_a_verdict_have_their_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert runner.invoke(app, ["data", "audit", str(tmp_path / "nothing")]).exit_code == CheckpointsCode.NOT_FOUND
    committed_run(tmp_path)
    ended = runner.invoke(app, ["data", "audit", str(tmp_path), "--step", "5"])
    assert ended.exit_code == CheckpointsCode.NOT_FOUND
    assert "it holds: 4, 9" in ended.stderr
    assert runner.invoke(app, ["data", "audit", "s3x://foo"]).exit_code == CheckpointsCode.REFUSED
    exported = tmp_path / "ledger.jsonl"
    runner.invoke(app, ["data", "audit", str(tmp_path), "--export", str(exported)])
    assert runner.invoke(app, ["data", "audit", str(exported), "--step", "4"]).exit_code == CheckpointsCode.NOT_FOUND
    exported.write_text("no ledger\n")
    assert runner.invoke(app, ["data", "audit", str(exported)]).exit_code == CheckpointsCode.CORRUPT

    def away(*_: object, **__: object) -> None:
        raise StoreUnavailable("list", "commits/", "no answer")

    monkeypatch.setattr(CommitLog, "scan", away)
    assert runner.invoke(app, ["data", "audit", str(tmp_path)]).exit_code == CheckpointsCode.UNREACHABLE


def test_an_audit_needs_neither_torch_nor_ray(tmp_path: Path) -> None:
    committed_run(tmp_path)
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom orchestrator.cli import app\n"
        f"ended = CliRunner().invoke(app, ['data', 'audit', {str(tmp_path)!r}])\n"
        "print(ended.exit_code, sorted({'torch', 'ray', 'transformers', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "0 []"

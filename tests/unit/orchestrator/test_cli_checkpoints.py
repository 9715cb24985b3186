"""`raysume checkpoints` over real trees on the local disk, through typer's runner. No Ray, no torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator.cli import app
from orchestrator.cli_checkpoints import CheckpointsCode
from orchestrator.exit_codes import ExitCode
from storage.commit_log import CommitLog
from storage.errors import StoreUnavailable
from storage.manifest import AttemptRecord, Commit, LedgerRange
from storage.open_store import open_store
from tests.fakes.checkpoints import RUN, TIME, attempt, prepare, write_shards

runner = CliRunner()


def committed_run(root: Path) -> CommitLog:
    """Steps 10 and 20, real but for the size that their Commits claim."""
    store = open_store(str(root))
    log = CommitLog(store, RUN)
    for step in (10, 20):
        parts = prepare(step)
        write_shards(store, parts)
        ledger = LedgerRange(position=160, sample_chain="0" * 32)
        stored = log.write_manifest(parts.manifest().model_copy(update={"ledger": ledger}))
        log.append(
            Commit(
                run_id=RUN, step=step, attempt=AttemptRecord.of(attempt()), base_step=0, time_utc=TIME,
                manifest_key=stored.key, manifest_bytes=stored.num_bytes, manifest_digest=stored.digest,
                stored_bytes=61_300_000, loss=5.25,
            )
        )  # fmt: skip
    return log


def test_checkpoints_are_listed_with_sizes_and_ages_for_people(tmp_path: Path) -> None:
    committed_run(tmp_path)
    shown = runner.invoke(app, ["checkpoints", "list", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    header, ten, twenty = shown.stdout.splitlines()
    titles = ("step", "attempt", "size", "committed", "(UTC)", "age", "loss", "metric", "fidelity", "verified")
    assert header.split() == list(titles)
    assert ten.split()[:4] == ["10", "1", "61.3", "MB"]
    assert twenty.split()[0] == "20"
    assert " d " in twenty


def test_the_listing_as_json_holds_exact_numbers(tmp_path: Path) -> None:
    committed_run(tmp_path)
    entries = json.loads(runner.invoke(app, ["checkpoints", "list", str(tmp_path), "--json"]).stdout)
    assert [(entry["step"], entry["bytes"], entry["loss"]) for entry in entries] == [
        (10, 61300000, 5.25),
        (20, 61300000, 5.25),
    ]


def test_show_takes_the_newest_unless_told_a_step(tmp_path: Path) -> None:
    committed_run(tmp_path)
    newest = json.loads(runner.invoke(app, ["checkpoints", "show", str(tmp_path), "--json"]).stdout)
    other = json.loads(runner.invoke(app, ["checkpoints", "show", str(tmp_path), "--step", "10", "--json"]).stdout)
    assert (newest["step"], newest["world_size"], newest["samples"], other["step"]) == (20, 2, 160, 10)


def test_a_checkpoint_whose_manifest_is_damaged_is_listed_as_damaged_and_not_as_the_newest(tmp_path: Path) -> None:
    log = committed_run(tmp_path)
    (tmp_path / log.commits()[-1].manifest_key).write_bytes(b"{}")
    ended = runner.invoke(app, ["checkpoints", "list", str(tmp_path)])
    assert ended.exit_code == 0
    _, ten, twenty = ended.stdout.splitlines()
    assert ten.split()[-1] == "newest"
    assert twenty.split()[-3:] == ["-", "no", "damaged"]
    assert "step 20 is damaged" in ended.stderr
    assert f"`raysume checkpoints verify {tmp_path} 20` says more" in ended.stderr
    rows = json.loads(runner.invoke(app, ["checkpoints", "list", str(tmp_path), "--json"]).stdout)
    assert [(row["standing"], row["marks"], row["fidelity"]) for row in rows] == [
        ("usable", ["newest"], "lossless"),
        ("damaged", ["damaged"], None),
    ]


@pytest.mark.parametrize("command", ["list", "show", "verify"])
def test_a_place_without_checkpoints_has_its_own_code(tmp_path: Path, command: str) -> None:
    ended = runner.invoke(app, ["checkpoints", command, str(tmp_path / "nothing")])
    assert ended.exit_code == CheckpointsCode.NOT_FOUND
    assert "holds no checkpoint" in ended.stderr


def test_a_step_that_was_not_committed_is_answered_with_those_that_were(tmp_path: Path) -> None:
    committed_run(tmp_path)
    ended = runner.invoke(app, ["checkpoints", "verify", str(tmp_path), "--step", "15"])
    assert ended.exit_code == CheckpointsCode.NOT_FOUND
    assert "it holds: 10, 20" in ended.stderr


def test_verify_tells_a_good_checkpoint_from_a_damaged_one(tmp_path: Path) -> None:
    log = committed_run(tmp_path)
    assert runner.invoke(app, ["checkpoints", "verify", str(tmp_path)]).exit_code == 0
    newest = tmp_path / log.commits()[-1].manifest_key
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    ended = runner.invoke(app, ["checkpoints", "verify", str(tmp_path)])
    assert ended.exit_code == CheckpointsCode.CORRUPT
    good, damaged, *_, last = ended.stdout.splitlines()
    assert last.startswith("1 good, 1 damaged")
    assert "good" in good
    assert "DAMAGED" in damaged


@pytest.mark.parametrize("command", ["list", "verify"])
def test_a_place_without_checkpoints_is_an_empty_list_as_json(tmp_path: Path, command: str) -> None:
    ended = runner.invoke(app, ["checkpoints", command, str(tmp_path), "--json"])
    assert ended.exit_code == CheckpointsCode.NOT_FOUND
    assert json.loads(ended.stdout) == []


@pytest.mark.parametrize("command", ["list", "show", "verify"])
def test_an_unknown_protocol_is_a_bad_url_not_an_outage(command: str) -> None:
    ended = runner.invoke(app, ["checkpoints", command, "s3x://foo"])
    assert ended.exit_code == CheckpointsCode.REFUSED == ExitCode.CONFIG_ERROR.value
    assert "s3x" in ended.stderr


def cut_commit(root: Path, step: int) -> str:
    (record,) = (root / "commits").glob(f"step-{step:010d}.*")
    record.write_bytes(record.read_bytes()[:20])
    return f"commits/{record.name}"


def test_verify_names_a_commit_record_that_cannot_be_read(tmp_path: Path) -> None:
    committed_run(tmp_path)
    name = cut_commit(tmp_path, 20)
    ended = runner.invoke(app, ["checkpoints", "verify", str(tmp_path), "--json"])
    assert ended.exit_code == CheckpointsCode.CORRUPT
    entries = json.loads(ended.stdout)
    assert [(entry["step"], entry["is_good"]) for entry in entries] == [(10, True), (20, False)]
    assert entries[1]["problems"] == [f"{name}: the commit record cannot be read"]
    assert entries[0].keys() == entries[1].keys()
    shown = runner.invoke(app, ["checkpoints", "verify", str(tmp_path), "--step", "20"])
    assert shown.exit_code == CheckpointsCode.CORRUPT
    assert "DAMAGED" in shown.stdout


def test_a_run_whose_only_commit_records_are_unreadable_is_damaged_not_empty(tmp_path: Path) -> None:
    committed_run(tmp_path)
    names = [cut_commit(tmp_path, step) for step in (10, 20)]
    for command in ("list", "show", "verify"):
        ended = runner.invoke(app, ["checkpoints", command, str(tmp_path)])
        assert ended.exit_code == CheckpointsCode.CORRUPT
        assert all(name in ended.stdout + ended.stderr for name in names)


def test_an_unreadable_record_that_is_quarantined_is_out_of_use(tmp_path: Path) -> None:
    log = committed_run(tmp_path)
    newest = log.commits()[-1].step_key
    log.quarantine(newest, cut_commit(tmp_path, 20), "cut", "2026-01-01T00:00:00Z")
    assert runner.invoke(app, ["checkpoints", "verify", str(tmp_path)]).exit_code == 0


def test_a_commit_whose_time_makes_no_sense_is_listed_like_any_other(tmp_path: Path) -> None:
    log = committed_run(tmp_path)
    newest = log.commits()[-1]
    odd = newest.model_copy(update={"time_utc": "yesterday"})
    (tmp_path / newest.object_key).write_bytes(odd.model_dump_json().encode())
    for command in (["checkpoints", "list"], ["checkpoints", "show"], ["checkpoints", "verify"], ["doctor"]):
        assert runner.invoke(app, [*command, str(tmp_path)]).exit_code == 0


def test_an_outage_has_its_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committed_run(tmp_path)

    def away(*_: object, **__: object) -> None:
        raise StoreUnavailable("list", "commits/", "no answer")

    monkeypatch.setattr(CommitLog, "scan", away)
    for command in (["checkpoints", "list"], ["checkpoints", "verify"], ["doctor"]):
        ended = runner.invoke(app, [*command, str(tmp_path)])
        assert ended.exit_code == CheckpointsCode.UNREACHABLE == ExitCode.STORAGE_OUTAGE.value


@pytest.mark.parametrize("command", [["list"], ["show"], ["verify"], ["prune", "--keep", "3"], ["quarantine", "20"]])
def test_with_json_a_command_that_fails_prints_one_json_document(command: list[str], tmp_path: Path) -> None:
    name, *rest = command
    reason = ["--reason", "x"] if name == "quarantine" else []
    ended = runner.invoke(app, ["checkpoints", name, str(tmp_path), *rest, *reason, "--json"])
    assert ended.exit_code == CheckpointsCode.NOT_FOUND
    told = json.loads(ended.stdout)
    assert told == [] or (told["exit_code"], bool(told["error"])) == (20, True)

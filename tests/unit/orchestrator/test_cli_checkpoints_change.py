"""`raysume checkpoints` that change something, compare or copy: real trees on the local disk, typer's runner."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from orchestrator import cli_checkpoints_place
from orchestrator.cli import app
from orchestrator.cli_checkpoints import CheckpointsCode
from orchestrator.exit_codes import ExitCode
from storage.commit_log import CommitLog
from storage.keys import lease_key, shard_key
from storage.lease import LeaseRecord, local_owner
from storage.local_store import LocalStore
from tests.fakes.checkpoints import RUN, attempt, prepare, save, write_shards
from tests.fakes.layered_checkpoints import layered_save

runner = CliRunner()


def run(*arguments: str | Path, typed: str | None = None) -> Result:
    return runner.invoke(app, ["checkpoints", *map(str, arguments)], input=typed)


def steps(root: Path) -> list[int]:
    return [commit.step for commit in CommitLog(LocalStore(root), RUN).commits()]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 10 to 40, one orphan of an older attempt."""
    place = tmp_path / "run"
    store = LocalStore(place)
    for step in (10, 20):
        save(store, step)
    write_shards(store, prepare(25))
    for step in (30, 40):
        save(store, step, by=attempt(2), base_step=20)
    return place


def drive(root: Path, pid: int) -> None:
    """Leave the Lease of a driver of this machine."""
    owner = local_owner()
    record = LeaseRecord(
        run_id=RUN, nonce="0000000a", host=owner.host, pid=pid, boot_id=owner.boot_id, counter=1,
        renewed_at_utc="2026-01-01T00:00:00.000Z", attempt_number=2,
    )  # fmt: skip
    LocalStore(root).put(lease_key("0000000a"), record.model_dump_json().encode())


def test_prune_shows_first_and_changes_nothing_without_a_word(root: Path) -> None:
    shown = run("prune", root, "--keep", "2", "--dry-run")
    assert shown.exit_code == 0
    assert "delete step 10, attempt 1" in shown.stdout
    unasked = run("prune", root, "--keep", "2")
    assert unasked.exit_code == CheckpointsCode.USAGE
    assert "--yes" in unasked.stderr
    assert run("prune", root, "--keep", "2", "--json").exit_code == CheckpointsCode.USAGE
    assert steps(root) == [10, 20, 30, 40]


@pytest.mark.parametrize(("answer", "left"), [("y\n", [30, 40]), ("n\n", [10, 20, 30, 40])])
def test_prune_asks_on_a_terminal(root: Path, monkeypatch: pytest.MonkeyPatch, answer: str, left: list[int]) -> None:
    monkeypatch.setattr(cli_checkpoints_place, "_is_interactive", lambda: True)
    assert run("prune", root, "--keep", "2", typed=answer).exit_code == 0
    assert steps(root) == left


def test_prune_with_yes_deletes_and_says_it_as_json(root: Path) -> None:
    done = run("prune", root, "--keep", "1", "--orphans", "--yes", "--json")
    told = json.loads(done.stdout)
    assert ([one["step"] for one in told["deleted"]], told["kept"], told["changed"]) == ([10, 20, 30], [40], True)
    assert [one["step"] for one in told["orphans"]] == [25]
    assert steps(root) == [40]
    assert run("verify", root).exit_code == 0


def test_prune_needs_to_be_told_what_may_go_and_reads_durations(root: Path) -> None:
    assert run("prune", root).exit_code == CheckpointsCode.USAGE
    assert run("prune", root, "--older-than", "soon", "--yes").exit_code == CheckpointsCode.USAGE
    assert run("prune", root, "--older-than", "500w", "--yes").stdout == "nothing to delete; 4 checkpoints stay\n"


def test_prune_keeps_the_good_ones_when_the_newest_is_damaged(root: Path) -> None:
    newest = CommitLog(LocalStore(root), RUN).commits()[-1]
    (root / shard_key(newest.step_key, 0)).unlink()
    for how in ("--dry-run", "--yes"):
        refused = run("prune", root, "--keep", "1", how)
        assert refused.exit_code == CheckpointsCode.CORRUPT
        assert "quarantine it first" in refused.stderr
    assert steps(root) == [10, 20, 30, 40]


@pytest.mark.parametrize(
    "arguments", [["prune", "--keep", "1"], ["quarantine", "40", "--reason", "odd"], ["quarantine", "10", "--lift"]]
)
def test_beside_a_living_driver_nothing_is_changed_unless_forced(root: Path, arguments: list[str]) -> None:
    run("quarantine", root, "10", "--reason", "first", "--yes")
    drive(root, os.getpid())
    verb, *others = arguments
    before = sorted(path.relative_to(root) for path in root.rglob("*"))
    refused = run(verb, root, *others, "--yes")
    assert refused.exit_code == CheckpointsCode.IN_USE == ExitCode.REFUSED.value
    assert f"pid {os.getpid()}" in refused.stderr
    assert sorted(path.relative_to(root) for path in root.rglob("*")) == before
    forced = run(verb, root, *others, "--yes", "--force")
    assert forced.exit_code == 0
    assert "WARNING" in forced.stderr


def test_the_lease_of_a_dead_driver_is_no_obstacle(root: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(timeout=60)
    drive(root, gone.pid)
    assert run("prune", root, "--keep", "1", "--yes").exit_code == 0


def test_a_step_is_taken_out_of_use_and_put_back(root: Path) -> None:
    assert "a resume will then use step 30" in run("quarantine", root, "40", "--reason", "odd", "--yes").stdout
    assert steps(root) == [10, 20, 30]
    shown = run("list", root).stdout
    assert "quarantined" in shown
    assert "by hand: odd" in shown
    assert run("quarantine", root, "40", "--reason", "odd", "--yes").exit_code == CheckpointsCode.NOT_FOUND
    assert "because: by hand: odd" in run("quarantine", root, "40", "--lift", "--yes").stdout
    assert steps(root) == [10, 20, 30, 40]
    assert run("quarantine", root, "40", "--lift", "--yes").exit_code == CheckpointsCode.NOT_FOUND
    assert run("quarantine", root, "99", "--reason", "odd", "--yes").exit_code == CheckpointsCode.NOT_FOUND
    assert run("quarantine", root, "40", "--yes").exit_code == CheckpointsCode.USAGE


def test_a_copy_holds_the_newest_or_all_and_verifies(root: Path, tmp_path: Path) -> None:
    (root / "run.json").write_text(json.dumps({"run_id": RUN, "start_unix_s": 1.0}))
    assert run("copy", root, tmp_path / "one", "--yes").exit_code == 0
    assert steps(tmp_path / "one") == [40]
    told = json.loads(run("copy", root, tmp_path / "all", "--all", "--yes", "--json").stdout)
    assert [one["step"] for one in told["copied"]] == [10, 20, 30, 40]
    assert run("verify", tmp_path / "all").exit_code == 0
    assert (tmp_path / "all" / "run.json").read_text() == (root / "run.json").read_text()
    again = json.loads(run("copy", root, tmp_path / "all", "--all", "--yes", "--json").stdout)
    assert sum(one["bytes_sent"] for one in again["copied"]) == 0
    assert not (tmp_path / "dry").exists()
    assert run("copy", root, tmp_path / "dry", "--dry-run").exit_code == 0
    assert not (tmp_path / "dry").exists()


def test_a_copy_over_something_else_or_of_something_damaged_has_its_code(root: Path, tmp_path: Path) -> None:
    newest = CommitLog(LocalStore(root), RUN).commits()[-1]
    key = shard_key(newest.step_key, 0)
    other = tmp_path / "other" / key
    other.parent.mkdir(parents=True)
    other.write_bytes(b"something else")
    assert run("copy", root, tmp_path / "other", "--yes").exit_code == CheckpointsCode.REFUSED
    assert other.read_bytes() == b"something else"
    content = bytearray((root / key).read_bytes())
    content[5] ^= 1
    (root / key).write_bytes(content)
    damaged = run("copy", root, tmp_path / "new", "--yes")
    assert damaged.exit_code == CheckpointsCode.CORRUPT
    assert key in damaged.stderr
    assert steps(tmp_path / "new") == []


def test_diff_of_two_steps_and_of_two_runs(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    for place, world_size in ((a, 2), (b, 3)):
        for step in (10, 20):
            layered_save(LocalStore(place), step, world_size=world_size)
    told = json.loads(run("diff", f"{a}@10", f"{b}@10", "--values", "--json").stdout)
    assert told["is_equal"] is True
    assert [one["path"] for one in told["metadata"]] == ["world_size"]
    shown = run("diff", a, "10", "20", "--values", "--only", "model.*")
    assert shown.exit_code == 0
    assert "model.w  max abs" in shown.stdout
    assert "0 of 1 are equal to the bit" in shown.stdout
    assert run("diff", a, "10").exit_code == CheckpointsCode.USAGE
    assert run("diff", a, "10", "30").exit_code == CheckpointsCode.NOT_FOUND


def test_ctrl_c_ends_as_stopped(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(CommitLog, "scan", stop)
    for arguments in (["checkpoints", "list"], ["checkpoints", "verify"], ["doctor"]):
        assert runner.invoke(app, [*arguments, str(root)]).exit_code == CheckpointsCode.STOPPED
    assert ExitCode.STOPPED.value == CheckpointsCode.STOPPED


def test_access_denied_is_refused_and_never_taken_for_an_empty_place(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("storage.local_store.LocalStore._walk", denied)
    for arguments in (["checkpoints", "list"], ["checkpoints", "verify"], ["doctor"]):
        ended = runner.invoke(app, [*arguments, str(root)])
        assert ended.exit_code == CheckpointsCode.REFUSED
        assert "denied" in ended.stderr


@pytest.mark.parametrize(("damage", "code"), [(False, CheckpointsCode.OK), (True, CheckpointsCode.CORRUPT)])
def test_doctor_ends_with_the_code_of_what_it_found(root: Path, damage: bool, code: CheckpointsCode) -> None:
    if damage:
        newest = CommitLog(LocalStore(root), RUN).commits()[-1]
        (root / shard_key(newest.step_key, 0)).unlink()
    assert runner.invoke(app, ["doctor", str(root)]).exit_code == code
    told = json.loads(runner.invoke(app, ["doctor", str(root), "--deep", "--json"]).stdout)
    assert (told["is_damaged"], told["resume"]["step"]) == (damage, 30 if damage else 40)


def test_doctor_of_nothing_has_its_own_code(tmp_path: Path) -> None:
    ended = runner.invoke(app, ["doctor", str(tmp_path / "nothing")])
    assert ended.exit_code == CheckpointsCode.NOT_FOUND
    assert not (tmp_path / "nothing").exists()


_BLOCKED = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "ray", "transformers"):
            raise ImportError(f"{name} must not be imported")
sys.meta_path.insert(0, Blocker())
from orchestrator.cli import app
url, copy = sys.argv[1:]
for arguments in (
    ["list", url], ["show", url], ["verify", url], ["diff", url, "30", "40", "--values"], ["copy", url, copy, "--yes"],
    ["quarantine", url, "10", "--reason", "x", "--yes"], ["prune", url, "--keep", "1", "--yes"],
):
    app(["checkpoints", *arguments], standalone_mode=False)
app(["doctor", url, "--deep"], standalone_mode=False)
"""


def test_every_command_works_where_torch_and_ray_cannot_be_imported_and_prints_plain_text(
    root: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _BLOCKED, str(root), str(tmp_path / "copy")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert steps(root) == [40]
    assert steps(tmp_path / "copy") == [40]

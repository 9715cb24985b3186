"""The command line, in its own process or through typer's runner. The driver, which needs Ray, is replaced."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from orchestrator.cli import app
from orchestrator.cli_checkpoints import CheckpointsCode
from orchestrator.config import RunConfig
from orchestrator.exit_codes import ExitCode
from orchestrator.options import DriverOptions
from storage.commit_log import CommitLog
from storage.manifest import AttemptRecord, Commit, LedgerRange, Manifest
from storage.open_store import open_store

LOCAL = str(Path(__file__).resolve().parents[3] / "clusters" / "local" / "run.yaml")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shipped configuration writes below the working directory, where a run of this checkout may have finished."""
    monkeypatch.chdir(tmp_path)


runner = CliRunner()


class FakeLaunch(ModuleType):
    """Stands where orchestrator.launch would be imported; remembers what it was asked to drive."""

    def __init__(self, ending: ExitCode | BaseException) -> None:
        super().__init__("orchestrator.launch")
        self.ending = ending
        self.asked: list[tuple[RunConfig, DriverOptions]] = []

    def run_driver(self, config: RunConfig, options: DriverOptions) -> ExitCode:
        self.asked.append((config, options))
        if isinstance(self.ending, BaseException):
            raise self.ending
        return self.ending


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> FakeLaunch:
    fake = FakeLaunch(ExitCode.SUCCESS)
    monkeypatch.setitem(sys.modules, "orchestrator.launch", fake)
    return fake


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["data", "--help"], ["checkpoints", "--help"]])
def test_help_loads_neither_torch_nor_ray_nor_the_configuration(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom orchestrator.cli import app\n"
        f"app({arguments!r}, standalone_mode=False)\n"
        "print('LOADED', sorted({'torch', 'ray', 'yaml', 'transformers', 'orchestrator.config'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "Usage" in done.stdout
    assert "LOADED []" in done.stdout


@pytest.mark.parametrize(
    "command",
    [["run"], ["data", "prepare"], ["checkpoints", "list"], ["checkpoints", "show"], ["checkpoints", "verify"]],
)
def test_every_command_has_an_example_in_its_help(command: list[str]) -> None:
    shown = runner.invoke(app, [*command, "--help"])
    assert shown.exit_code == 0
    assert f"raysume {' '.join(command)} " in shown.stdout.partition("Example")[2]


def test_the_version_is_printed() -> None:
    assert runner.invoke(app, ["--version"]).stdout.startswith("raysume ")


def test_the_module_is_the_same_command_line() -> None:
    command = [sys.executable, "-m", "orchestrator", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("raysume ")


@pytest.mark.parametrize("code", list(ExitCode))
def test_the_process_ends_with_the_drivers_exit_code(launch: FakeLaunch, code: ExitCode) -> None:
    launch.ending = code
    assert runner.invoke(app, ["run", LOCAL]).exit_code == code.value


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        (KeyboardInterrupt(), ExitCode.STOPPED),
        (SystemExit(15), ExitCode.STOPPED),
        (RuntimeError("oops"), ExitCode.INTERNAL_ERROR),
    ],
)
def test_an_exception_never_ends_as_success(launch: FakeLaunch, ending: BaseException, code: ExitCode) -> None:
    launch.ending = ending
    assert runner.invoke(app, ["run", LOCAL]).exit_code == code.value


def test_the_exit_codes_are_distinct_and_leave_0_1_and_2_alone() -> None:
    numbers = [code.value for code in ExitCode]
    assert len(set(numbers)) == len(numbers)
    assert {1, 2}.isdisjoint(numbers)
    failures = set(numbers) - {0} | {CheckpointsCode.NOT_FOUND.value, CheckpointsCode.CORRUPT.value}
    assert len(failures) == len(numbers) - 1 + 2


def test_a_config_error_has_its_code_and_starts_nothing(launch: FakeLaunch) -> None:
    ended = runner.invoke(app, ["run", LOCAL, "run.step=3"])
    assert ended.exit_code == ExitCode.CONFIG_ERROR
    assert "unknown key run.step; the nearest valid one is run.steps" in ended.stderr
    assert launch.asked == []


def test_the_built_in_recipe_needs_a_model(launch: FakeLaunch) -> None:
    ended = runner.invoke(app, ["run", LOCAL, "model.config={}"])
    assert ended.exit_code == ExitCode.CONFIG_ERROR
    assert "model.config is missing" in ended.stderr
    assert launch.asked == []


def test_overrides_and_options_reach_the_driver_exactly(launch: FakeLaunch) -> None:
    value = """model.config.a={"b": "x y; echo $HOME `id`"}"""
    arguments = ["--resume", "40", "--seed", "7", "--json", "--ray-address", "127.0.0.1:1", "--events-file", "/tmp/e"]
    ended = runner.invoke(app, ["run", *arguments, "--", LOCAL, value])
    assert ended.exit_code == 0, ended.output
    ((config, options),) = launch.asked
    assert config.model.config["a"] == {"b": "x y; echo $HOME `id`"}
    assert (config.run.resume, config.seed) == ("40", 7)
    assert options == DriverOptions(
        ray_address="127.0.0.1:1", events_path=Path("/tmp/e"), json_output=True, config_path=LOCAL
    )


def test_chaos_without_a_local_cluster_is_refused(launch: FakeLaunch) -> None:
    ended = runner.invoke(app, ["run", LOCAL, "--chaos", "kill-node@40"])
    assert ended.exit_code == 2
    assert "local-nodes" in ended.stderr
    assert launch.asked == []


def test_a_bad_chaos_schedule_is_a_config_error_before_anything_starts() -> None:
    ended = runner.invoke(app, ["run", LOCAL, "--local-nodes", "2", "--chaos", "explode@40"])
    assert ended.exit_code == ExitCode.CONFIG_ERROR
    assert "'explode@40'" in ended.stderr


def committed_run(root: Path) -> CommitLog:
    log = CommitLog(open_store(str(root)), "r-1")
    attempt = AttemptRecord(number=1, nonce="00000000")
    for step in (10, 20):
        manifest = Manifest(
            run_id="r-1", step=step, attempt=attempt, world_size=2, time_utc="2026-01-01T00:00:00Z", shards=(),
            tensors={}, shared_state={}, rank_states=({}, {}), ledger=LedgerRange(position=160, sample_chain="0" * 32),
        )  # fmt: skip
        stored = log.write_manifest(manifest)
        log.append(
            Commit(
                run_id="r-1", step=step, attempt=attempt, base_step=0, time_utc="2026-01-01T00:00:00Z",
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
    assert header.split() == ["step", "size", "age", "loss", "attempt"]
    assert ten.split()[:3] == ["10", "61.3", "MB"]
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
    good, damaged, *_ = ended.stdout.splitlines()
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
    (record,) = (root / "commits").glob(f"*{step}*")
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

"""The command line, in its own process or through typer's runner. The driver, which needs Ray, is replaced."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from orchestrator.cli import app
from orchestrator.cli_checkpoints import CheckpointsCode
from orchestrator.config import RunConfig
from orchestrator.driver_child import driver_command
from orchestrator.errors import StartOutage
from orchestrator.exit_codes import ExitCode
from orchestrator.options import DriverOptions
from storage.errors import StoreRefused, StoreUnavailable

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
        self.loops: list[dict[str, object]] = []

    def run_driver(self, config: RunConfig, options: DriverOptions, **loop: object) -> ExitCode:
        self.asked.append((config, options))
        self.loops.append(loop)
        if isinstance(self.ending, BaseException):
            raise self.ending
        return self.ending


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> FakeLaunch:
    fake = FakeLaunch(ExitCode.SUCCESS)
    monkeypatch.setitem(sys.modules, "orchestrator.launch", fake)
    return fake


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["run", "--help"],
        ["data", "--help"],
        ["checkpoints", "--help"],
        ["doctor", "--help"],
        ["explain", "--help"],
    ],
)
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
    [
        *(["run"], ["data", "prepare"], ["doctor"], ["explain"]),
        *(["checkpoints", name] for name in ("list", "show", "verify", "diff", "prune", "quarantine", "copy")),
    ],
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
        (StartOutage("s3://b/a", ("run.url cannot be reached",)), ExitCode.STORAGE_OUTAGE),
        (StoreUnavailable("get", "run.json", "503 Slow Down"), ExitCode.STORAGE_OUTAGE),
        (StoreRefused("get", "run.json", "access denied"), ExitCode.CONFIG_ERROR),
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
    arguments = ["--resume", "none", "--seed", "7", "--json", "--ray-address", "127.0.0.1:1", "--events-file", "/tmp/e"]
    ended = runner.invoke(app, ["run", *arguments, "--", LOCAL, value])
    assert ended.exit_code == 0, ended.output
    ((config, options),) = launch.asked
    assert config.model.config["a"] == {"b": "x y; echo $HOME `id`"}
    assert (config.run.resume, config.seed) == ("none", 7)
    assert options == DriverOptions(
        ray_address="127.0.0.1:1",
        events_path=Path("/tmp/e"),
        json_output=True,
        asked=(LOCAL, value, "run.resume=none", "seed=7"),
    )


def test_a_supervised_driver_is_told_what_was_asked_of_its_supervisor(launch: FakeLaunch) -> None:
    asked = ("run.yaml", "run.steps=6", "--local-nodes", "3", "--loop", "a:b")
    command = driver_command(
        Path(LOCAL), ("run.steps=6",), ray_address="127.0.0.1:1", events_path=Path("/tmp/e"), json_output=False,
        asked=asked,
    )  # fmt: skip
    ended = runner.invoke(app, command[command.index("run") :])
    assert ended.exit_code == 0, ended.output
    ((_, options),) = launch.asked
    assert options.asked == asked


def test_chaos_without_a_local_cluster_is_refused(launch: FakeLaunch) -> None:
    ended = runner.invoke(app, ["run", LOCAL, "--chaos", "kill-node@40"])
    assert ended.exit_code == 2
    assert "local-nodes" in ended.stderr
    assert launch.asked == []


def test_a_bad_chaos_schedule_is_a_config_error_before_anything_starts() -> None:
    ended = runner.invoke(app, ["run", LOCAL, "--local-nodes", "2", "--chaos", "explode@40"])
    assert ended.exit_code == ExitCode.CONFIG_ERROR
    assert "'explode@40'" in ended.stderr

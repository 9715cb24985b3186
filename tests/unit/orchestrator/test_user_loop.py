"""`raysume run --loop`: refused before anything starts where it cannot be, else handed to the driver by its name."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from orchestrator import finished
from orchestrator.cli import app
from orchestrator.exit_codes import ExitCode
from orchestrator.user_loop import read_loop
from workers.loop_reference import LoopReference

LOCAL = str(Path(__file__).resolve().parents[3] / "clusters" / "local" / "run.yaml")
runner = CliRunner()


class FakeLaunch(ModuleType):
    """Stands where orchestrator.launch would be imported; remembers which loop it was given."""

    def __init__(self) -> None:
        super().__init__("orchestrator.launch")
        self.loops: list[dict[str, Any]] = []

    def run_driver(self, *_: object, **loop: Any) -> ExitCode:
        self.loops.append(loop)
        return ExitCode.SUCCESS


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeLaunch:
    monkeypatch.chdir(tmp_path)
    fake = FakeLaunch()
    monkeypatch.setitem(sys.modules, "orchestrator.launch", fake)
    return fake


def test_a_loop_goes_to_the_driver_by_name_with_its_settings_and_needs_no_model(
    launch: FakeLaunch, tmp_path: Path
) -> None:
    (tmp_path / "my_loop.py").write_text("def train(session): ...\n")
    done = runner.invoke(
        app, ["run", LOCAL, "model.config={}", "--loop", "my_loop:train", "--loop-config", '{"width": 64}']
    )
    assert done.exit_code == 0, done.output
    expected = LoopReference(module="my_loop", function="train", directory=str(tmp_path))
    assert launch.loops == [{"train_loop": expected, "loop_config": {"width": 64}}]
    assert "my_loop" not in sys.modules, "the driver imported the user's code"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--loop", "my_loop:trian"], "my_loop.py has no trian; it has train"),
        (["--loop", "my_lop:train"], "no module my_lop was found in"),
        (["--loop", "my_loop:NUMBER"], "it is int, not a function"),
        (["--loop", "my_loop.py:train"], "my_loop:train"),
        (["--loop-config", "{}"], "name one with --loop"),
        (["--loop", "my_loop:train", "--loop-config", "[3]"], "expected a JSON object"),
        (["--loop", "my_loop:train", "--loop-config", "{"], "not JSON"),
    ],
)
def test_a_loop_that_cannot_be_called_is_a_configuration_error(
    launch: FakeLaunch, tmp_path: Path, options: list[str], said: str
) -> None:
    (tmp_path / "my_loop.py").write_text("NUMBER = 3\n\ndef train(session): ...\n")
    done = runner.invoke(app, ["run", LOCAL, *options])
    assert done.exit_code == ExitCode.CONFIG_ERROR, done.output
    assert said in done.output
    assert launch.loops == []


def test_files_of_the_user_may_have_the_names_of_our_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("workers", "storage"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the user has one of this name')\n")
    (tmp_path / "my_loop.py").write_text("def train(session): ...\n")
    read_loop("my_loop:train", None).require()


def test_a_driver_below_a_supervisor_is_told_the_same_loop() -> None:
    loop = read_loop("my_loop:train", '{"text": "a b\\"c"}')
    options = loop.options()
    assert read_loop(options[1], options[3]) == loop
    assert read_loop(None, None).options() == ()


@pytest.mark.usefixtures("launch")
def test_a_loop_that_is_not_there_is_refused_where_the_run_has_finished_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_loop.py").write_text("def train(session): ...\n")
    monkeypatch.setattr(finished, "finished_summary", lambda _: pytest.fail("asked before the loop was looked for"))
    done = runner.invoke(app, ["run", LOCAL, "model.config={}", "--loop", "my_loop:nosuch"])
    assert done.exit_code == ExitCode.CONFIG_ERROR
    assert "has no nosuch" in done.stderr

"""A user's directory may hold files with the names of our packages. Real: processes that are started there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ray import cloudpickle

from orchestrator import own_python
from orchestrator.driver_child import DriverChild, driver_command
from orchestrator.exit_codes import ExitCode
from orchestrator.own_python import child_environment, child_python, hiding_files, our_packages_first, ray_environment
from orchestrator.user_loop import read_loop
from workers.own_packages import PACKAGES, place

LIMIT_S = 120.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory in which everything is started."""
    for name in PACKAGES:
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the user has one of this name')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, env=child_environment(), check=False
    )


def test_a_driver_that_a_supervisor_starts_there_is_ours(folder: Path) -> None:
    lines: list[str] = []
    command = driver_command(
        folder / "none.yaml", (), ray_address="", events_path=folder / "events.jsonl", json_output=False
    )
    child = DriverChild(command, lines.append)
    try:
        assert child.wait(LIMIT_S) == ExitCode.CONFIG_ERROR, lines
    finally:
        child.close()
    assert any("none.yaml" in line for line in lines)


def test_the_command_line_is_ours_where_a_user_types_it(folder: Path) -> None:
    (folder / "orchestrator.py").unlink()  # that one python -m would take, and nobody could do anything about it
    done = run([sys.executable, "-m", "orchestrator", "--version"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("raysume ")


@pytest.mark.parametrize("first", ["workers.contract", "orchestrator.errors"])
def test_a_script_that_lies_there_gets_ours(folder: Path, first: str) -> None:
    (folder / f"{first.partition('.')[0]}.py").unlink()
    (folder / "train.py").write_text(f"import {first}\nimport storage\nprint(storage.__file__)\n")
    done = run([sys.executable, "train.py"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(Path(place()) / "storage" / "__init__.py")


def test_a_loop_is_found_there_and_what_it_imports_of_ours_is_ours(folder: Path) -> None:
    (folder / "beside.py").write_text("")
    (folder / "my_loop.py").write_text("import beside\nimport workers.contract\n\ndef train(session): ...\n")
    read_loop("my_loop:train", None).require()


@pytest.mark.parametrize(("mine", "theirs"), [("storage", "workers.contract"), ("workers", "orchestrator.errors")])
def test_a_file_that_was_imported_first_is_named(folder: Path, mine: str, theirs: str) -> None:
    (folder / f"{mine}.py").write_text("")
    (folder / f"{theirs.partition('.')[0]}.py").unlink()
    (folder / "train.py").write_text(f"import {mine}\nimport {theirs}\n")
    done = run([sys.executable, "train.py"])
    assert done.returncode == 1
    assert f"{folder / mine}.py has the name of Raysume's package {mine}" in done.stderr


def test_an_installed_child_of_a_job_of_rays_has_ours_before_the_working_directory(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path_factory.mktemp("installed") / "site-packages"
    installed.symlink_to(place())
    monkeypatch.setattr(own_python, "place", lambda: str(installed))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    assert child_environment()["PYTHONPATH"] == os.pathsep.join([str(installed), str(folder)])
    done = run(child_python("workers.loop_reference", "my_loop:train"))
    assert "my_loop" in done.stderr, "ours looks for it"
    assert "__path__" not in done.stderr
    for name in PACKAGES:
        (folder / f"{name}.py").unlink()
    assert child_environment()["PYTHONPATH"] == str(folder), "nothing comes before the standard library without need"


def test_a_process_of_ray_that_is_to_look_there_first_has_ours_before(folder: Path) -> None:
    assert sorted(hiding_files([str(folder)])) == sorted(str(folder / f"{name}.py") for name in PACKAGES)
    environment = ray_environment()
    assert environment is not None
    (hook,) = environment.values()
    (folder / "hook").write_bytes(cloudpickle.dumps(hook))
    code = (
        "import pickle, sys\n"
        "pickle.loads(open('hook', 'rb').read())()\n"
        "sys.path.insert(0, '')\n"  # as Ray does before the first task
        "import workers.contract, orchestrator.errors, storage\n"
        "print(storage.__file__)\n"
    )
    done = run([sys.executable, "-P", "-c", code])
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(Path(place()) / "storage" / "__init__.py")


def test_the_hook_does_nothing_on_a_machine_without_our_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["/nonexistent"])
    our_packages_first("/nonexistent")()
    assert sys.path == ["/nonexistent"]


def test_a_directory_like_any_other_asks_nothing_of_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "storage").mkdir()  # without a file of Python's it hides nothing
    (tmp_path / "job").symlink_to(place())  # a job's copy
    monkeypatch.chdir(tmp_path)
    assert hiding_files([str(tmp_path), place(), str(tmp_path / "job")]) == []
    assert ray_environment() is None


def test_children_get_no_more_of_the_path_than_they_need() -> None:
    assert child_python("orchestrator", "run") == [sys.executable, "-P", "-m", "orchestrator", "run"]

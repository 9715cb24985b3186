"""What the supervisor follows a driver by: its processes, its event file, its command line and its output. All real."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.driver_child import DriverChild, driver_command
from orchestrator.event_tail import EventTail
from orchestrator.processes import descendants


def test_descendants_are_found_through_several_generations() -> None:
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'print(1, flush=True); input()']).wait()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = descendants(process.pid)
        assert len(found) == 1
        process.communicate(b"\n", timeout=30)


def test_an_event_file_is_followed_by_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = EventTail(path)
    assert tail.read() == []
    first, second = json.dumps({"event": "step", "step": 1}), json.dumps({"event": "step", "step": 2})
    path.write_text(first + "\n" + second[:9])
    assert [event["step"] for event in tail.read()] == [1]
    with path.open("a") as file:
        file.write(second[9:] + "\nnot json\n[]\n")
    assert [event["step"] for event in tail.read()] == [2]
    assert tail.read() == []


def test_a_child_keeps_its_output_apart_and_hands_on_its_lines(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    lines: list[str] = []
    code = "import sys; print('report'); print('a line', file=sys.stderr); sys.exit(14)"
    child = DriverChild([sys.executable, "-c", code], lines.append)
    assert child.wait(30.0) == 14
    child.close()
    child.copy_output()
    assert lines == ["a line"]
    assert capfdbinary.readouterr().out == b"report\n"


def test_the_drivers_command_line_passes_values_as_they_are(tmp_path: Path) -> None:
    value = """model.config.a={"b": "x y; echo $HOME `id`"}"""
    command = driver_command(
        Path("run.yaml"), [value, "run.resume=auto"], ray_address="127.0.0.1:1", events_path=tmp_path, json_output=True
    )
    assert command[-4:] == ["--", "run.yaml", value, "run.resume=auto"]
    assert "--json" in command

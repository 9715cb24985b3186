"""One run of a drill: followed through its events, stopped by signals, its end told. Real: the child process."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from orchestrator.chaos import parse_chaos
from orchestrator.drill_runs import UNBROKEN, DrillPlan, DrillRun, RunEnd
from orchestrator.driver_child import DriverChild
from orchestrator.exit_codes import ExitCode
from orchestrator.load_config import load_config
from orchestrator.summary import Event

CONFIG = Path(__file__).resolve().parents[3] / "clusters" / "local" / "tiny.yaml"

WRITE = """
import json, os, pathlib, signal, sys, time
got = []
signal.signal(signal.SIGINT, lambda number, _: got.append(number))
path = pathlib.Path({path!r})
path.parent.mkdir(parents=True)
def emit(**event):
    with path.open("a") as file:
        file.write(json.dumps(event) + "\\n")
"""


class View:
    """Keeps what a person would see; ``on_step`` is called at each step."""

    def __init__(self, on_step: Callable[[], None] = lambda: None) -> None:
        self.notes: list[str] = []
        self.steps: list[object] = []
        self._on_step = on_step

    def on_event(self, event: Event) -> None:
        self.steps.append(event.get("step"))
        self._on_step()

    def note(self, line: str) -> None:
        self.notes.append(line)

    def close(self) -> None: ...


def run(tmp_path: Path, body: str, view: View, stops: list[int]) -> RunEnd:
    plan = DrillPlan(
        config=load_config(CONFIG),
        config_path=CONFIG,
        overrides=(),
        num_nodes=2,
        actions=parse_chaos("kill-worker@3"),
        folder=tmp_path,
    )
    script = WRITE.format(path=str(plan.directory(UNBROKEN) / "events.jsonl")) + body

    def start(_: Sequence[str], on_line: Callable[[str], None]) -> DriverChild:
        return DriverChild([sys.executable, "-c", script], on_line)

    return DrillRun(plan, UNBROKEN, view, stops, start).run()


def test_events_lines_and_code_of_a_run_are_told(tmp_path: Path) -> None:
    view = View()
    body = """
for step in (1, 2, 3):
    emit(event="step", step=step)
print("chaos: x did NOT happen", file=sys.stderr)
print("a time WARNING some.logger: chaos: scale:1@2 did NOT happen: NoDriver: gone", file=sys.stderr)
print("chaos: kill-node@9+save never happened: the run ended first", file=sys.stderr)
print("chaos: cut-node:1@3 did NOT happen, or not as told: OSError: no", file=sys.stderr)
sys.exit(12)
"""
    end = run(tmp_path, body, view, [])
    assert (end.name, end.exit_code) == (UNBROKEN, 12)
    assert [event["step"] for event in end.events] == view.steps == [1, 2, 3]
    assert end.lines[0] == "chaos: x did NOT happen"
    assert end.undone == {
        "scale:1@2": "NoDriver: gone",
        "kill-node@9+save": "the run ended first",
        "cut-node:1@3": "OSError: no",
    }
    assert "chaos: x did NOT happen" in view.notes


@pytest.mark.parametrize(("num_signals", "code"), [(1, 14), (2, 15)])
def test_signals_are_passed_on_one_by_one(tmp_path: Path, num_signals: int, code: int) -> None:
    stops: list[int] = []
    view = View(on_step=lambda: stops.append(signal.SIGINT) if len(stops) < num_signals else None)
    body = """
emit(event="step", step=1)
while not got: time.sleep(0.01)
emit(event="step", step=2)
if {two}:
    while len(got) < 2: time.sleep(0.01)
sys.exit(13 + len(got))
""".replace("{two}", str(num_signals == 2))
    end = run(tmp_path, body, view, stops)
    assert end.exit_code == code
    assert sum("stopping the uninterrupted run" in note for note in view.notes) == 1


def test_a_run_that_is_killed_is_no_success(tmp_path: Path) -> None:
    body = f"os.kill(os.getpid(), {int(signal.SIGKILL)})"
    assert run(tmp_path, body, View(), []).exit_code == ExitCode.INTERNAL_ERROR

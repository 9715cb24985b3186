"""Runs with unstable phases and lost workers on a local Ray cluster: what they train on, and when they break.

The loop is that of unstable_loop.py, the data the source text of Python itself, a byte a token. All runs of one seed
see the same samples, the same phases and lose their workers at the same steps, whatever they save.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from storage.open_store import open_store
from tests.bench import unstable_loop
from tests.runs import GLOBAL_BATCH, Event, Run, RunProcess, RunResult, make_run
from workers.dataset_card import SourceSummary
from workers.dataset_writer import DatasetWriter
from workers.order_plan import BIND_AHEAD

__all__ = [
    "IN_TIME_STEPS",
    "Course",
    "asked_by_instability",
    "course_of",
    "make_unstable_run",
    "run_course",
    "write_text",
]

SEQUENCE_LENGTH = 64
_VOCABULARY = 257
IN_TIME_STEPS = 20
"""From the onset of an unstable phase to the save that answers it; as long after it the loss comes back."""
_WORLD = {"min_workers": 1, "max_workers": 2, "accept_joins": False, "start_grace_s": 60.0}
_MOST_SPARES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What happens to a run: unstable in ``windows`` (first step, step after the last), workers lost at ``lost_at``."""

    seed: int
    steps: int
    windows: tuple[tuple[int, int], ...]
    lost_at: tuple[int, ...] = ()
    factor: float = 100.0
    least_step_s: float = 0.0

    def is_unstable(self, step: int) -> bool:
        return any(first <= step < end for first, end in self.windows)

    def is_quiet(self, step: int) -> bool:
        """Neither unstable nor just after, while the loss comes back."""
        return not any(first <= step < end + IN_TIME_STEPS for first, end in self.windows)


def course_of(seed: int, *, steps: int, window: tuple[int, int], num_faults: int, least_step_s: float) -> Course:
    """Faults at steps drawn from ``seed``, so far apart that a worker can be replaced; one of them in the window."""
    draw = random.Random(seed)
    first, end = window
    places = [draw.randrange(first + 10, end)]
    least_apart = (steps - 60) // (2 * max(1, num_faults))
    for _ in range(10_000):
        if len(places) >= num_faults:
            break
        place = draw.randrange(40, steps - 20)
        if all(abs(place - other) >= least_apart for other in places):
            places.append(place)
    else:
        raise ValueError(f"no room for {num_faults} faults in {steps} steps")
    lost_at = tuple(sorted(places[:num_faults]))
    return Course(seed=seed, steps=steps, windows=(window,), lost_at=lost_at, least_step_s=least_step_s)


def write_text(url: str, num_rows: int = 200 * GLOBAL_BATCH) -> None:
    """A dataset of the standard library's modules, one after the other."""
    wanted = num_rows * SEQUENCE_LENGTH + 1
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= wanted:
            break
    writer = DatasetWriter(
        open_store(url), sequence_length=SEQUENCE_LENGTH, vocab_size=_VOCABULARY, row_group_rows=64, file_rows=512
    )
    writer.append(np.frombuffer(bytes(text[:wanted]), dtype=np.uint8))
    summary = SourceSummary(description="standard library, bytes", num_documents=0, num_bytes=wanted)
    writer.finish(tokenizer=b"{}", source=summary)


def make_unstable_run(
    folder: Path, data_url: str, course: Course, *, checkpoint: Mapping[str, Any], policy: Mapping[str, Any]
) -> Run:
    """Its configuration, below ``folder``. The memory Tier is off: what was not committed is lost. A spare takes a lost
    worker's place, so that the World keeps its size and nobody saves for a join."""
    run = make_run(
        folder,
        data_url,
        steps=course.steps,
        every_steps=1,
        settings={
            "world": {**_WORLD, "spares": min(_MOST_SPARES, len(course.lost_at))},
            "data": {"sequence_length": SEQUENCE_LENGTH},
            "optim": {"lr": 0.003, "warmup_steps": 20},
            "policy": policy,
        },
    )
    tree = json.loads(run.config_path.read_text())
    tree["seed"] = course.seed
    tree["checkpoint"] = {"memory": {"mode": "off"}, **checkpoint}
    tree["model"]["config"]["max_position_embeddings"] = SEQUENCE_LENGTH
    run.config_path.write_text(json.dumps(tree))
    return run


def run_course(run: Run, course: Course, ray_address: str, *, timeout_s: float) -> RunResult:
    """Train to the end and lose the workers on the way. Raises where the run does not end well."""
    settings = {
        "windows": course.windows,
        "factor": course.factor,
        "least_step_s": course.least_step_s,
        "warmup_steps": 20,
    }
    losses = _Losses(course)
    command = [sys.executable, str(Path(unstable_loop.__file__)), str(run.config_path), ray_address]
    with RunProcess(run, [*command, json.dumps(settings)]) as process:
        result = process.finish(timeout_s, on_event=losses.see)
    if result.exit_code:
        raise RuntimeError(f"the run of {run.directory} ended with code {result.exit_code}:\n{result.stderr[-3000:]}")
    if losses.due:
        raise RuntimeError(f"the run of {run.directory} ended before its faults at {losses.due} had happened")
    return result


@dataclass(slots=True)
class _Losses:
    """Kills a worker of the World as soon as a step is told of at which one is to be lost."""

    course: Course
    due: list[int] = field(init=False)
    _pids: dict[str, int] = field(default_factory=dict)
    _members: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.due = list(self.course.lost_at)

    def see(self, event: Event) -> None:
        match event["event"]:
            case "worker_ready":
                self._pids[event["worker"]] = int(event["pid"])
            case "attempt_started":
                self._members = list(event["members"])
            case "step" if self.due and event["step"] >= self.due[0]:
                self.due.pop(0)
                os.kill(self._pids[self._members[-1]], signal.SIGKILL)


def asked_by_instability(events: Iterable[Event]) -> list[int]:
    """From which steps the instability policy asked for a save that was bound; those run again may be there twice."""
    return [
        event["step"] - BIND_AHEAD
        for event in events
        if event["event"] == "save_bound" and event["reason"].startswith("instability")
    ]

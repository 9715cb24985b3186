"""Runs of the real command on tiny models, as processes of their own, and what must hold of every one of them.

A test starts a run, waits for its events with a limit, breaks something, and looks at what is left. Nothing here knows
how the system recovers; the facts that a run is held against are computed anew from the seed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from typer.testing import CliRunner

from orchestrator.cli import app
from orchestrator.event_tail import EventTail
from orchestrator.local_cluster import descendants, is_running
from orchestrator.run_identity import make_run_id
from storage.arena import process_incarnation
from storage.commit_log import CommitLog
from storage.events import read_events
from storage.keys import EVENTS, JOURNAL
from storage.open_store import open_store
from storage.verify import verify_commit
from workers.dataset_card import SourceSummary
from workers.dataset_writer import DatasetWriter
from workers.sample_order import chain, leaf_digest, sample_ids
from workers.state import EMPTY_CHAIN

__all__ = [
    "GLOBAL_BATCH",
    "NUM_ROWS",
    "SEED",
    "SEQUENCE_LENGTH",
    "Event",
    "Run",
    "RunProcess",
    "RunResult",
    "assert_all_commits_verify",
    "assert_data_audit_proves",
    "assert_each_attempt_goes_on_where_it_restored",
    "assert_nothing_left",
    "assert_samples_in_order",
    "attempts_of",
    "effective_steps",
    "journal_counters",
    "make_run",
    "write_rows",
]

Event = Mapping[str, Any]

ROOT = Path(__file__).resolve().parent.parent
SEED = 11
GLOBAL_BATCH, MICRO_BATCH, SEQUENCE_LENGTH = 16, 2, 16  # eight leaves: uneven over three workers
VOCABULARY = 257
NUM_ROWS = 200 * GLOBAL_BATCH
_GONE_S = 20.0
_POLL_S = 0.05
_LOOK_S = 0.5


def write_rows(url: str, num_rows: int = NUM_ROWS) -> None:
    """A dataset of ``num_rows`` rows that differ: each counts up from a start and by a stride of its own."""
    writer = DatasetWriter(
        open_store(url), sequence_length=SEQUENCE_LENGTH, vocab_size=VOCABULARY, row_group_rows=64, file_rows=512
    )
    rows = np.arange(num_rows)[:, None]
    writer.append_rows((rows * 31 + (1 + rows % 7) * np.arange(SEQUENCE_LENGTH + 1)) % VOCABULARY)
    writer.finish(tokenizer=b"{}", source=SourceSummary(description="counting", num_documents=0, num_bytes=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Where a run's configuration lies and where it will write."""

    config_path: Path
    directory: Path
    run_id: str

    @property
    def events_path(self) -> Path:
        return self.directory / EVENTS


def make_run(
    folder: Path,
    data_url: str,
    *,
    steps: int,
    every_steps: int,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
) -> Run:
    """Write the configuration of a tiny run below ``folder``. ``settings`` go over it, section by section."""
    folder.mkdir(parents=True, exist_ok=True)
    directory = folder / "run"
    tree: dict[str, dict[str, Any]] = {
        "run": {"name": "chaos", "url": str(directory), "steps": steps},
        "world": {"min_workers": 1, "max_workers": 4, "start_grace_s": 60.0, "join_gain_ratio": 0.0},
        "model": {
            "config": {
                "model_type": "llama",
                "vocab_size": VOCABULARY,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "max_position_embeddings": 32,
                "tie_word_embeddings": False,
            }
        },
        "data": {
            "url": data_url,
            "sequence_length": SEQUENCE_LENGTH,
            "global_batch": GLOBAL_BATCH,
            "micro_batch": MICRO_BATCH,
        },
        "optim": {"lr": 0.002, "warmup_steps": 10},
        "checkpoint": {"every_steps": every_steps},
        "failure": {"max_user_errors": 0},
    }
    for section, values in (settings or {}).items():
        tree[section] = {**tree.get(section, {}), **values}
    config_path = folder / "run.yaml"
    config_path.write_text(json.dumps({"seed": SEED, **tree}))
    return Run(config_path=config_path, directory=directory, run_id=make_run_id("chaos", str(directory)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a run's process ended and everything it said. ``processes``: pid and incarnation of all it ever had."""

    run: Run
    exit_code: int
    summary: dict[str, Any]
    events: list[dict[str, Any]]
    stderr: str
    processes: frozenset[tuple[int, int]]

    def named(self, name: str) -> list[dict[str, Any]]:
        """Its events of one name, in order."""
        return [event for event in self.events if event["event"] == name]


class RunProcess:
    """A command that drives ``run``, in a session of its own. A context: an error inside ends all of it."""

    def __init__(self, run: Run, command: Sequence[str]) -> None:
        self.run = run
        self._stdout = run.config_path.with_name("stdout.json")
        self._stderr = run.config_path.with_name("stderr.txt")
        with self._stdout.open("wb") as stdout, self._stderr.open("wb") as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self._tail = EventTail(run.events_path)
        self._events: list[dict[str, Any]] = []
        self._seen: set[tuple[int, int]] = set()
        self._look_again_at = 0.0

    @classmethod
    def of_cli(cls, run: Run, *arguments: str) -> Self:
        """``raysume run CONFIG --json`` with ``arguments``."""
        return cls(run, [sys.executable, "-m", "orchestrator", "run", str(run.config_path), "--json", *arguments])

    @property
    def pid(self) -> int:
        return self._process.pid

    def events(self) -> list[dict[str, Any]]:
        """All complete event lines so far."""
        self._events += self._tail.read()
        return self._events

    def wait_for(self, name: str, timeout_s: float, is_it: Callable[[Event], bool] = lambda _: True) -> dict[str, Any]:
        """The first event called ``name`` that ``is_it`` accepts; fails when time is up or the run has ended."""
        deadline = time.monotonic() + timeout_s
        while True:
            has_ended = self._process.poll() is not None
            self._look()
            for event in self.events():
                if event["event"] == name and is_it(event):
                    return event
            assert not has_ended, f"the run ended before {name} came:\n{self._last_words()}"
            assert time.monotonic() < deadline, f"no {name} within {timeout_s:g} s:\n{self._last_words()}"
            time.sleep(_POLL_S)

    def finish(self, timeout_s: float, *, on_event: Callable[[Event], None] = lambda _: None) -> RunResult:
        """Wait for the end; ``on_event`` is called once for each event, soon after it was written."""
        deadline = time.monotonic() + timeout_s
        num_handed_on = 0
        while True:
            has_ended = self._process.poll() is not None
            self._look()
            for event in self.events()[num_handed_on:]:
                on_event(event)
                num_handed_on += 1
            if has_ended:
                return self._result()
            assert time.monotonic() < deadline, f"the run did not end within {timeout_s:g} s:\n{self._last_words()}"
            time.sleep(_POLL_S)

    def _result(self) -> RunResult:
        output = self._stdout.read_text()
        return RunResult(
            run=self.run,
            exit_code=self._process.returncode,
            summary=json.loads(output) if output.strip() else {},
            events=read_events(self.run.events_path) if self.run.events_path.exists() else [],
            stderr=self._stderr.read_text(errors="replace"),
            processes=frozenset(self._seen),
        )

    def _look(self) -> None:
        """Note which processes there are; now and then, since it reads every process of the machine."""
        if time.monotonic() < self._look_again_at:
            return
        self._look_again_at = time.monotonic() + _LOOK_S
        for pid in (self._process.pid, *descendants(self._process.pid)):
            incarnation = process_incarnation(pid)
            if incarnation is not None:
                self._seen.add((pid, incarnation))

    def _last_words(self) -> str:
        names = [f"{e['event']} {e.get('attempt')} {e.get('step')}" for e in self.events()[-5:]]
        return f"{self._stderr.read_text(errors='replace')[-3000:]}\nlast events: {', '.join(names)}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None and self._process.poll() is not None:
            return  # what it left behind is for the test to find
        self._look_again_at = 0.0
        self._look()
        for pid, incarnation in self._seen:
            if process_incarnation(pid) == incarnation:
                _kill(pid)
        self._process.wait(_GONE_S)
        for left in _arenas(self.run.run_id):
            shutil.rmtree(left, ignore_errors=True)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _arenas(run_id: str) -> list[Path]:
    return sorted(Path("/dev/shm").glob(f"raysume-{run_id}*"))


def attempts_of(result: RunResult) -> list[tuple[str, int]]:
    """Cause and world size of each Attempt."""
    return [(event["cause"], event["world_size"]) for event in result.named("attempt_started")]


def effective_steps(events: Iterable[Event]) -> dict[int, Event]:
    """Step events by step, without those that a later Attempt rolled back."""
    history: dict[int, Event] = {}
    for event in events:
        if event["event"] == "attempt_started":
            history = {step: kept for step, kept in history.items() if step <= event["restored_step"]}
        elif event["event"] == "step":
            history[event["step"]] = event
    return history


def untold_steps(events: Iterable[Event]) -> set[int]:
    """Steps whose event lines died with a killed driver although a Commit holds them: the end of its last moments.

    They are the ones up to the step that a driver's first Attempt restored which no line tells of.
    """
    told: set[int] = set()
    untold: set[int] = set()
    for event in events:
        if event["event"] == "step":
            told.add(event["step"])
        elif event["event"] == "attempt_started" and event["cause"] == "driver-restart":
            untold |= set(range(max(told, default=0) + 1, event["restored_step"] + 1))
    return untold


def assert_samples_in_order(result: RunResult, num_rows: int = NUM_ROWS) -> None:
    """Every step of the effective history consumed exactly its own samples, each once an epoch, whatever happened."""
    history = effective_steps(result.events)
    steps = sorted(history.keys() | untold_steps(result.events))
    assert steps == list(range(1, len(steps) + 1)), "steps are missing"
    ids = sample_ids(SEED, num_rows, 0, len(steps) * GLOBAL_BATCH)
    for epoch in range(0, len(ids), num_rows):
        part = ids[epoch : epoch + num_rows]
        assert len(set(part.tolist())) == len(part), "a sample comes twice in an epoch"
    expected = EMPTY_CHAIN
    for step in steps:
        batch = ids[(step - 1) * GLOBAL_BATCH : step * GLOBAL_BATCH]
        expected = chain(expected, [leaf_digest(leaf) for leaf in batch.reshape(-1, MICRO_BATCH)])
        if step not in history:
            continue  # the chain runs through it all the same
        assert history[step]["sample_chain"] == expected, f"step {step} did not train on its own samples"
        assert history[step]["position"] == step * GLOBAL_BATCH
        assert history[step]["tokens"] == step * GLOBAL_BATCH * SEQUENCE_LENGTH
    assert_data_audit_proves(result.run)


def assert_data_audit_proves(run: Run) -> None:
    """What the newest Checkpoint says of its samples holds; a run that never saved has nothing to say."""
    if not CommitLog(open_store(str(run.directory)), run.run_id).commits():
        return
    ended = CliRunner().invoke(app, ["data", "audit", str(run.directory)])
    assert ended.exit_code == 0, ended.output


def assert_each_attempt_goes_on_where_it_restored(result: RunResult) -> None:
    """The first step of an Attempt follows the one it restored, and that one had been committed or kept in memory."""
    committed = {0}
    restored: dict[int, int] = {}
    first: dict[int, int] = {}
    for event in result.events:
        match event["event"]:
            case "committed":
                committed.add(event["step"])
            case "attempt_started":
                restored[event["attempt"]] = event["restored_step"]
                # The Commit of a killed driver's last moment has no line of its own; what memory holds needs none.
                is_told = event["cause"] != "driver-restart" and not str(event["restored_from"]).endswith("-memory")
                assert not is_told or event["restored_step"] in committed, (
                    f"{event['restored_step']} was never committed"
                )
            case "step":
                first.setdefault(event["attempt"], event["step"])
    for attempt, step in first.items():
        assert step == restored[attempt] + 1, f"attempt {attempt} restored {restored[attempt]} and went on with {step}"


def assert_all_commits_verify(run: Run) -> list[int]:
    """Every Checkpoint of the run is whole, to the last byte; returns their steps."""
    store = open_store(str(run.directory))
    log = CommitLog(store, run.run_id)
    commits = log.commits()
    assert commits, f"{run.directory} has no Commit"
    for commit in commits:
        report = verify_commit(store, log, commit)
        assert report.is_good, f"step {commit.step}: {'; '.join(map(str, report.problems))}"
    return [commit.step for commit in commits]


def assert_nothing_left(result: RunResult) -> None:
    """No process that the run ever had is alive, and nothing of it is in shared memory."""
    deadline = time.monotonic() + _GONE_S
    while left := [pid for pid, born in result.processes if process_incarnation(pid) == born and is_running(pid)]:
        assert time.monotonic() < deadline, f"processes {left} of the run are still alive"
        time.sleep(_POLL_S)
    assert _arenas(result.run.run_id) == []


def journal_counters(run: Run) -> list[dict[str, Any]]:
    """The failure counters of every Journal entry that carries them, in the order of writing."""
    entries = [json.loads(path.read_text())["fields"] for path in sorted((run.directory / JOURNAL).iterdir())]
    return [entry["counters"] for entry in entries if "counters" in entry]

"""Preemption notices in whatever phase a run is: what was trained is committed before the node is gone.

Real: the command, a Ray cluster of two nodes, drain notices through Ray and SIGKILL at their end, FSDP over gloo,
Keepers, a file system store. Nothing is held against the clock: the order of the events tells what came before what.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.exit_codes import ExitCode
from storage.open_store import open_store
from tests.runs import (
    NUM_ROWS,
    SEQUENCE_LENGTH,
    VOCABULARY,
    Event,
    Run,
    RunProcess,
    RunResult,
    assert_all_commits_verify,
    assert_each_attempt_goes_on_where_it_restored,
    assert_nothing_left,
    assert_samples_in_order,
    attempts_of,
    make_run,
)
from workers.dataset_card import SourceSummary
from workers.dataset_writer import DatasetWriter

ENDLESS = 100_000  # steps: each test ends its run itself
DRAIN_AT, EVERY_STEPS = 25, 20
NOTICE_S, SHORT_S = 16, 10
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def data_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Rows to train on, and rows to evaluate on."""
    url = str(tmp_path_factory.mktemp("rows"))
    writer = DatasetWriter(
        open_store(url), sequence_length=SEQUENCE_LENGTH, vocab_size=VOCABULARY, row_group_rows=64, file_rows=512
    )
    rows = np.arange(NUM_ROWS + 64)[:, None]
    ids = (rows * 31 + (1 + rows % 7) * np.arange(SEQUENCE_LENGTH + 1)) % VOCABULARY
    writer.append_rows(ids[:NUM_ROWS])
    writer.append_validation_rows(ids[NUM_ROWS:])
    writer.finish(tokenizer=b"{}", source=SourceSummary(description="counting", num_documents=0, num_bytes=0))
    return url


def two_workers(folder: Path, data_url: str, *, memory: str, **settings: dict[str, Any]) -> Run:
    """``settings`` go over those that make a save's start late enough to see."""
    tree: dict[str, dict[str, Any]] = {
        "checkpoint": {"every_steps": EVERY_STEPS, "memory": {"mode": memory}},
        "world": {"max_workers": 2, "max_wait_s": 300.0, "start_grace_s": 60.0},
        "policy": {"deadline": {"margin_s": 3.0, "first_save_s": 4.0}},
    }
    for section, values in settings.items():
        tree[section] = {**tree.get(section, {}), **values}
    return make_run(folder, data_url, steps=ENDLESS, every_steps=EVERY_STEPS, settings=tree)


def trained_on(process: RunProcess) -> RunResult:
    """Wait for the end of the notice and for a step after it; then stop the run."""
    killed = process.wait_for("chaos", 200.0, lambda event: event["verb"] == "drain-deadline")
    process.wait_for("step", 100.0, lambda event: event["t_s"] > killed["t_s"] and event["world_size"] == 1)
    os.kill(process.pid, signal.SIGINT)
    return process.finish(120.0)


def first(result: RunResult, name: str, is_it: Callable[[Event], bool] = lambda _: True) -> int:
    """Where in the events the first of them stands."""
    return next(i for i, event in enumerate(result.events) if event["event"] == name and is_it(event))


def assert_saved_before_the_node_was_gone(result: RunResult) -> int:
    """The World left once for the notice, at a step that was durable before the deadline, and lost none; returns it."""
    moved = next(event for event in result.named("attempt_started") if event["cause"] == "preemption")
    left = next(event for event in result.named("left") if event["attempt"] == moved["attempt"] - 1)
    assert (moved["restored_step"], moved["lost_steps"]) == (left["step"], 0)
    committed = first(result, "committed", lambda event: event["step"] == left["step"])
    assert committed < first(result, "chaos", lambda event: event["verb"] == "drain-deadline")
    assert [fault["cause"] for fault in result.named("fault") if fault["attempt"] >= left["attempt"]] == []
    return int(left["step"])


def assert_whole(result: RunResult) -> None:
    assert_samples_in_order(result)
    assert_each_attempt_goes_on_where_it_restored(result)
    assert_all_commits_verify(result.run)
    assert_nothing_left(result)


def test_without_memory_the_world_trains_on_until_the_latest_safe_start(tmp_path: Path, data_url: str) -> None:
    run = two_workers(tmp_path, data_url, memory="off", policy={"deadline": {"margin_s": 5.0, "first_save_s": 4.0}})
    with RunProcess.of_cli(run, "--local-nodes", "2", "--chaos", f"drain-node@{DRAIN_AT}:{NOTICE_S}s") as process:
        result = trained_on(process)
    assert result.exit_code == ExitCode.STOPPED, result.stderr
    assert attempts_of(result) == [("start", 2), ("preemption", 1)]
    step = assert_saved_before_the_node_was_gone(result)
    keep = first(result, "decision", lambda event: event["decision"] == "keep")
    leave = first(result, "decision", lambda event: event["decision"] == "leave")
    seen = [event["step"] for event in result.events[:keep] if event["event"] == "step"]
    told = [event["step"] for event in result.events[keep:leave] if event["event"] == "step"]
    assert len(told) > 3, "an Order given at once would have ended the World three steps later"
    assert step > max(seen) + 3
    assert "leaving at the latest in" in result.events[keep]["reason"]
    assert result.events[leave]["reason"].endswith("leaving now")
    assert_whole(result)


def test_when_every_node_goes_away_the_run_ends_with_its_commit_and_the_next_one_goes_on_from_there(
    tmp_path: Path, data_url: str
) -> None:
    run = two_workers(tmp_path, data_url, memory="on")
    chaos = f"drain-node:1@{DRAIN_AT}:60s,drain-node:2@{DRAIN_AT}:60s"
    with RunProcess.of_cli(run, "--local-nodes", "2", "--chaos", chaos, "policy.deadline.margin_s=45") as process:
        result = process.finish(300.0)
    assert result.exit_code == ExitCode.BELOW_MINIMUM, result.stderr
    assert [event["verb"] for event in result.named("chaos")] == ["drain-node", "drain-node"], "no deadline was met"
    # The World may part for the first notice before the second is heard of; then both go on once more, to save.
    num_attempts = len(attempts_of(result))
    assert attempts_of(result) in ([("start", 2)], [("start", 2), ("preemption", 2)])
    left = result.named("left")[-1]
    assert left["step"] == result.named("committed")[-1]["step"]
    reason = result.named("run_finished")[0]["exit_reason"]
    assert "every node that could hold a worker has a preemption notice" in reason
    assert f"newest checkpoint: step {left['step']}; the same command goes on from there" in reason
    assert_nothing_left(result)

    with RunProcess.of_cli(run, "--local-nodes", "2") as process:
        process.wait_for("step", 200.0, lambda event: event["attempt"] == num_attempts + 1)
        os.kill(process.pid, signal.SIGINT)
        again = process.finish(120.0)
    assert attempts_of(again)[num_attempts:] == [("driver-restart", 2)]
    started = again.named("attempt_started")[-1]
    assert (started["restored_step"], started["lost_steps"]) == (left["step"], 0)
    assert_whole(again)


PHASES: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "warm-up": (f"drain-node@during-save:{SHORT_S}s", {"checkpoint": {"every_steps": 2, "memory": {"mode": "off"}}}),
    "eval": (f"drain-node@{DRAIN_AT}:{SHORT_S}s", {"eval": {"every_steps": 1, "num_leaves": 32}}),
    "load": (f"kill-worker:1@{DRAIN_AT},drain-node:2@during-load:{SHORT_S}s", {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_a_short_notice_in_any_phase_costs_no_step(tmp_path: Path, data_url: str, phase: str) -> None:
    chaos, settings = PHASES[phase]
    run = two_workers(tmp_path, data_url, memory="off", **settings)
    with RunProcess.of_cli(run, "--local-nodes", "2", "--chaos", chaos) as process:
        result = trained_on(process)
    assert result.exit_code == ExitCode.STOPPED, result.stderr
    assert_saved_before_the_node_was_gone(result)
    assert attempts_of(result)[-1] == ("preemption", 1)
    if phase == "load":
        assert attempts_of(result)[:2] == [("start", 2), ("worker-lost", 1)]
    assert_whole(result)


@pytest.mark.slow
def test_a_notice_that_is_too_short_is_a_preemption_all_the_same_and_the_last_commit_is_used(
    tmp_path: Path, data_url: str
) -> None:
    run = two_workers(tmp_path, data_url, memory="off", failure={"max_infrastructure": 0})
    with RunProcess.of_cli(run, "--local-nodes", "2", "--chaos", f"drain-node@{DRAIN_AT}:0.6s") as process:
        result = trained_on(process)
    assert result.exit_code == ExitCode.STOPPED, result.stderr
    moved = result.named("attempt_started")[1]
    assert moved["cause"] == "preemption"
    committed = [event["step"] for event in result.named("committed") if event["attempt"] == 1]
    assert moved["restored_step"] == max(committed)
    assert_whole(result)

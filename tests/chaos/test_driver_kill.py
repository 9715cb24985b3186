"""The driver of a run is killed: the next one goes on as if it had only been away.

Real: the command with its supervisor, a Ray cluster of two nodes, SIGKILL of a worker and of the driver process.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from storage.keys import JOURNAL
from tests.runs import (
    RunProcess,
    RunResult,
    assert_all_commits_verify,
    assert_each_attempt_goes_on_where_it_restored,
    assert_nothing_left,
    assert_samples_in_order,
    effective_steps,
    journal_counters,
    make_run,
    untold_steps,
)

STEPS = 60
EVERY_STEPS = 10
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory, data_url: str) -> RunResult:
    """A worker is killed, then, in the second Attempt, the driver."""
    folder: Path = tmp_path_factory.mktemp("driver")
    # Joins would add Attempts at steps that depend on how fast a killed worker's successor starts.
    settings = {"world": {"min_workers": 1, "max_workers": 2, "start_grace_s": 60.0, "accept_joins": False}}
    run = make_run(folder, data_url, steps=STEPS, every_steps=EVERY_STEPS, settings=settings)
    with RunProcess.of_cli(run, "--local-nodes", "2", "--chaos", "kill-worker:1@6,kill-driver@27") as process:
        return process.finish(240.0)


def test_the_next_driver_finishes_the_run(result: RunResult) -> None:
    assert result.exit_code == 0, result.stderr
    assert [event["cause"] for event in result.named("attempt_started")] == ["start", "worker-lost", "driver-restart"]
    first, second = result.named("driver_started")
    assert first["nonce"] != second["nonce"]
    assert first["pid"] == next(e["pid"] for e in result.named("chaos") if e["verb"] == "kill-driver")
    assert [event["is_new"] for event in result.named("run_started")] == [True, False]
    (end,) = result.named("run_finished")
    assert end is result.events[-1]
    assert (end["status"], end["exit_code"]) == ("finished", 0)
    assert (result.summary["status"], result.summary["steps"]) == ("finished", STEPS)


def test_it_goes_on_from_the_newest_commit_or_beyond_under_a_higher_attempt(result: RunResult) -> None:
    events = result.events
    takeover = events.index(result.named("driver_started")[1])
    committed = [event["step"] for event in events[:takeover] if event["event"] == "committed"]
    restart = result.named("attempt_started")[2]
    assert restart["attempt"] == 3
    assert restart["restored_from"] != "none"
    assert max(committed) >= EVERY_STEPS
    # From memory: Keepers outlive their driver.
    assert restart["restored_step"] >= max(committed)
    assert_each_attempt_goes_on_where_it_restored(result)


def test_failures_counted_before_count_on(result: RunResult) -> None:
    counted = [counters["infrastructure"] for counters in journal_counters(result.run)]
    assert counted == sorted(counted)
    assert counted[-1] == 1
    nonces = {path.name.split(".")[1] for path in (result.run.directory / JOURNAL).iterdir()}
    assert len(nonces) == 2, "only one driver wrote to the Journal, so nothing was handed over"


def test_the_failure_history_has_the_lost_worker_and_the_killed_driver(result: RunResult) -> None:
    entries = [json.loads(path.read_text())["fields"] for path in sorted((result.run.directory / JOURNAL).iterdir())]
    told = [totals for entry in entries if (totals := entry.get("hazard")) is not None]
    assert len(told) == len(entries)
    assert [totals["faults"] for totals in told] == [0, 1, 1, 2, 2]
    exposures = [totals["exposure_node_s"] for totals in told]
    # Nothing is trained between a Decision and the Attempt after it; what the killed driver had trained is not lost.
    assert exposures[0] == 0.0 < exposures[1] == exposures[2] < exposures[3] < exposures[4]


def test_the_history_is_one_unbroken_one(result: RunResult) -> None:
    untold = untold_steps(result.events)
    assert len(untold) < EVERY_STEPS, "more is missing than the last moment of the killed driver"
    told = sorted(set(range(1, STEPS + 1)) - untold)
    assert sorted(effective_steps(result.events)) == told
    assert_samples_in_order(result)
    assert [entry["step"] for entry in result.summary["losses"]] == told


def test_every_commit_verifies_and_nothing_is_left_behind(result: RunResult) -> None:
    assert assert_all_commits_verify(result.run)[-1] == STEPS
    assert_nothing_left(result)

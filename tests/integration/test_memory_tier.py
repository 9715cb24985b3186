"""A run goes on from memory: after a killed node, a join and a drain notice, with nothing read from the store.

Real: the command, a Ray cluster of three nodes, SIGKILL of a whole node, FSDP over gloo, Keepers that hold and
replicate every step, a file system store.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.runs import (
    RunProcess,
    RunResult,
    assert_all_commits_verify,
    assert_nothing_left,
    assert_samples_in_order,
    attempts_of,
    make_run,
    write_rows,
)

STEPS, EVERY_STEPS, KILL_AT = 60, 25, 12
JOIN_STEPS = 200  # a worker needs its time to start
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def data_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = str(tmp_path_factory.mktemp("rows"))
    write_rows(url)
    return url


def run_with(folder: Path, data_url: str, chaos: str, steps: int) -> RunResult:
    """Three workers that keep every step in memory and save every `EVERY_STEPS` to the store."""
    settings: dict[str, dict[str, Any]] = {
        "checkpoint": {"every_steps": EVERY_STEPS, "memory": {"mode": "on", "every_steps": 1}},
        "world": {"max_workers": 3},
    }
    run = make_run(folder, data_url, steps=steps, every_steps=EVERY_STEPS, settings=settings)
    with RunProcess.of_cli(run, "--local-nodes", "3", "--chaos", chaos) as process:
        return process.finish(300.0)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, data_url: str) -> RunResult:
    """One node killed before the first Checkpoint, one added."""
    return run_with(tmp_path_factory.mktemp("killed"), data_url, f"kill-node@{KILL_AT},add-node@14", JOIN_STEPS)


@pytest.fixture(scope="module")
def drained(tmp_path_factory: pytest.TempPathFactory, data_url: str) -> RunResult:
    """One node gets a notice and is killed when it is over."""
    return run_with(tmp_path_factory.mktemp("drained"), data_url, f"drain-node@{KILL_AT}:20s", STEPS)


def of_attempt(result: RunResult, number: int, name: str) -> list[dict[str, Any]]:
    return [event for event in result.named(name) if event["attempt"] == number]


def tiers_of(result: RunResult, number: int) -> dict[str, int]:
    """Bytes that the ranks of an Attempt read, by Tier."""
    [restored] = of_attempt(result, number, "restored")
    tiers: dict[str, int] = restored["tiers"]
    return tiers


def test_a_killed_node_costs_at_most_one_step_and_nothing_is_read_from_the_store(killed: RunResult) -> None:
    assert killed.exit_code == 0, killed.stderr
    assert attempts_of(killed)[:2] == [("start", 3), ("node-lost", 2)]
    _, lost, *_ = killed.summary["attempts"]
    assert lost["restored_from"] == "peer-memory", killed.stderr
    assert lost["restored_step"] >= KILL_AT - 1
    assert lost["lost_steps"] <= 1
    tiers = tiers_of(killed, 2)
    assert tiers["peer-memory"] > 0
    assert set(tiers) <= {"own-memory", "peer-memory"}
    assert killed.named("memory_passed_over") == []


def test_a_join_parts_without_a_save_and_loses_no_step(killed: RunResult) -> None:
    assert attempts_of(killed)[2:] == [("join", 3)]
    joined = killed.summary["attempts"][2]
    [left] = killed.named("left")
    assert joined["restored_step"] == left["step"]
    assert joined["lost_steps"] == 0
    assert set(tiers_of(killed, 3)) <= {"own-memory", "peer-memory"}
    [part] = [event for event in killed.named("save_bound") if event["kind"] == "part"]
    assert part["step"] == left["step"]
    assert left["step"] not in [event["step"] for event in killed.named("committed")]


def test_a_drain_notice_moves_the_state_by_memory_and_a_checkpoint_follows(drained: RunResult) -> None:
    assert drained.exit_code == 0, drained.stderr
    assert attempts_of(drained) == [("start", 3), ("preemption", 2)]
    moved = drained.summary["attempts"][1]
    [left] = drained.named("left")
    assert (moved["restored_step"], moved["lost_steps"]) == (left["step"], 0)
    assert set(tiers_of(drained, 2)) <= {"own-memory", "peer-memory"}
    # The cadence may be due just before.
    [after] = [e for e in of_attempt(drained, 2, "save_bound") if e["reason"].startswith("after a preemption notice")]
    assert after["step"] in [event["step"] for event in drained.named("committed")]


@pytest.mark.parametrize(("name", "steps"), [("killed", JOIN_STEPS), ("drained", STEPS)])
def test_what_was_trained_is_what_no_fault_would_have_changed(
    name: str, steps: int, request: pytest.FixtureRequest
) -> None:
    result: RunResult = request.getfixturevalue(name)
    assert_samples_in_order(result)
    assert_all_commits_verify(result.run)
    assert result.summary["steps"] == steps
    assert result.summary["memory"]["mode"] == "replicated"
    assert result.summary["memory"]["safe_step"] >= steps - 2
    for number in {event["attempt"] for event in result.named("attempt_started")} - {1}:
        first = of_attempt(result, number, "step")[0]
        assert first["step"] == of_attempt(result, number, "attempt_started")[0]["restored_step"] + 1
    assert_nothing_left(result)

"""A node dies under a run and another one joins it: nothing that the training has to show for itself differs.

Real: the command, a Ray cluster of four nodes, SIGKILL of a whole node, FSDP over gloo, Keepers, a file system store.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.arena import arena_directory
from tests.runs import (
    GLOBAL_BATCH,
    NUM_ROWS,
    SEQUENCE_LENGTH,
    Event,
    RunProcess,
    RunResult,
    assert_all_commits_verify,
    assert_each_attempt_goes_on_where_it_restored,
    assert_nothing_left,
    assert_samples_in_order,
    attempts_of,
    effective_steps,
    make_run,
)

EVERY_STEPS = 20
pytestmark = pytest.mark.timeout(400)


class ArenaWatch:
    """Notes which nodes' memory still lay about when an Attempt without them had made its first step."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._dead: list[str] = []
        self.looked_at: list[str] = []
        self.left: list[str] = []

    def on_event(self, event: Event) -> None:
        if event["event"] == "chaos" and event["verb"] == "kill-node":
            self._dead.append(event["node_id"])
        elif event["event"] == "step" and event["attempt"] > 1:
            self.looked_at += self._dead
            self.left += [node for node in self._dead if arena_directory(self._run_id, node).exists()]
            self._dead = []


@pytest.fixture(scope="module")
def arenas() -> list[ArenaWatch]:
    return []


@pytest.fixture(scope="module")
def elastic(
    tmp_path_factory: pytest.TempPathFactory, data_url: str, uninterrupted: RunResult, arenas: list[ArenaWatch]
) -> RunResult:
    """Four workers, one node killed, one added."""
    folder: Path = tmp_path_factory.mktemp("elastic")
    run = make_run(folder, data_url, steps=len(uninterrupted.summary["losses"]), every_steps=EVERY_STEPS)
    watch = ArenaWatch(run.run_id)
    arenas.append(watch)
    with RunProcess.of_cli(run, "--local-nodes", "4", "--chaos", "kill-node@24,add-node@30") as process:
        return process.finish(300.0, on_event=watch.on_event)


def test_the_run_goes_on_with_three_workers_and_then_with_four_again(elastic: RunResult) -> None:
    assert elastic.exit_code == 0, elastic.stderr
    assert elastic.summary["status"] == "finished"
    assert attempts_of(elastic) == [("start", 4), ("node-lost", 3), ("join", 4)]
    assert [attempt["world_size"] for attempt in elastic.summary["attempts"]] == [4, 3, 4]
    assert {event["world_size"] for event in elastic.named("regrouped")} == {3, 4}
    assert [event["verb"] for event in elastic.named("chaos")] == ["kill-node", "add-node"]


def test_a_loss_costs_at_most_the_steps_since_the_last_save_and_a_join_none(elastic: RunResult) -> None:
    _, lost, joined = elastic.summary["attempts"]
    assert lost["restored_from"] == "peer-memory"
    trained = max(event["step"] for event in elastic.named("step") if event["attempt"] == lost["attempt"] - 1)
    assert 24 - EVERY_STEPS <= lost["restored_step"] <= trained + 1  # the step under way may be whole in memory
    assert 0 <= lost["lost_steps"] <= EVERY_STEPS
    assert joined["lost_steps"] == 0
    left = elastic.named("left")[-1]["step"]
    assert joined["restored_step"] == left
    assert_each_attempt_goes_on_where_it_restored(elastic)


def test_the_loss_of_every_step_is_the_uninterrupted_runs(elastic: RunResult, uninterrupted: RunResult) -> None:
    assert uninterrupted.exit_code == 0, uninterrupted.stderr
    expected, found = effective_steps(uninterrupted.events), effective_steps(elastic.events)
    assert sorted(found) == sorted(expected)
    assert len({step["loss"] for step in expected.values()}) > len(expected) / 2, "losses that would prove nothing"
    for step, event in found.items():
        assert event["loss"] == pytest.approx(expected[step]["loss"], rel=1e-4), f"loss of step {step}"
    assert [entry["step"] for entry in elastic.summary["losses"]] == sorted(expected)


def test_the_learning_rate_of_every_step_is_the_uninterrupted_runs(
    elastic: RunResult, uninterrupted: RunResult
) -> None:
    expected, found = effective_steps(uninterrupted.events), effective_steps(elastic.events)
    assert len({step["lr"] for step in expected.values()}) > len(expected) / 2, "a schedule that would prove nothing"
    for step, event in found.items():
        assert event["lr"] == pytest.approx(expected[step]["lr"], rel=1e-12, abs=0), f"learning rate of step {step}"


def test_every_sample_is_consumed_exactly_once_and_in_order(elastic: RunResult, uninterrupted: RunResult) -> None:
    assert_samples_in_order(uninterrupted)
    assert_samples_in_order(elastic)
    assert len(elastic.summary["losses"]) * GLOBAL_BATCH == NUM_ROWS
    assert elastic.summary["sample_digest"] == uninterrupted.summary["sample_digest"]
    assert elastic.summary["tokens"] == NUM_ROWS * SEQUENCE_LENGTH


def test_a_lost_nodes_memory_is_gone_before_the_run_goes_on(elastic: RunResult, arenas: list[ArenaWatch]) -> None:
    (watch,) = arenas
    assert watch.looked_at == [event["node_id"] for event in elastic.named("chaos") if event["verb"] == "kill-node"]
    assert watch.left == []


def test_every_commit_verifies_and_nothing_is_left_behind(elastic: RunResult, uninterrupted: RunResult) -> None:
    for result in (uninterrupted, elastic):
        steps = assert_all_commits_verify(result.run)
        assert steps[-1] == result.summary["steps"]
        assert_nothing_left(result)

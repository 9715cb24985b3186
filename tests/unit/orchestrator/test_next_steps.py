"""What the report says to try next: commands that keep what the person asked for."""

from __future__ import annotations

import shlex

import pytest

from orchestrator.config import WorldConfig
from orchestrator.next_steps import chaos_nodes, next_steps
from orchestrator.report_text import report_text
from orchestrator.summary import Event, RunSummary, summarize
from tests.unit.orchestrator.test_report_text import run_log

LOOP = ("--loop", "train:train", "--loop-config", '{"width": 64}')
ASKED = ("run.yaml", "run.url=./a", "run.steps=6", "run.resume=4", "--local-nodes", "3", *LOOP)


def stopped() -> RunSummary:
    end: Event = {"event": "run_finished", "t_s": 15.0, "status": "stopped", "exit_reason": "Ctrl-C", "exit_code": 14}
    return summarize([*run_log()[:-1], end])


def quiet() -> RunSummary:
    return summarize([event for event in run_log() if event.get("attempt") != 2 and event["event"] != "fault"])


def test_a_run_that_did_not_finish_goes_on_with_all_that_was_asked_for() -> None:
    line = next_steps(stopped(), "s3://b/my run", ASKED, 4)[0]
    command, comment = line.split("   # ")
    assert shlex.split(command) == [
        "raysume", "run", "run.yaml", "run.url=s3://b/my run", "run.steps=6", "--local-nodes", "3", *LOOP
    ]  # fmt: skip
    assert comment == "go on from the newest checkpoint"


def test_a_script_is_run_again() -> None:
    assert next_steps(stopped(), "/out", (), 4)[0].startswith("run the same script again ")
    assert not [line for line in next_steps(quiet(), "/out", (), 4) if "--chaos" in line]


def test_a_quiet_run_is_offered_chaos_with_its_own_loop_on_a_cluster_that_fits() -> None:
    line = next_steps(quiet(), "/out", ASKED, 2)[-1]
    assert shlex.split(line) == [
        "raysume", "run", "run.yaml", "run.url=./outputs/chaos", "run.steps=6", *LOOP, "--local-nodes", "2",
        "--chaos", "kill-node@1,add-node@2",
    ]  # fmt: skip
    assert not [line for line in next_steps(summarize(run_log()), "/out", ASKED, 2) if "--chaos" in line]


def test_the_report_ends_with_them() -> None:
    text = report_text(quiet(), url="/o u t", asked=ASKED, nodes=2)
    assert "What to try next\n" in text
    assert "raysume checkpoints verify '/o u t'" in text


@pytest.mark.parametrize(
    ("least", "most", "per_node", "nodes"),
    [(1, 1, None, 2), (1, 2, None, 2), (2, 2, None, 3), (2, 16, None, 4), (6, 8, 2, 4), (8, 8, 1, 9)],
)
def test_the_least_number_of_workers_outlives_the_loss_of_a_node(
    least: int, most: int, per_node: int | None, nodes: int
) -> None:
    assert chaos_nodes(WorldConfig(min_workers=least, max_workers=most, workers_per_node=per_node)) == nodes

"""A save that takes long is no hang, and one that takes too long is: each phase has a limit of its own.

Real: the command with its supervisor, two Ray nodes, SIGSTOP of the Keeper that a rank's save waits for, gloo.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from orchestrator.chaos_processes import KEEPER_TITLE, pids_titled
from tests.runs import (
    RunProcess,
    RunResult,
    assert_all_commits_verify,
    assert_each_attempt_goes_on_where_it_restored,
    assert_nothing_left,
    assert_samples_in_order,
    make_run,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
STEP_LIMIT_S, LONG_SAVE_S, SAVE_LIMIT_S = 5.0, 9.0, 16.0
SETTINGS = {
    "world": {"min_workers": 1, "max_workers": 2, "start_grace_s": 60.0, "accept_joins": False},
    # A call to a Keeper gives up after 30 s: the limits are below, so that it is they that decide.
    "failure": {"training_s": STEP_LIMIT_S, "checkpointing_s": SAVE_LIMIT_S, "silent_s": 60.0},
}


@contextmanager
def stopped_keeper(process: RunProcess) -> Iterator[None]:
    """One node's Keeper answers nothing inside, so that the save of its rank stands still."""
    pid = pids_titled(process.pid, KEEPER_TITLE)[0]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory, data_url: str) -> RunResult:
    """One save longer than a step may take, then one longer than a save may take."""
    settings = SETTINGS | {"checkpoint": {"every_steps": 10, "memory": {"mode": "off"}}}
    run = make_run(tmp_path_factory.mktemp("held"), data_url, steps=100_000, every_steps=10, settings=settings)
    with RunProcess.of_cli(run, "--local-nodes", "2") as process:
        process.wait_for("committed", 120.0)
        with stopped_keeper(process):
            threading.Event().wait(LONG_SAVE_S)  # the fault's own length
        newest = process.events()[-1]["step"] or 0
        process.wait_for("committed", 60.0, lambda event: event["step"] > newest + 10)
        with stopped_keeper(process):
            process.wait_for("fault", 60.0)
        process.wait_for("committed", 90.0, lambda event: event["attempt"] == 2)
        os.kill(process.pid, signal.SIGTERM)
        return process.finish(90.0)


def test_a_save_longer_than_a_step_may_take_costs_no_attempt(held: RunResult) -> None:
    ends = [event["finished_s"] for event in held.named("step") if event["attempt"] == 1]
    gaps = sorted(later - earlier for earlier, later in itertools.pairwise(ends))
    assert gaps[-1] > STEP_LIMIT_S, "no step stood still: nothing is proven"
    assert [event["cause"] for event in held.named("attempt_started")] == ["start", "hang"], held.stderr
    assert held.named("checkpointing"), "nothing said what the run was at meanwhile"


def test_a_save_longer_than_a_save_may_take_is_killed_and_named(held: RunResult) -> None:
    (fault,) = held.named("fault")
    assert fault["cause"] == "hang"
    assert "checkpointing_timeout" in fault["detail"]
    assert len(fault["workers"]) == 1, "who only waits for it is left alone"


def test_the_history_is_one_and_whole(held: RunResult) -> None:
    assert_samples_in_order(held)
    assert_each_attempt_goes_on_where_it_restored(held)
    assert_all_commits_verify(held.run)
    assert_nothing_left(held)

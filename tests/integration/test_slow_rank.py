"""A rank that is held up most of the time tells so itself, and those that wait for it do not. Real: gloo, FSDP2.

When a node is named for it is told by tests/unit/orchestrator/test_slow_nodes.py.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fakes.rank_processes import Trio
from tests.fakes.token_datasets import write_numbered_rows
from tests.fakes.worker_settings import make_settings
from workers.contract import OutcomeKind
from workers.session import Session

STEPS, HELD_S, FREE_S = 30, 0.06, 0.02


@contextmanager
def held_up(pid: int) -> Iterator[None]:
    """Stop the process for three quarters of the time."""
    is_over = threading.Event()

    def hold() -> None:
        while not is_over.is_set():
            os.kill(pid, signal.SIGSTOP)
            is_over.wait(HELD_S)
            os.kill(pid, signal.SIGCONT)
            is_over.wait(FREE_S)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def train(session: Session) -> None:
    for step in session.steps():
        for leaf in step.leaves():
            step.backward(leaf, session.loss(leaf))
        step.apply()
        session.step_end(step)


@pytest.mark.slow
def test_waiting_for_a_slow_rank_is_no_computing(tmp_path: Path) -> None:
    url = str(tmp_path / "rows")
    write_numbered_rows(url, 200, sequence_length=16)
    settings = make_settings(url, total_steps=STEPS)
    wide = {**settings.model.config, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4}
    settings = replace(settings, model=settings.model.model_copy(update={"config": wide}))
    trio = Trio()
    try:
        trio.make(settings, tmp_path, train)
        with held_up(trio.processes[1].pid):
            attempt = trio.start(3, timeout_s=110.0)
            for process in trio.processes:
                process.send("ended", attempt, 110.0)
            ended = [process.receive() for process in trio.processes]
    finally:
        trio.close()
    assert [one.outcome.kind for one in ended] == [OutcomeKind.FINISHED] * 3
    reports = ended[0].reports
    assert all(len(report.compute_s) == 3 and min(report.compute_s) > 0.0 for report in reports)
    first, held, last = (sum(report.compute_s[rank] for report in reports[2:]) for rank in range(3))
    assert held > 1.5 * max(first, last), "the rank that is held up, and not those that wait for it, takes longer"

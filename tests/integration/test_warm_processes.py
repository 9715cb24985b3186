"""A worker process that lives on spoilt: after a World that came to nothing twice it is not tried a third time.

Real: two Ray nodes on loopback, worker processes, FSDP over gloo, a store of files. What spoils it is played: for as
long as it lives, the training loop raises in it what a broken connection raises.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from orchestrator.exit_codes import ExitCode
from orchestrator.load_config import load_config
from orchestrator.options import DriverOptions
from orchestrator.trainer import ElasticTrainer
from storage.events import read_events
from tests.clusters import ray_nodes
from tests.runs import make_run, write_rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

STEPS = 4


@pytest.fixture(scope="module")
def _nodes() -> Iterator[None]:
    # The loop below is made here; workers are other processes, which cannot import this file.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with ray_nodes(2):
        yield


def train_where_unspoilt(session: Any) -> None:
    """The first process that is rank 1 never gets beyond its groups."""
    spoilt = Path(session.loop_config["spoilt"])
    if session.rank == 1 and not spoilt.exists():
        spoilt.write_text(str(os.getpid()))
    if spoilt.exists() and spoilt.read_text() == str(os.getpid()):
        raise RuntimeError("gloo/transport/tcp/pair.cc: Connection closed by peer")
    for step in session.steps():
        for leaf in step.leaves():
            step.backward(leaf, session.loss(leaf))
        step.apply()
        session.step_end(step)


@pytest.mark.usefixtures("_nodes")
def test_processes_that_came_to_nothing_twice_are_replaced_and_the_run_goes_on(tmp_path: Path) -> None:
    data_url, spoilt = str(tmp_path / "rows"), tmp_path / "spoilt"
    write_rows(data_url, 64 * STEPS)
    world = {"min_workers": 2, "max_workers": 2}
    run = make_run(tmp_path, data_url, steps=STEPS, every_steps=STEPS, settings={"world": world})
    trainer = ElasticTrainer(
        train_where_unspoilt,
        {"spoilt": str(spoilt)},
        config=load_config(run.config_path),
        options=DriverOptions(show_progress=False),
    )
    result = trainer.fit()
    events = read_events(run.events_path)
    assert result.exit_code is ExitCode.SUCCESS, events[-1]
    causes = [event["cause"] for event in events if event["event"] == "attempt_started"]
    assert causes == ["start", "collective-error", "collective-error"]
    ready = [event for event in events if event["event"] == "worker_ready"]
    (replaced,) = (event for event in events if event["event"] == "workers_replaced")
    assert replaced["workers"] == [event["worker"] for event in ready[:2]]
    pids = [event["pid"] for event in ready]
    assert int(spoilt.read_text()) in pids[:2]
    assert len(set(pids)) == len(pids) == 4
    assert len([event for event in events if event["event"] == "step"]) == STEPS

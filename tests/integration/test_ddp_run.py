"""A loop of a user's own under DDP: a worker is killed, later one rank's memory goes bad, and the run ends as if never.

Real: two Ray nodes on loopback, worker processes, gloo, Keepers, the memory Tier, a store of files.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from torch import nn
from torch.nn import functional

from orchestrator.exit_codes import ExitCode
from orchestrator.load_config import load_config
from orchestrator.options import DriverOptions
from orchestrator.trainer import ElasticTrainer
from storage.events import read_events
from tests.clusters import RayNodes, ray_nodes
from tests.runs import Run, assert_all_commits_verify, make_run, write_rows

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]

STEPS, EVERY_STEPS = 200, 20  # long enough for the driver to hear of a refused Commit before the end
KILLED_AT, FLIPPED_AT, REFUSED_AT = 3, 25, 40


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(257, 32)
        self.hidden = nn.Linear(32, 64)
        self.output = nn.Linear(64, 257)
        self.scale = nn.Parameter(torch.empty(()))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.output(torch.relu(self.hidden(self.tokens(ids)))) * self.scale
        return logits


def train(session: Any) -> None:
    """As a user writes it, but for what goes wrong: each of it once in a run."""
    model = session.build(make_model=Net).model
    for step in session.steps():
        if session.rank == 2 and step.number == KILLED_AT and happens(session, "kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        for batch in step.leaves():
            logits = model(batch.input_ids)
            step.backward(batch, functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten()))
        step.apply()
        if session.rank == 1 and step.number == FLIPPED_AT and happens(session, "flip"):
            with torch.no_grad():
                model.hidden.bias.view(torch.int32)[5] ^= 1 << 12
        session.step_end(step)


def happens(session: Any, what: str) -> bool:
    if what not in session.loop_config["faults"]:
        return False
    try:
        (Path(str(session.loop_config["folder"])) / what).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    # The loop is made here; workers are other processes, which cannot import this file.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with ray_nodes(2, cpus_per_node=2) as nodes:
        yield nodes


def fit(folder: Path, data_url: str, faults: list[str]) -> tuple[Run, list[dict[str, Any]]]:
    settings: dict[str, dict[str, Any]] = {
        "world": {"min_workers": 3, "max_workers": 3},
        "model": {"config": {}, "parallelism": "ddp"},
        "optim": {"warmup_steps": 1},
    }
    run = make_run(folder, data_url, steps=STEPS, every_steps=EVERY_STEPS, settings=settings)
    config = load_config(run.config_path, ["reproducible=true"])
    loop_config = {"faults": faults, "folder": str(folder)}
    trainer = ElasticTrainer(train, loop_config, config=config, options=DriverOptions(show_progress=False))
    assert trainer.fit().exit_code is ExitCode.SUCCESS
    return run, read_events(run.events_path)


def named(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == name]


def losses(events: list[dict[str, Any]]) -> dict[int, float]:
    """Of each step as it was trained last."""
    return {event["step"]: event["loss"] for event in named(events, "step")}


def test_a_killed_worker_and_a_flipped_bit_leave_the_run_as_if_neither_had_been(
    nodes: RayNodes, tmp_path: Path
) -> None:
    del nodes
    data_url = str(tmp_path / "rows")
    write_rows(data_url, 256)
    _, unbroken = fit(tmp_path / "unbroken", data_url, [])
    run, events = fit(tmp_path / "broken", data_url, ["kill", "flip"])

    first, second, third = named(events, "attempt_started")
    assert (first["world_size"], second["world_size"], third["world_size"]) == (3, 3, 3)
    assert second["cause"] == "worker-lost"
    assert third["cause"] == "replicas-disagree"
    assert third["restored_step"] == EVERY_STEPS, "what memory holds beyond the Commit is not to be trusted"

    found, *_ = named(events, "replicas_disagree")
    assert (found["step"], found["ranks"], found["tensor"]) == (REFUSED_AT, [1], "model.hidden.bias")
    fault = named(events, "fault")[-1]
    accused = second["members"][1]
    assert fault["cause"] == "replicas-disagree"
    assert accused in fault["workers"]
    assert f"rank 1 (worker {accused}, node " in fault["detail"]
    assert REFUSED_AT in [event["step"] for event in named(events, "save_failed")]
    assert accused not in third["members"], "the process with the bad memory trains on"

    assert losses(events) == losses(unbroken)
    assert named(events, "run_finished")[-1]["weights_digest"] == named(unbroken, "run_finished")[-1]["weights_digest"]
    assert_all_commits_verify(run)

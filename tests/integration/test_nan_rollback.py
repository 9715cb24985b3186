"""NaN over the whole path: a driver on two Ray nodes rolls back, skips the batch once, and says so everywhere.

Real: Ray, worker processes, FSDP over gloo, Keepers, coordinator, Journal, a store of files, the summary.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from torch.nn import functional

from orchestrator.exit_codes import ExitCode
from orchestrator.load_config import load_config
from orchestrator.options import DriverOptions
from orchestrator.summary import summarize
from orchestrator.trainer import ElasticTrainer
from storage.events import read_events
from tests.clusters import RayNodes, ray_nodes
from tests.fakes.token_datasets import write_numbered_rows
from tests.runs import (
    GLOBAL_BATCH,
    MICRO_BATCH,
    SEED,
    SEQUENCE_LENGTH,
    Run,
    assert_all_commits_verify,
    effective_steps,
    make_run,
)
from workers.sample_order import chain, leaf_digest, sample_ids
from workers.state import EMPTY_CHAIN

pytestmark = pytest.mark.timeout(240)

ROWS, STEPS, EVERY_STEPS, BAD_STEP = 256, 10, 2, 6
BAD_PLACE = (BAD_STEP - 1) * GLOBAL_BATCH
BAD_ROW = int(sample_ids(SEED, ROWS, BAD_PLACE, GLOBAL_BATCH)[-1])


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    # The loop below is made here; workers are other processes, which cannot import this file.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with ray_nodes(2) as nodes:
        yield nodes


def train(session: Any) -> None:
    """A bigram whose loss is not a number for one row, or whenever one step comes."""
    state = session.build(
        make_model=lambda: torch.nn.Sequential(torch.nn.Embedding(ROWS, ROWS)),
        make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        make_scheduler=lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0),
    )
    config = session.loop_config
    for step in session.steps():
        for leaf in step.leaves():
            loss = functional.cross_entropy(state.model(leaf.input_ids).flatten(0, 1), leaf.labels.flatten())
            is_bad = config.get("bad_row") in leaf.sample_ids or config.get("bad_step") == step.number
            step.backward(leaf, loss * float("nan") if is_bad else loss)
        step.apply()
        session.step_end(step)


def fit(folder: Path, loop_config: dict[str, Any], **failure: Any) -> tuple[ExitCode, Run, list[dict[str, Any]]]:
    url = str(folder / "rows")
    write_numbered_rows(url, ROWS, sequence_length=SEQUENCE_LENGTH)
    two = {"min_workers": 2, "max_workers": 2}
    settings: dict[str, Any] = {"world": two, "model": {"config": {}}, "failure": failure}
    run = make_run(folder, url, steps=STEPS, every_steps=EVERY_STEPS, settings=settings)
    options = DriverOptions(show_progress=False)
    result = ElasticTrainer(train, loop_config, config=load_config(run.config_path), options=options).fit()
    return result.exit_code, run, read_events(run.events_path)


def named(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == name]


@pytest.mark.usefixtures("nodes")
def test_a_run_with_a_bad_batch_finishes_without_it_and_lists_it(tmp_path: Path) -> None:
    exit_code, run, events = fit(tmp_path, {"bad_row": BAD_ROW})
    (finish,) = named(events, "run_finished")
    assert exit_code is ExitCode.SUCCESS, finish
    (skipped,) = named(events, "window_skipped")
    assert (skipped["step"], skipped["place"], skipped["samples"]) == (BAD_STEP, BAD_PLACE, GLOBAL_BATCH)
    attempts = [(event["cause"], event["restored_step"]) for event in named(events, "attempt_started")]
    assert [cause for cause, _ in attempts] == ["start", "bad-step"]
    assert 0 < attempts[1][1] < BAD_STEP, "from a save before it, or from memory"
    pids = {event["pid"] for event in named(events, "worker_ready")}
    assert len(pids) == len(named(events, "worker_ready")) == 2, "a worker process was replaced"

    summary = summarize(events)
    assert summary["skipped_windows"] == [{"step": BAD_STEP, "place": BAD_PLACE, "samples": GLOBAL_BATCH}]
    batches = [number for number in range(STEPS + 1) if number != BAD_STEP - 1]
    expected = EMPTY_CHAIN
    for step, number in enumerate(batches, start=1):
        ids = sample_ids(SEED, ROWS, number * GLOBAL_BATCH, GLOBAL_BATCH)
        expected = chain(expected, [leaf_digest(leaf) for leaf in ids.reshape(-1, MICRO_BATCH)])
        assert effective_steps(events)[step]["sample_chain"] == expected, step
    assert summary["sample_digest"] == expected
    assert all(event["loss"] == event["loss"] for event in named(events, "step")), "a NaN was told as a step"
    assert assert_all_commits_verify(run)[-1] == STEPS


@pytest.mark.usefixtures("nodes")
def test_a_step_that_gives_nan_with_any_batch_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    exit_code, run, events = fit(tmp_path, {"bad_step": BAD_STEP})
    assert exit_code is ExitCode.USER_ERROR
    (finish,) = named(events, "run_finished")
    assert f"step {BAD_STEP} went wrong again" in finish["exit_reason"]
    assert len(named(events, "attempt_started")) == 2
    assert len(named(events, "window_skipped")) == 1
    assert assert_all_commits_verify(run)[-1] < BAD_STEP


@pytest.mark.usefixtures("nodes")
def test_a_run_that_is_told_to_stops_at_the_first_nan(tmp_path: Path) -> None:
    exit_code, run, events = fit(tmp_path, {"bad_row": BAD_ROW}, nan="stop")
    assert exit_code is ExitCode.USER_ERROR
    (finish,) = named(events, "run_finished")
    assert f"step {BAD_STEP}: loss nan" in finish["exit_reason"]
    assert len(named(events, "attempt_started")) == 1
    assert assert_all_commits_verify(run)[-1] < BAD_STEP

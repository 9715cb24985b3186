"""What `resume` accepts and refuses: wrong places, absent steps, other models, other batches, other worlds.

Real: drivers as processes, worker processes on gloo, a local store, OpenStack Swift and a proxy that denies access.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from orchestrator.exit_codes import ExitCode
from storage.commit_log import CommitLog
from storage.open_store import open_store
from tests.clusters import RayNodes
from tests.s3_runs import Driver, RunSetup, expected_chains, make_dataset, run_cluster
from tests.servers import DelayProxy, SwiftServer

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def cluster(swift_server: SwiftServer) -> Iterator[RayNodes]:
    with run_cluster(swift_server) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def trunk(cluster: RayNodes, tmp_path_factory: pytest.TempPathFactory) -> RunSetup:
    """A finished Run of 10 steps with Checkpoints of 5 and 10; tests work on copies or only read it."""
    root = tmp_path_factory.mktemp("trunk")
    run = RunSetup(
        name="trunk",
        url=str(root / "store"),
        directory=root / "run",
        address=cluster.address,
        dataset=make_dataset(root),
        steps=10,
    )
    driver = run.drive()
    assert driver.code == ExitCode.SUCCESS, driver.output[-6000:]
    assert steps_of(run.url) == [5, 10]
    return run


def branch(trunk: RunSetup, directory: Path, name: str, url: str | None = None, **run: Any) -> RunSetup:
    """A new Run with the trunk's configuration, changed below ``run``."""
    config = deepcopy(trunk.config)
    made = RunSetup(
        name=name,
        url=url or str(directory / "store"),
        directory=directory / "run",
        address=trunk.address,
        dataset=trunk.dataset,
        steps=run.get("steps", trunk.steps),
    )
    made.config = config | {"run": {"name": name, "url": made.url, "steps": made.steps} | run}
    return made


def steps_of(url: str) -> list[int]:
    return [commit.step for commit in CommitLog(open_store(url), None).commits()]


def assert_nothing_was_trained(run: RunSetup, driver: Driver, *named: str) -> None:
    """Refused as a configuration error, with a message that names what is wrong, and not one step taken."""
    assert driver.code == ExitCode.CONFIG_ERROR, driver.output[-6000:]
    for text in named:
        assert text in driver.output
    assert run.events("step") == []


def test_a_resume_path_that_holds_no_checkpoint_is_no_fresh_start(trunk: RunSetup, bucket: str, tmp_path: Path) -> None:
    run = branch(trunk, tmp_path, "typo", resume=f"s3://{bucket}/typo")
    assert_nothing_was_trained(run, run.drive(), f"s3://{bucket}/typo")
    assert steps_of(run.url) == []


def test_a_resume_path_without_permission_is_no_fresh_start(
    trunk: RunSetup, bucket: str, swift_server: SwiftServer, tmp_path: Path
) -> None:
    proxy = DelayProxy(swift_server.port, pattern="denied", methods=frozenset({"GET", "HEAD"})).start()
    try:
        proxy.refuse_next(1_000_000, status=403)
        run = branch(trunk, tmp_path, "denied", resume=f"s3://{bucket}/denied")
        run.config["checkpoint"]["store"] = {"endpoint_url": proxy.endpoint}
        driver = run.drive()
    finally:
        proxy.stop()
    assert_nothing_was_trained(run, driver, f"s3://{bucket}/denied", "access denied")


def test_wrong_credentials_are_no_fresh_start(trunk: RunSetup, bucket: str, tmp_path: Path) -> None:
    run = branch(trunk, tmp_path, "locked", url=f"s3://{bucket}/run")
    driver = run.drive(env={"AWS_SECRET_ACCESS_KEY": "wrong"})
    assert_nothing_was_trained(run, driver, f"s3://{bucket}/run", "access denied")


def test_resume_none_on_a_used_url_is_refused(trunk: RunSetup, tmp_path: Path) -> None:
    run = branch(trunk, tmp_path, "trunk", url=trunk.url, resume="none")
    assert_nothing_was_trained(run, run.drive(), trunk.url, "step 10")


def test_a_step_that_does_not_exist_is_refused_with_those_that_do(trunk: RunSetup, tmp_path: Path) -> None:
    run = branch(trunk, tmp_path, "trunk", url=trunk.url, resume="7")
    assert_nothing_was_trained(run, run.drive(), "step 7", "5, 10")


def test_another_run_is_gone_on_with_at_any_world_size_and_again_after_a_fault_before_the_first_commit(
    trunk: RunSetup, tmp_path: Path
) -> None:
    """Eight leaves do not divide by three: the surplus ones are shared unevenly and the batch stays what it was."""
    run = branch(trunk, tmp_path, "fork", resume=trunk.url, steps=60)
    run.config["world"] |= {"min_workers": 2, "max_workers": 3, "start_grace_s": 60}
    run.config["checkpoint"]["every_steps"] = None  # only the last step is saved
    with run.driver() as driver:
        driver.wait_event("step")
        os.kill(driver.events("worker_ready")[0]["pid"], signal.SIGKILL)
        assert driver.wait() == ExitCode.SUCCESS, driver.output[-6000:]
    started = run.events("attempt_started")
    assert [event["restored_step"] for event in started] == [10, 10]
    assert [event["world_size"] for event in started] == [3, 2]
    restored = run.events("restored")[-1]
    assert (restored["attempt"], restored["step"]) == (started[-1]["attempt"], 10)
    assert (restored["fidelity"], restored["bound"]) == ("exact", None)
    assert restored["tiers"] == {"object-storage": restored["bytes"]}
    chains = expected_chains(run)
    for event in run.events("step"):
        assert (event["tokens"], event["position"]) == (8 * 16 * event["step"], 8 * event["step"])
        assert event["sample_chain"] == chains[event["step"]]
    last = [event["step"] for event in run.events("step") if event["attempt"] == started[-1]["attempt"]]
    assert last == list(range(11, 61))
    assert steps_of(run.url) == [60]
    assert steps_of(trunk.url) == [5, 10]


def test_a_larger_micro_batch_on_resume_changes_neither_total_steps_nor_position(trunk: RunSetup) -> None:
    """From the trunk's own step 5, so that it holds Checkpoints of 5 and 10 again afterwards."""
    losses = {event["step"]: event["loss"] for event in trunk.events("step")}
    driver = trunk.drive("run.resume=5", "data.micro_batch=4")
    assert driver.code == ExitCode.SUCCESS, driver.output[-6000:]
    assert driver.events("attempt_started")[0]["restored_step"] == 5
    steps = driver.events("step")
    assert [event["step"] for event in steps] == [6, 7, 8, 9, 10]
    assert [event["position"] for event in steps] == [8 * event["step"] for event in steps]
    assert [event["tokens"] for event in steps] == [8 * 16 * event["step"] for event in steps]
    assert [event["loss"] for event in steps] == pytest.approx([losses[event["step"]] for event in steps], rel=1e-4)
    assert steps_of(trunk.url) == [5, 10]


def test_a_model_with_another_layer_or_width_is_refused_by_name_and_partly_loaded_only_when_asked(
    trunk: RunSetup, tmp_path: Path
) -> None:
    wider = branch(trunk, tmp_path / "wider", "wider", resume=trunk.url, steps=12)
    wider.config["model"]["config"]["hidden_size"] = 48
    assert_nothing_was_trained(wider, wider.drive(), "model.embed_tokens.weight", "reshaped")

    deeper = branch(trunk, tmp_path / "deeper", "deeper", resume=trunk.url, steps=12)
    deeper.config["model"]["config"]["num_hidden_layers"] = 3
    assert_nothing_was_trained(deeper, deeper.drive(), "model.layers.2.", "missing")

    partial = deeper.drive("run.allow_partial=true")
    assert partial.code == ExitCode.SUCCESS, partial.output[-6000:]
    assert [event["step"] for event in deeper.events("step")] == [11, 12]

    shallower = branch(trunk, tmp_path / "shallower", "shallower", resume=deeper.url, steps=14)
    assert_nothing_was_trained(shallower, shallower.drive(), "model.layers.2.", "unexpected")

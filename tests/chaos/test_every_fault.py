"""Every kind of fault that a schedule can name strikes a run, and the run goes on, or says what it was.

Real: the command with its supervisor, Ray clusters on this machine, exceptions and refused memory inside workers,
network namespaces, full disks, a store behind a silent proxy. What each run is held against does not depend on the
fault: its Commits verify, its samples are those of the seed, its weights those of the unbroken run.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from orchestrator.chaos_disk import why_no_disks
from orchestrator.driver_record import events_path_of
from orchestrator.netns import why_no_networks
from orchestrator.run_identity import make_run_id
from storage.commit_log import CommitLog
from storage.open_store import open_store
from storage.verify import verify_commit
from tests.runs import (
    Run,
    RunProcess,
    RunResult,
    assert_all_commits_verify,
    assert_each_attempt_goes_on_where_it_restored,
    assert_nothing_left,
    assert_samples_in_order,
    effective_steps,
    make_run,
)
from tests.s3_stores import new_bucket
from tests.servers import MotoServer

STEPS = 60
EVERY_STEPS = 5
RUN_S = 280.0
Settings = Mapping[str, Mapping[str, Any]]
pytestmark = pytest.mark.timeout(600)
# Joins would add Attempts at steps that depend on how fast a lost worker's successor starts.
WORLD = {"min_workers": 1, "max_workers": 2, "start_grace_s": 120.0, "accept_joins": False}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, data_url: str) -> RunResult:
    """The same steps on one worker, with no fault."""
    run = make_run(tmp_path_factory.mktemp("unbroken"), data_url, steps=STEPS, every_steps=100)
    with RunProcess.of_cli(run, "--local-nodes", "1", "world.max_workers=1") as process:
        return process.finish(RUN_S)


def drive(folder: Path, data_url: str, chaos: str, *, nodes: int = 2, settings: Settings | None = None) -> RunResult:
    """A run of `STEPS` steps under ``chaos``, to its end."""
    merged = {"world": WORLD, **(settings or {})}
    run = make_run(folder, data_url, steps=STEPS, every_steps=EVERY_STEPS, settings=merged)
    with RunProcess.of_cli(run, "--local-nodes", str(nodes), "--chaos", chaos) as process:
        return process.finish(RUN_S)


def assert_as_unbroken(result: RunResult, unbroken: RunResult) -> None:
    """Whatever happened: nothing that the training has to show for itself differs, and nothing is left behind."""
    assert (result.exit_code, result.summary["status"]) == (0, "finished"), result.stderr[-4000:]
    assert_samples_in_order(result)
    assert_each_attempt_goes_on_where_it_restored(result)
    assert assert_all_commits_verify(result.run)[-1] == STEPS
    expected, found = effective_steps(unbroken.events), effective_steps(result.events)
    assert max(found) == STEPS
    for step, event in found.items():
        assert event["loss"] == pytest.approx(expected[step]["loss"], rel=1e-4), f"loss of step {step}"
        assert event["lr"] == pytest.approx(expected[step]["lr"], rel=1e-12, abs=0), f"learning rate of step {step}"
    assert result.summary["sample_digest"] == unbroken.summary["sample_digest"]
    assert result.summary["tokens"] == unbroken.summary["tokens"]
    assert_nothing_left(result)


def verbs(result: RunResult) -> list[str]:
    return [event["verb"] for event in result.named("chaos")]


def causes(result: RunResult) -> list[str]:
    return [event["cause"] for event in result.named("attempt_started")]


# -- processes ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hurt(tmp_path_factory: pytest.TempPathFactory, data_url: str) -> RunResult:
    """A Keeper dies, a node is slow for a second, one worker starves, in the other the training code raises."""
    chaos = "kill-keeper:1@4,slow-node:2@6:1s,oom-worker:2@16,raise-in-worker:1@36"
    settings = {"failure": {"max_user_errors": 1}}
    return drive(tmp_path_factory.mktemp("hurt"), data_url, chaos, settings=settings)


def test_faults_inside_processes_are_each_named_for_what_they_were(hurt: RunResult) -> None:
    assert set(verbs(hurt)) == {"kill-keeper", "slow-node", "slow-node-over", "raise-in-worker", "oom-worker"}
    starved, raised = hurt.named("fault")
    assert starved["cause"] in ("out-of-memory", "worker-lost")
    assert raised["cause"] == "user-error"
    assert "ChaosError: raised on purpose" in raised["detail"]
    assert causes(hurt) == ["start", starved["cause"], raised["cause"]], "a dead Keeper or a slow node broke an Attempt"


def test_a_run_that_was_hurt_inside_its_processes_ends_as_the_unbroken_one(
    hurt: RunResult, unbroken: RunResult
) -> None:
    assert_as_unbroken(hurt, unbroken)


@pytest.mark.slow
def test_an_error_beyond_the_budget_ends_the_run_with_itself_as_the_reason(tmp_path: Path, data_url: str) -> None:
    result = drive(tmp_path, data_url, "raise-in-worker:1@8", settings={"failure": {"max_user_errors": 0}})
    assert (result.exit_code, result.summary["status"]) == (11, "user-error")
    assert "ChaosError: raised on purpose by the chaos schedule" in result.summary["exit_reason"]
    assert_nothing_left(result)


@pytest.mark.slow
def test_the_control_plane_dies_piece_by_piece_and_the_run_goes_on(
    tmp_path: Path, data_url: str, unbroken: RunResult
) -> None:
    result = drive(tmp_path, data_url, "restart-head@8,kill-coordinator@20")
    assert verbs(result) == ["restart-head", "kill-coordinator"], result.stderr
    assert causes(result)[-1] == "driver-restart"
    assert_as_unbroken(result, unbroken)


# -- faults in the middle of something -------------------------------------------------------------------------------


@pytest.mark.slow
def test_faults_strike_during_a_save_a_regroup_and_a_load(tmp_path: Path, data_url: str, unbroken: RunResult) -> None:
    chaos = "kill-worker:1@6+save,kill-keeper:2@6+regroup,kill-worker:2@6+load"
    result = drive(tmp_path, data_url, chaos, nodes=3, settings={"world": WORLD | {"max_workers": 3}})
    assert sorted(verbs(result)) == ["kill-keeper", "kill-worker", "kill-worker"], result.stderr
    assert set(causes(result)[1:]) == {"worker-lost"}
    assert_as_unbroken(result, unbroken)


@pytest.mark.slow
def test_a_node_and_the_keeper_of_another_one_die_at_the_same_step(
    tmp_path: Path, data_url: str, unbroken: RunResult
) -> None:
    result = drive(tmp_path, data_url, "kill-node:2@17,kill-keeper:1@17")
    assert sorted(verbs(result)) == ["kill-keeper", "kill-node"], result.stderr
    assert causes(result) == ["start", "node-lost"]
    assert_as_unbroken(result, unbroken)


# -- the machine ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(why_no_networks() is not None, reason="no network namespaces here")
def test_a_node_that_is_cut_off_is_lost_and_its_living_workers_change_nothing(
    tmp_path: Path, data_url: str, unbroken: RunResult
) -> None:
    settings = {"failure": {"group_timeout_s": 10.0, "silent_s": 10.0}}
    result = drive(tmp_path, data_url, "cut-node:2@12", settings=settings)
    assert verbs(result) == ["cut-node"], result.stderr
    (cut,), (fault,) = result.named("chaos"), result.named("fault")
    assert (fault["cause"], fault["nodes"]) == ("node-lost", [cut["node_id"]])
    assert_as_unbroken(result, unbroken)


@pytest.mark.slow
@pytest.mark.skipif(why_no_disks() is not None, reason="no disk can be mounted here")
def test_a_full_disk_costs_no_save_and_no_attempt(tmp_path: Path, data_url: str, unbroken: RunResult) -> None:
    settings = {"checkpoint": {"every_steps": EVERY_STEPS, "local_disk": {"mode": "on", "keep_free_bytes": 0}}}
    result = drive(tmp_path, data_url, "disk-full:1@12", settings=settings)
    assert verbs(result) == ["disk-full"], result.stderr
    assert causes(result) == ["start"]
    assert_as_unbroken(result, unbroken)


# -- the store ------------------------------------------------------------------------------------------------------


@pytest.fixture
def bucket_run(
    tmp_path: Path,
    data_url: str,
    moto_server: MotoServer,
    moto_client: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Run]:
    """A run whose root is a bucket on this machine, with little patience for a store that is silent."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", moto_server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", moto_server.secret_key)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto_server.endpoint)
    url = f"s3://{new_bucket(moto_client)}/run"
    settings = {
        "run": {"url": url},
        "world": WORLD,
        "checkpoint": {"store": {"retries": 1, "deadline_s": 2.0, "endpoint_url": moto_server.endpoint}},
    }
    made = make_run(tmp_path, data_url, steps=STEPS, every_steps=EVERY_STEPS, settings=settings)
    run_id = make_run_id("chaos", url)
    directory = events_path_of(url, run_id).parent
    yield Run(config_path=made.config_path, directory=directory, run_id=run_id)
    shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.slow
def test_a_store_that_falls_silent_costs_no_attempt_and_the_end_is_committed_when_it_is_back(
    bucket_run: Run, unbroken: RunResult
) -> None:
    with RunProcess.of_cli(bucket_run, "--local-nodes", "2", "--chaos", "store-outage@8:12s") as process:
        result = process.finish(RUN_S)
    assert (result.exit_code, result.summary["status"]) == (0, "finished"), result.stderr[-4000:]
    assert verbs(result) == ["store-outage", "store-outage-over"]
    assert causes(result) == ["start"]
    assert result.named("store_away")
    assert_samples_in_order(result)
    store = open_store(json.loads(bucket_run.config_path.read_text())["run"]["url"])
    log = CommitLog(store, bucket_run.run_id)
    newest = log.commits()[-1]
    assert newest.step == STEPS
    assert verify_commit(store, log, newest).is_good
    assert result.summary["sample_digest"] == unbroken.summary["sample_digest"]
    assert_nothing_left(result)


# -- the schedule ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chaos", "said"),
    [
        ("kill-node:3@5", "there is no node 3 then; nodes: 1 to 2"),
        ("store-outage@5:10s", "an outage is made by a proxy before the store"),
    ],
)
def test_a_schedule_that_cannot_be_starts_nothing(tmp_path: Path, data_url: str, chaos: str, said: str) -> None:
    result = drive(tmp_path, data_url, chaos)
    assert result.exit_code == 10
    assert said in result.stderr
    assert result.events == []

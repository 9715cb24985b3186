"""The object store goes away in the middle of a Run: killed, stopped, refusing; for a while, or for too long.

Real: drivers as processes, a Ray cluster, torch on gloo, OpenStack Swift (killed with SIGKILL and started again over
the same files, or held by SIGSTOP) and a proxy in front of it that refuses uploads.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.exit_codes import ExitCode
from storage.commit_log import CommitLog
from storage.open_store import open_store
from storage.verify import verify_commit
from tests.clusters import RayNodes
from tests.s3_runs import Driver, Event, RunSetup, expected_chains, make_dataset, run_cluster
from tests.servers import DelayProxy, SwiftServer

pytestmark = pytest.mark.timeout(420)

STEPS = 1500
RUN_S = 240.0


@pytest.fixture(scope="module")
def cluster(swift_server: SwiftServer) -> Iterator[RayNodes]:
    with run_cluster(swift_server) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_dataset(tmp_path_factory.mktemp("data"))


@pytest.fixture
def run(cluster: RayNodes, dataset: str, bucket: str, tmp_path: Path) -> RunSetup:
    """A Run whose root is on Swift, far longer than the outages; a save every half second or so."""
    made = RunSetup(
        name="outage",
        url=f"s3://{bucket}/run",
        directory=tmp_path / "run",
        address=cluster.address,
        dataset=dataset,
        steps=STEPS,
    )
    made.config["data"]["micro_batch"] = 8
    made.config["checkpoint"] |= {"every_steps": 40, "keep": 3, "store": {"retries": 1, "deadline_s": 3.0}}
    return made


@pytest.fixture
def swift(swift_server: SwiftServer) -> Iterator[SwiftServer]:
    """The session's Swift, alive again afterwards whatever happened."""
    yield swift_server
    swift_server.kill()
    swift_server.start()


def is_after(event: Event, other: Event) -> bool:
    return bool(event["t_s"] > other["t_s"])


def summary_of(run: RunSetup) -> dict[str, object]:
    found: dict[str, object] = json.loads(open_store(run.url).get("summary.json"))
    return found


def assert_newest_is_whole(run: RunSetup, step: int) -> None:
    log = CommitLog(open_store(run.url), run.run_id)
    commits = log.commits()
    assert commits[-1].step == step
    for commit in commits:
        report = verify_commit(log.store, log, commit)
        assert report.is_good, f"step {commit.step}: {'; '.join(map(str, report.problems))}"


def assert_history_is_whole(run: RunSetup) -> None:
    """Every step of the effective history once, each on exactly the samples that the seed gives it."""
    history: dict[int, Event] = {}
    for event in run.events():
        if event["event"] == "attempt_started":
            history = {step: kept for step, kept in history.items() if step <= event["restored_step"]}
        elif event["event"] == "step":
            history[event["step"]] = event
    chains = expected_chains(run)
    assert sorted(history) == list(range(1, run.steps + 1))
    assert all(event["sample_chain"] == chains[step] for step, event in history.items())


def assert_outage_was_outlasted(run: RunSetup, driver: Driver) -> None:
    """One Attempt, one outage said once, work at risk that grew, saves that were missed and counted, a whole end."""
    assert driver.code == ExitCode.SUCCESS, driver.output[-6000:]
    assert len(driver.events("attempt_started")) == 1
    (away,), (back,) = driver.events("store_away"), driver.events("store_back")
    assert away["reason"]
    risks = [event["at_risk_steps"] for event in driver.events("work_at_risk")]
    assert risks == sorted(set(risks)), "the work at risk must grow"
    assert risks[0] > 0
    assert back["at_risk_steps"] >= risks[-1]
    trained = [event["step"] for event in driver.events("step") if is_after(event, away) and is_after(back, event)]
    assert len(trained) > 50, "training stood still"
    missed = [e for e in driver.events() if e["event"] in ("save_failed", "save_skipped")]
    assert missed
    newest_then = max(trained)
    assert back["durable_step"] > newest_then - 200, "the Snapshot that was committed first is an old one"
    summary = summary_of(run)
    storage = summary["storage"]
    assert isinstance(storage, dict)
    assert (summary["status"], storage["outages"]) == ("finished", 1)
    assert storage["saves_failed"] + storage["saves_skipped"] == len(missed)
    assert storage["longest_outage_s"] == back["away_s"]
    assert_newest_is_whole(run, run.steps)
    assert_history_is_whole(run)


def test_training_outlasts_a_store_that_is_killed_and_comes_back(run: RunSetup, swift: SwiftServer) -> None:
    with run.driver() as driver:
        driver.wait_event("committed", lambda event: event["step"] >= 40)
        swift.kill()
        driver.wait_event("work_at_risk")
        swift.start()
        driver.wait_event("store_back")
        driver.wait(RUN_S)
    assert_outage_was_outlasted(run, driver)


@pytest.mark.slow
def test_training_outlasts_a_minute_of_a_store_that_accepts_and_never_answers(
    run: RunSetup, swift: SwiftServer
) -> None:
    run.steps = run.config["run"]["steps"] = 4000
    with run.driver() as driver:
        driver.wait_event("committed", lambda event: event["step"] >= 40)
        swift.pause()
        driver.wait_event("work_at_risk", lambda event: event["away_s"] >= 60.0, 120.0)
        swift.proceed()
        driver.wait_event("store_back")
        driver.wait(RUN_S)
    assert_outage_was_outlasted(run, driver)


@pytest.mark.slow
def test_an_attempt_that_breaks_in_an_outage_goes_on_from_the_snapshot_that_the_keeper_held(
    run: RunSetup, swift: SwiftServer
) -> None:
    run.config["failure"] = {"max_infrastructure": 1}
    with run.driver() as driver:
        driver.wait_event("committed", lambda event: event["step"] >= 40)
        swift.kill()
        driver.wait_event("work_at_risk")
        os.kill(driver.events("worker_ready")[-1]["pid"], signal.SIGKILL)
        driver.wait_event("fault")
        driver.wait_for(lambda: len(driver.events("work_at_risk")) >= 2 or None, "the outage to go on")
        assert len(driver.events("attempt_started")) == 1
        swift.start()
        driver.wait(RUN_S)
    assert driver.code == ExitCode.SUCCESS, driver.output[-6000:]
    away, second = driver.events("store_away")[0], driver.events("attempt_started")[1]
    last_before = max(event["step"] for event in driver.events("committed") if is_after(away, event))
    assert second["restored_step"] > last_before, "the newest Snapshot was in the Keeper"
    assert_newest_is_whole(run, run.steps)
    assert_history_is_whole(run)


def end_by_outage(run: RunSetup, swift: SwiftServer) -> int:
    """Drive ``run`` into an outage that is longer than allowed; returns the step of its newest Checkpoint."""
    with run.driver("checkpoint.max_outage_s=4", "checkpoint.leave_timeout_s=5") as driver:
        driver.wait_event("committed", lambda event: event["step"] >= 40)
        swift.kill()
        assert driver.wait(120.0) == ExitCode.STORAGE_OUTAGE, driver.output[-6000:]
    (end,) = driver.events("run_finished")
    newest = max(event["step"] for event in driver.events("committed"))
    assert (end["status"], end["exit_code"]) == ("storage-outage", ExitCode.STORAGE_OUTAGE)
    for part in (
        "checkpoint.max_outage_s is 4",
        f"newest checkpoint: step {newest}",
        "since 20",
        "run the same command",
    ):
        assert part in end["exit_reason"]
    assert driver.events("work_at_risk")[-1]["durable_step"] == newest
    assert [event["reason"] for event in driver.events("attempt_ended")] == ["left"], "workers were not let go cleanly"
    return int(newest)


def test_an_outage_that_is_too_long_ends_the_run(run: RunSetup, swift: SwiftServer) -> None:
    end_by_outage(run, swift)


@pytest.mark.slow
def test_a_run_that_an_outage_ended_goes_on_from_its_newest_checkpoint(run: RunSetup, swift: SwiftServer) -> None:
    newest = end_by_outage(run, swift)
    swift.start()
    run.steps = newest + 100
    again = run.drive(f"run.steps={run.steps}")
    assert again.code == ExitCode.SUCCESS, again.output[-6000:]
    assert again.events("attempt_started")[0]["restored_step"] == newest
    assert_newest_is_whole(run, run.steps)
    assert_history_is_whole(run)


def test_as_many_failed_saves_in_a_row_as_allowed_end_the_run_within_an_interval(
    run: RunSetup, swift: SwiftServer
) -> None:
    uploads = DelayProxy(swift.port, pattern="/shards/").start()
    try:
        run.config["checkpoint"]["store"] |= {"endpoint_url": uploads.endpoint}
        with run.driver("checkpoint.max_failed_saves=2", "checkpoint.leave_timeout_s=5") as driver:
            driver.wait_event("committed", lambda event: event["step"] >= 40)
            uploads.refuse_next(1_000_000)
            assert driver.wait(120.0) == ExitCode.STORAGE_OUTAGE, driver.output[-6000:]
    finally:
        uploads.stop()
    (decision,) = driver.events("decision")
    failed = [event for event in driver.events("save_failed") if is_after(decision, event)]
    assert len(failed) == 2
    reason = driver.events("run_finished")[0]["exit_reason"]
    assert f"save of step {failed[-1]['step']}" in reason
    assert f"/step-{failed[-1]['step']:010d}" in reason
    storage = summary_of(run)["storage"]
    assert isinstance(storage, dict)
    assert storage["saves_failed"] == len(driver.events("save_failed"))

"""Whole Runs with everything on S3: a driver's death, a second driver, slow and failing uploads.

Real: drivers as processes, a Ray cluster, torch on gloo, OpenStack Swift (which does not honour create-only puts
atomically), and a proxy in front of it that holds, delays and refuses uploads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.exit_codes import ExitCode
from storage.commit_log import CommitLog
from storage.open_store import open_store
from storage.verify import verify_commit
from tests.clusters import RayNodes
from tests.s3_runs import Driver, Event, RunSetup, expected_chains, listing, make_dataset, run_cluster
from tests.servers import DelayProxy, SwiftServer

pytestmark = pytest.mark.timeout(420)

STEPS = 160


@pytest.fixture(scope="module")
def cluster(swift_server: SwiftServer) -> Iterator[RayNodes]:
    with run_cluster(swift_server) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_dataset(tmp_path_factory.mktemp("data"))


@pytest.fixture
def run(cluster: RayNodes, dataset: str, bucket: str, tmp_path: Path) -> RunSetup:
    """A Run whose root is on Swift; steps of a few hundredths of a second."""
    made = RunSetup(
        name="on-s3",
        url=f"s3://{bucket}/run",
        directory=tmp_path / "run",
        address=cluster.address,
        dataset=dataset,
        steps=STEPS,
    )
    made.config["data"]["micro_batch"] = 4
    return made


def proxy_before(swift: SwiftServer, pattern: str, methods: frozenset[str] = frozenset({"PUT"})) -> DelayProxy:
    return DelayProxy(swift.port, pattern=pattern, methods=methods).start()


def assert_history_is_whole(run: RunSetup) -> None:
    """Every step of the effective history once, each on exactly the samples that the seed gives it."""
    history: dict[int, Event] = {}
    for event in run.events():
        if event["event"] == "attempt_started":
            history = {step: kept for step, kept in history.items() if step <= event["restored_step"]}
        elif event["event"] == "step":
            assert event["step"] not in history, f"step {event['step']} was trained twice"
            history[event["step"]] = event
    assert sorted(history) == list(range(1, run.steps + 1))
    chains = expected_chains(run)
    for step, event in history.items():
        assert (event["position"], event["sample_chain"]) == (8 * step, chains[step])


def test_a_killed_driver_is_followed_by_one_that_goes_on_while_all_others_are_refused(
    run: RunSetup, swift_server: SwiftServer, bucket: str, tmp_path: Path
) -> None:
    last = proxy_before(swift_server, rf"/shards/step-{STEPS:010d}/")
    writes = proxy_before(swift_server, "", frozenset({"PUT", "POST", "DELETE"}))
    try:
        last.hold()
        run.config["data"] |= {"num_workers": 2, "prefetch": 4}  # what was fetched ahead must not count as consumed
        run.config["checkpoint"] |= {"every_steps": 10, "store": {"endpoint_url": last.endpoint}}
        log = CommitLog(open_store(run.url), run.run_id)
        with run.driver() as first:
            assert log.latest() is None
            committed = first.wait_event("committed", lambda event: event["step"] >= 20)
            seen = log.latest()
            assert seen is not None
            assert seen.step >= committed["step"], "a Commit of another process is seen within one call"
            first.kill()

        with run.driver() as second:
            second.wait_event("step", lambda event: event["step"] == STEPS)
            last.wait_held(60.0)
            second.wait_for(lambda: is_only_the_last_save_under_way(second) or None, "the end of all other saves")
            assert_others_are_refused(run, second, writes, swift_server, bucket, tmp_path)
            assert second.code is None, "a driver ended before its last step was committed"
            assert [commit.step for commit in log.commits()][-1] < STEPS
            last.release()
            assert second.wait() == ExitCode.SUCCESS

        before = [commit for commit in log.all_commits() if commit.attempt.number == 1]
        restored = max(commit.step for commit in before)
        started = second.events("attempt_started")
        assert [(event["cause"], event["restored_step"]) for event in started] == [("driver-restart", restored)]
        assert second.events("step")[0]["step"] == restored + 1
        assert_history_is_whole(run)
        assert_store_is_complete(run, log)
    finally:
        last.stop()
        writes.stop()


def is_only_the_last_save_under_way(driver: Driver) -> bool:
    bound = {event["step"] for event in driver.events("save_bound")}
    over = {event["step"] for event in driver.events() if event["event"] in ("committed", "save_skipped")}
    return bound - over == {STEPS}


def assert_others_are_refused(
    run: RunSetup, live: Driver, writes: DelayProxy, swift: SwiftServer, bucket: str, tmp_path: Path
) -> None:
    """On the same cluster and on one of their own: exit code 18, and not one write."""
    nonce = live.events("driver_started")[0]["nonce"]
    through_writes = f"checkpoint.store.endpoint_url={writes.endpoint}"
    here, elsewhere = tmp_path / "here.jsonl", tmp_path / "elsewhere.jsonl"
    before = listing(bucket, swift)
    with (
        run.driver(through_writes, events_path=here) as same,
        run.driver(through_writes, events_path=elsewhere, address="local") as other,
    ):
        assert same.wait() == ExitCode.REFUSED
        assert other.wait() == ExitCode.REFUSED
    after = listing(bucket, swift)
    assert str(live.pid) in same.output
    assert str(live.pid) in other.output
    assert writes.num_matched == 0
    assert not here.exists()
    assert not elsewhere.exists()
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    assert changed <= {f"run/lease/{nonce}.json", "run/events.jsonl"}
    assert before.keys() - {"run/events.jsonl"} == after.keys() - {"run/events.jsonl"}


def assert_store_is_complete(run: RunSetup, log: CommitLog) -> None:
    """Checkpoints, data positions, summary and events are all there, and no Lease is left."""
    commits, chains = log.commits(), expected_chains(run)
    assert commits[-1].step == run.steps
    for commit in commits:
        assert verify_commit(log.store, log, commit).is_good
        ledger = log.read_manifest(commit).ledger
        assert ledger is not None
        assert (ledger.position, ledger.sample_chain) == (8 * commit.step, chains[commit.step])
    summary = json.loads(log.store.get("summary.json"))
    assert (summary["status"], summary["steps"], summary["exit_code"]) == ("finished", run.steps, 0)
    assert [attempt["attempt"] for attempt in summary["attempts"]] == [1, 2]
    assert [attempt["cause"] for attempt in summary["attempts"]] == ["start", "driver-restart"]
    assert log.store.get("events.jsonl") == run.events_path.read_bytes()
    assert log.store.list("lease/") == []


def test_slow_uploads_hold_training_up_no_more_than_two_saves_are_ever_under_way(
    run: RunSetup, swift_server: SwiftServer
) -> None:
    slow = proxy_before(swift_server, "/shards/")
    slow.delay_s = 2.0
    try:
        run.config["checkpoint"] |= {"every_steps": 1, "store": {"endpoint_url": slow.endpoint}}
        driver = run.drive()
    finally:
        slow.stop()
    assert driver.code == ExitCode.SUCCESS
    skipped = {event["step"] for event in run.events("save_skipped")}
    committed = [event["step"] for event in run.events("committed")]
    assert skipped
    assert not skipped & set(committed)
    assert committed[-1] == STEPS
    assert [c.step for c in CommitLog(open_store(run.url), run.run_id).commits()] == committed
    under_way: set[int] = set()
    num_meanwhile = 0
    skipped.add(STEPS)  # bound like the others, but staged only when a buffer is free
    for event in run.events():
        if event["event"] == "save_bound" and event["step"] not in skipped:
            under_way.add(event["step"])
        elif event["event"] in ("committed", "save_failed"):
            under_way.discard(event["step"])
        elif event["event"] == "step" and any(event["step"] > step for step in under_way):
            num_meanwhile += 1
        assert len(under_way) <= 2
    assert num_meanwhile > 10
    assert_history_is_whole(run)


def test_a_final_save_that_fails_or_never_ends_is_told_by_the_exit_code_and_made_up_for_by_the_next_driver(
    run: RunSetup, swift_server: SwiftServer
) -> None:
    run.steps = run.config["run"]["steps"] = 20
    last = proxy_before(swift_server, f"/shards/step-{run.steps:010d}/")
    log = CommitLog(open_store(run.url), run.run_id)
    try:
        run.config["checkpoint"] |= {"every_steps": 10, "store": {"endpoint_url": last.endpoint, "retries": 1}}
        last.refuse_next(1_000_000)
        refused = run.drive("checkpoint.max_outage_s=3")
        assert_final_save_is_missed(run, refused, log, ExitCode.STORAGE_OUTAGE)
        assert refused.events("save_delayed")[0]["step"] == run.steps
        last.refuse_next(0)
        last.hold()
        held = run.drive("checkpoint.final_timeout_s=2")
        assert_final_save_is_missed(run, held, log, ExitCode.FINAL_SAVE_FAILED)
        last.release()
        assert run.drive().code == ExitCode.SUCCESS
    finally:
        last.stop()
    assert [commit.step for commit in log.commits()] == [10, 20]
    assert [event["restored_step"] for event in run.events("attempt_started")] == [0, 10, 10]
    assert_history_is_whole(run)


def assert_final_save_is_missed(run: RunSetup, driver: Driver, log: CommitLog, code: ExitCode) -> None:
    assert driver.code == code
    assert f"step {run.steps}" in driver.output
    assert [commit.step for commit in log.commits()] == [10]
    summary = json.loads(log.store.get("summary.json"))
    assert summary["status"] == code.name.lower().replace("_", "-")
    assert f"step {run.steps}" in summary["exit_reason"]

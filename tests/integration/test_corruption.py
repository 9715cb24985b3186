"""A Run whose stored Checkpoints were damaged goes on from the newest whole one, and never reads a bad one again.

Real: drivers as processes, two worker processes on gloo, OpenStack Swift, and a proxy that sees every read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from orchestrator.exit_codes import ExitCode
from storage.commit_log import CommitLog
from storage.history import uncommitted_steps
from storage.open_store import open_store
from storage.verify import verify_commit
from tests.clusters import RayNodes
from tests.s3_runs import RunSetup, make_dataset, run_cluster
from tests.servers import DelayProxy, SwiftServer

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def cluster(swift_server: SwiftServer) -> Iterator[RayNodes]:
    with run_cluster(swift_server) as nodes:
        yield nodes


@pytest.fixture
def run(cluster: RayNodes, bucket: str, tmp_path: Path) -> RunSetup:
    made = RunSetup(
        name="damaged",
        url=f"s3://{bucket}/run",
        directory=tmp_path / "run",
        address=cluster.address,
        dataset=make_dataset(tmp_path),
        steps=30,
    )
    made.config["world"] |= {"min_workers": 2, "max_workers": 2}
    made.config["checkpoint"]["every_steps"] = 10
    return made


def flip_one_byte(client: Any, bucket: str, key: str) -> None:
    body = bytearray(client.get_object(Bucket=bucket, Key=key)["Body"].read())
    body[len(body) // 3] ^= 0x01
    client.put_object(Bucket=bucket, Key=key, Body=bytes(body))


def test_resume_passes_over_damaged_and_uncommitted_steps_for_good(
    run: RunSetup, swift_server: SwiftServer, bucket: str
) -> None:
    assert run.drive().code == ExitCode.SUCCESS
    store = open_store(run.url)
    log = CommitLog(store, run.run_id)
    assert [commit.step for commit in log.commits()] == [10, 20, 30]
    shards = {commit.step: log.read_manifest(commit).shards for commit in log.commits()}
    flipped, deleted = shards[30][1].key, shards[20][0].key
    client = boto3.client("s3", endpoint_url=swift_server.endpoint)
    flip_one_byte(client, bucket, f"run/{flipped}")
    client.delete_object(Bucket=bucket, Key=f"run/{deleted}")
    for shard in shards[10]:  # a save of step 40 that was cut off before its Commit
        store.put(shard.key.replace("step-0000000010", "step-0000000040"), store.get(shard.key))
    before = {key.step for key in uncommitted_steps(store)}
    assert before == {40}

    uploads = DelayProxy(swift_server.port, pattern="/shards/").start()
    reads = DelayProxy(
        swift_server.port,
        pattern=r"/(shards/step-00000000[234]0/a000001|manifests/step-00000000[234]0\.a000001)",
        methods=frozenset({"GET", "HEAD"}),
    ).start()
    try:
        uploads.hold()  # no newer Commit may hide the damaged ones from the next restart
        with run.driver(f"checkpoint.store.endpoint_url={uploads.endpoint}") as second:
            first_step = second.wait_event("step")
            second.kill()
        third = run.drive(f"checkpoint.store.endpoint_url={reads.endpoint}")
    finally:
        uploads.stop()
        reads.stop()

    assert first_step["step"] == 11
    assert [e["restored_step"] for e in second.events("attempt_started")[:2]] == [30, 10]
    found = {event["step"]: (event["key"], event["reason"]) for event in run.events("quarantined")}
    assert found.keys() == {20, 30}
    assert found[30][0] == flipped
    assert "digest" in found[30][1] or "hash mismatch" in found[30][1]
    assert found[20] == (deleted, "missing file")
    recorded = {key.step: (record.key, record.reason) for key, record in log.quarantined().items()}
    assert recorded == found
    assert "step 40" in second.output
    assert "no commit" in second.output

    assert third.code == ExitCode.SUCCESS
    assert third.events("attempt_started")[0]["restored_step"] == 10
    assert third.events("step")[0]["step"] == 11
    assert third.events("quarantined") == []
    assert reads.num_matched == 0, "a Checkpoint that was taken out of use was read again"
    assert [(commit.step, commit.attempt.number > 1) for commit in log.commits()] == [
        (10, False),
        (20, True),
        (30, True),
    ]
    assert all(verify_commit(store, log, commit).is_good for commit in log.commits())

"""The checkpoint commands and the doctor over HTTP, once round. Real: S3 servers (Swift, moto), s3fs, local disk."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path

import boto3
import pytest
from click.testing import Result
from typer.testing import CliRunner

from orchestrator.cli import app
from orchestrator.cli_checkpoints import CheckpointsCode
from storage.commit_log import CommitLog
from storage.keys import Attempt, shard_key
from storage.open_store import open_store
from storage.restore import plan_restore
from storage.verify import verify_commit
from tests.fakes.checkpoints import RUN, attempt, prepare, save, write_shards
from tests.servers import MotoServer

runner = CliRunner()


def run(*arguments: str) -> Result:
    return runner.invoke(app, list(arguments))


@pytest.fixture(params=["swift", pytest.param("moto", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix in a new bucket, with steps 10 to 30, a void one and an orphan."""
    if request.param == "swift":
        bucket: str = request.getfixturevalue("bucket")
    else:
        server: MotoServer = request.getfixturevalue("moto_server")
        for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.access_key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.secret_key)
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        bucket = f"test-{uuid.uuid4().hex[:16]}"
        boto3.client("s3", endpoint_url=server.endpoint).create_bucket(Bucket=bucket)
    root = f"s3://{bucket}/runs/first"
    store = open_store(root)
    for step in (10, 20, 25):
        save(store, step)
    write_shards(store, prepare(27))
    save(store, 30, by=attempt(2), base_step=20)
    return root


def test_once_round_an_object_store(url: str, tmp_path: Path) -> None:
    rows = json.loads(run("checkpoints", "list", url, "--json").stdout)
    assert [(row["step"], row["standing"]) for row in rows] == [
        *((10, "usable"), (20, "usable"), (25, "void"), (27, "cut off"), (30, "usable")),
    ]
    assert run("checkpoints", "verify", url).exit_code == 0
    assert run("doctor", url, "--deep").exit_code == 0
    down = run("checkpoints", "copy", url, str(tmp_path / "down"), "--all", "--yes")
    assert down.exit_code == 0, down.output
    up = run("checkpoints", "copy", str(tmp_path / "down"), f"{url}-again", "--all", "--yes")
    assert up.exit_code == 0, up.output
    told = json.loads(run("checkpoints", "diff", f"{url}@30", f"{url}-again@30", "--values", "--json").stdout)
    assert told["is_equal"]
    again = open_store(f"{url}-again")
    for commit in CommitLog(again, RUN).commits():
        assert verify_commit(again, CommitLog(again, RUN), commit).is_good
    plan = plan_restore(CommitLog(again, RUN), attempt=Attempt(number=3, nonce="00000003"))
    assert plan is not None
    assert plan.step == 30
    assert run("checkpoints", "prune", url, "--keep", "1", "--void", "--orphans", "--yes").exit_code == 0
    left = {entry.key.split("/")[1] for entry in open_store(url).list("shards/")}
    assert left == {"step-0000000030"}
    assert run("checkpoints", "verify", url).exit_code == 0


def test_the_doctor_names_what_is_lost_on_an_object_store(url: str) -> None:
    store = open_store(url)
    newest = CommitLog(store, RUN).commits()[-1]
    key = shard_key(newest.step_key, 1)
    content = bytearray(store.get(key))
    content[4] ^= 1
    store.put(key, bytes(content))
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
    client.create_multipart_upload(Bucket=bucket, Key=f"{prefix}/shards/half")
    ended = run("doctor", url, "--deep", "--json")
    assert ended.exit_code == CheckpointsCode.CORRUPT
    told = json.loads(ended.stdout)
    assert told["resume"]["step"] == 20
    assert {one["key"] for one in told["findings"] if one["severity"] == "damage"} == {key}
    assert any("unfinished uploads: 1 (shards/half)" in one["text"] for one in told["findings"])


def test_a_bucket_that_does_not_exist_is_refused_and_an_empty_prefix_is_empty(url: str) -> None:
    for command in (["checkpoints", "list"], ["doctor"]):
        assert run(*command, f"s3://no-such-{uuid.uuid4().hex[:8]}/run").exit_code == CheckpointsCode.REFUSED
        assert run(*command, f"{url}-nothing").exit_code == CheckpointsCode.NOT_FOUND

"""Case B08: the first save with retention on, where nothing exists yet, every rank with a store of its own.

Real: s3fs, sockets, an S3 server process (Swift); the local directory is a real one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest

from orchestrator.committer import Committer
from storage.commit_log import CommitLog
from storage.config import CheckpointConfig
from storage.open_store import open_store
from storage.verify import verify_commit
from tests.fakes.checkpoints import RUN, prepare
from tests.servers import SwiftServer

WORLD_SIZE = 2


@pytest.fixture(scope="module")
def swift(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SwiftServer]:
    server = SwiftServer(tmp_path_factory.mktemp("swift")).start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(params=["directory", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "directory":
        return str(tmp_path / "not" / "there" / "yet")
    server: SwiftServer = request.getfixturevalue("swift")
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.secret_key)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    boto3.client("s3").create_bucket(Bucket="fresh")
    return "s3://fresh/deep/in/a/prefix"


@pytest.mark.timeout(180)
def test_the_first_save_commits_and_two_are_kept_from_then_on(url: str) -> None:
    config = CheckpointConfig(every_steps=10, keep=2)
    committer = Committer(
        run_id=RUN,
        store=open_store(url, config.store),
        config=config,
        metadata={},
        now_utc=lambda: "2026-01-01T00:00:00Z",
        monotonic=lambda: 0.0,
    )
    log = CommitLog(open_store(url, config.store), RUN)
    seen = []
    for step in (10, 20, 30, 40):
        parts = prepare(step, world_size=WORLD_SIZE)
        for key, content in parts.shards.items():  # a rank each
            open_store(url, config.store).put(key, content)
        committer.commit(parts.receipts, base_step=0, loss=None, metric=None, ledger=None)
        committer.retain()
        seen.append([commit.step for commit in log.commits()])
    assert seen == [[10], [10, 20], [20, 30], [30, 40]]
    assert [verify_commit(log.store, log, commit).problems for commit in log.commits()] == [(), ()]
    left = {entry.key.split("/")[1] for entry in log.store.list("shards/")}
    assert left == {"step-0000000030", "step-0000000040"}

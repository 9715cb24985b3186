"""A hiccup of the store in an upload: sent again, committed, and counted from the request to the summary.

Real: Keepers, the coordinator, the recorder, an S3 server (moto) over TCP behind a proxy that refuses some requests.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import storage.s3_multipart
from orchestrator.committer import Committer
from orchestrator.coordinator import Coordinator
from orchestrator.patient_store import PatientStore
from orchestrator.recorder import Recorder
from orchestrator.save_config import SavePolicyConfig
from orchestrator.signals import Committed
from orchestrator.summary import summarize
from storage.commit_log import CommitLog
from storage.events import EventLog, read_events
from tests.fakes.keeper_bench import FIRST, WAIT_S, KeeperBench
from tests.fakes.recording_sink import RecordingSink
from tests.fakes.snapshot_writer import Arrays, save
from tests.s3_stores import PART, store_at
from tests.servers import QuirkProxy
from tests.servers.quirk_proxy import Answer, Forward, Request, error_answer


class Hiccup:
    """Answers 503 to the first ``times`` of the requests ``operation`` for Shards."""

    def __init__(self, operation: str, times: int) -> None:
        self._operation, self.left = operation, times

    def __call__(self, request: Request, forward: Forward) -> Answer:
        if request.operation == self._operation and "/shards/" in request.path and self.left:
            self.left -= 1
            return error_answer(503, "SlowDown")
        return forward(request)


def state(num_bytes: int) -> Arrays:
    return {"weight": np.frombuffer(os.urandom(num_bytes // 4), dtype=np.uint8).astype(np.float32).reshape(-1, 1)}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[KeeperBench]:
    bench = KeeperBench(tmp_path)
    yield bench
    bench.close()


def test_one_refused_upload_is_sent_again_committed_and_counted_in_event_and_summary(
    bench: KeeperBench, moto_quirks: QuirkProxy, moto_bucket: str, tmp_path: Path
) -> None:
    store = store_at(moto_quirks.endpoint, moto_bucket, retries=3)
    moto_quirks.rule = hiccup = Hiccup("put", 1)
    patient = PatientStore(store, limit_s=WAIT_S, pause=lambda _: None)
    committer = Committer(
        run_id="run",
        store=patient,
        config=bench.config,
        metadata={},
        now_utc=lambda: "2026-01-01T00:00:00Z",
        monotonic=time.monotonic,
    )
    coordinator = Coordinator(
        committer=committer,
        store=patient,
        config=bench.config,
        policy=SavePolicyConfig(),
        total_steps=10,
        monotonic=time.monotonic,
    )
    coordinator.begin_attempt(FIRST, world_size=2, base_step=0)
    keeper = bench.keeper(store, coordinator)
    for rank in range(2):
        save(keeper, state(4096), attempt=FIRST, step=10, rank=rank)
    assert keeper.flush(WAIT_S)
    assert coordinator.wait_settled(10, WAIT_S)
    coordinator.close()

    assert hiccup.left == 0
    assert [commit.step for commit in CommitLog(store, "run").commits()] == [10]
    signals = coordinator.drain_signals()
    assert [signal.upload_retries for signal in signals if isinstance(signal, Committed)] == [1]
    Recorder(EventLog(tmp_path / "events.jsonl", "run"), start_unix_s=0.0).record(signals)
    events = read_events(tmp_path / "events.jsonl")
    assert [event["upload_retries"] for event in events if event["event"] == "committed"] == [1]
    assert summarize(events)["storage"]["upload_retries"] == 1


@pytest.mark.parametrize(("retries", "counts"), [(0, {1, 2}), (3, {2})])
def test_a_part_or_a_whole_upload_that_is_sent_again_is_counted_in_its_own_receipt(
    bench: KeeperBench,
    moto_quirks: QuirkProxy,
    moto_bucket: str,
    monkeypatch: pytest.MonkeyPatch,
    retries: int,
    counts: set[int],
) -> None:
    """Without retries of the store the Keeper begins anew, once for parts that were refused side by side."""
    monkeypatch.setattr(storage.s3_multipart, "_SMALLEST_PART", PART)
    sink = RecordingSink()
    moto_quirks.rule = hiccup = Hiccup("put-part", 2)
    keeper = bench.keeper(store_at(moto_quirks.endpoint, moto_bucket, retries=retries), sink)
    save(keeper, state(2 * PART), attempt=FIRST, step=10)
    assert keeper.flush(WAIT_S)
    assert hiccup.left == 0
    save(keeper, state(2 * PART), attempt=FIRST, step=20)
    assert keeper.flush(WAIT_S)
    first, second = sink.receipts
    assert first.retries in counts
    assert second.retries == 0

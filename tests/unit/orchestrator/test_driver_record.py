"""The end of a driver's record while its store hangs or refuses: the report is printed, and the exit is not held up."""

from __future__ import annotations

import io
import itertools
import json
from pathlib import Path

import pytest

import orchestrator.driver_record
from orchestrator.config import RunConfig
from orchestrator.controller import RunEnd
from orchestrator.driver_record import DriverRecord
from orchestrator.exit_codes import ExitCode
from orchestrator.options import DriverOptions
from orchestrator.run_identity import open_run_record
from storage.commit_log import CommitLog
from storage.events import read_events
from storage.keys import SUMMARY
from storage.memory_store import MemoryStore
from tests.fakes.away_store import AwayStore
from tests.fakes.checkpoints import RUN, TIME, save


@pytest.fixture
def store() -> AwayStore:
    return AwayStore(prefix=SUMMARY)


CONFIG = RunConfig.model_validate(
    {
        "run": {"name": "mine", "url": "memory://driver-record", "steps": 8},
        "model": {"config": {"model_type": "llama"}},
        "data": {"url": "memory://data", "sequence_length": 16, "global_batch": 8, "micro_batch": 2},
    }
)


def record_in(store: AwayStore, directory: Path, report: io.StringIO) -> DriverRecord:
    options = DriverOptions(json_output=True, show_progress=False, events_path=directory / "events.jsonl")
    return DriverRecord(store, store, open_run_record(store, "run"), CONFIG, options, report)


def finish(store: AwayStore, directory: Path) -> str:
    report = io.StringIO()
    with record_in(store, directory, report) as record:
        code = record.finish(RunEnd(exit_code=ExitCode.STORAGE_OUTAGE, reason="away for too long"))
    assert code is ExitCode.STORAGE_OUTAGE
    return report.getvalue()


def test_a_hiccup_at_the_end_costs_no_summary(store: AwayStore, tmp_path: Path) -> None:
    calls = itertools.count()

    def away_once() -> None:
        store.is_away = next(calls) == 0

    store.before_call = away_once
    report = json.loads(finish(store, tmp_path))
    assert json.loads(store.get(SUMMARY)) == report
    assert store.num_failed == 1


def test_in_an_outage_the_report_is_printed_and_the_missing_summary_is_named(
    store: AwayStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(orchestrator.driver_record, "_LAST_WORD_S", 0.0)
    store.is_away = True
    report = json.loads(finish(store, tmp_path))
    assert report["exit_reason"] == "away for too long"
    assert store.num_failed == 1, "one try, and no second one beyond the limit"
    assert "summary.json could not be written" in caplog.text


def test_each_try_has_the_short_deadline_of_a_last_word(store: AwayStore, tmp_path: Path) -> None:
    seen: list[float] = []
    put = store.put

    def recorded(key: str, data: bytes | memoryview, *, deadline_s: float = 60.0) -> None:
        if key == SUMMARY:
            seen.append(deadline_s)
        put(key, data, deadline_s=deadline_s)

    store.put = recorded  # type: ignore[method-assign]
    finish(store, tmp_path)
    assert seen == [10.0]


def test_a_later_driver_knows_how_far_the_run_had_come_and_when_it_last_trained(
    store: AwayStore, tmp_path: Path
) -> None:
    with record_in(store, tmp_path, io.StringIO()) as first:
        assert (first.newest_step, first.trained_until_s) == (0, None)
        for step in (1, 2, 3):
            first.sink.emit("step", attempt=1, step=step, finished_s=10.0 * step)
        first.sink.emit("attempt_started", attempt=2, restored_step=2)
        start_unix_s = first.start_unix_s
    with record_in(store, tmp_path, io.StringIO()) as second:
        assert second.newest_step == 2
        assert second.trained_until_s == pytest.approx(start_unix_s + 30.0)


def test_a_driver_says_how_far_the_run_had_come_and_what_is_committed_of_it(store: AwayStore, tmp_path: Path) -> None:
    with record_in(store, tmp_path, io.StringIO()) as record:
        record.driver_started(nonce="0", first_attempt=1, durable_step=0)
        record.sink.emit("step", attempt=1, step=6, finished_s=10.0)
    with record_in(store, tmp_path, io.StringIO()) as record:
        record.driver_started(nonce="1", first_attempt=2, durable_step=4)
    with record_in(store, tmp_path, io.StringIO()) as record:  # the last events of a machine that went are missing
        record.driver_started(nonce="2", first_attempt=3, durable_step=8)
    told = [
        (event["reached_step"], event["durable_step"])
        for event in read_events(tmp_path / "events.jsonl")
        if event["event"] == "driver_started"
    ]
    assert told == [(0, 0), (6, 4), (8, 8)]


def test_the_report_counts_the_checkpoints_that_are_in_use(tmp_path: Path) -> None:
    store = MemoryStore()
    commits = [save(store, step) for step in (10, 20, 30)]
    CommitLog(store, RUN).quarantine(commits[-1].step_key, "shards/a", "hash mismatch", TIME)
    report = io.StringIO()
    options = DriverOptions(show_progress=False, events_path=tmp_path / "events.jsonl")
    with DriverRecord(store, store, open_run_record(store, RUN), CONFIG, options, report) as record:
        for step in (5, 10, 20, 30):
            record.sink.emit("committed", attempt=1, step=step, stored_bytes=1000)
        record.finish(RunEnd(exit_code=ExitCode.STOPPED, reason="Ctrl-C"))
    assert "checkpoints  4 committed, 2 in use, the newest of step 20 " in report.getvalue()

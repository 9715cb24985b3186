"""Event lines: fixed fields, one write each, torn lines."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

import pytest

from storage.events import EventLog, read_events, utc_text


def test_a_line_has_the_fixed_fields_first_and_then_its_own(tmp_path: Path) -> None:
    times = iter([1000.0, 1002.5])
    log = EventLog(tmp_path / "sub" / "events.jsonl", "run", lambda: next(times))
    log.emit("committed", attempt=3, step=40, rank=1, seconds=0.5)
    text = (tmp_path / "sub" / "events.jsonl").read_text()
    assert text.endswith("\n")
    assert list(json.loads(text).items()) == [
        ("event", "committed"),
        ("time_utc", "1970-01-01T00:16:42.500Z"),
        ("t_s", 2.5),
        ("run", "run"),
        ("attempt", 3),
        ("step", 40),
        ("rank", 1),
        ("seconds", 0.5),
    ]


def test_an_attempt_may_be_given_by_its_number(tmp_path: Path) -> None:
    EventLog(tmp_path / "e", "run").emit("step", attempt=7)
    assert read_events(tmp_path / "e")[0]["attempt"] == 7


def test_the_start_of_the_run_may_be_given(tmp_path: Path) -> None:
    EventLog(tmp_path / "e", "run", lambda: 50.0, started_at_s=20.0).emit("x")
    assert read_events(tmp_path / "e")[0]["t_s"] == 30.0


def test_threads_and_two_writers_share_a_file_without_mixing_lines(tmp_path: Path) -> None:
    logs = [EventLog(tmp_path / "e", "run") for _ in range(2)]

    def work(number: int) -> None:
        for index in range(50):
            logs[number % 2].emit("tick", rank=number, index=index, padding="x" * 500)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    events = read_events(tmp_path / "e")
    assert sorted((event["rank"], event["index"]) for event in events) == [(r, i) for r in range(8) for i in range(50)]


def test_a_torn_last_line_is_left_out_and_does_not_spoil_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "e"
    EventLog(path, "run").emit("first")
    with open(path, "ab") as file:
        file.write(b'{"event":"tor')
    with caplog.at_level(logging.WARNING):
        assert [event["event"] for event in read_events(path)] == ["first"]
    assert "line 2 is torn" in caplog.text
    EventLog(path, "run").emit("second")
    assert [event["event"] for event in read_events(path)] == ["first", "second"]


def test_a_field_cannot_hide_a_fixed_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="t_s"):
        EventLog(tmp_path / "e", "run").emit("x", t_s=1)


def test_time_is_utc_with_milliseconds() -> None:
    assert utc_text(0.0004) == "1970-01-01T00:00:00.000Z"
    assert utc_text(1_767_225_600.25) == "2026-01-01T00:00:00.250Z"

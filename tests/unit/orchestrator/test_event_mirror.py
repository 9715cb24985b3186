"""Events of drivers on several machines: what one machine has, another lacks, and none may be lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.event_mirror import EventMirror, fetch_events
from storage.keys import EVENTS
from storage.memory_store import MemoryStore
from tests.fakes.away_store import AwayStore


@pytest.mark.parametrize(
    ("local", "stored", "after"),
    [
        (None, None, None),
        (None, b"1\n2\n", b"1\n2\n"),
        (b"1\n2\n", None, b"1\n2\n"),
        (b"1\n2\n3\n", b"1\n2\n", b"1\n2\n3\n"),
        (b"1\n2\n", b"1\n2\n3\n4\n", b"1\n2\n3\n4\n"),
        (b"1\n2\n3\n", b"1\n2\n5\n6\n", b"1\n2\n3\n5\n6\n"),
        (b"1\n2\ntorn", b"1\n2\n5\n", b"1\n2\ntorn\n5\n"),
    ],
    ids=["nothing", "new machine", "never copied", "copy behind", "went on elsewhere", "both", "died in a write"],
)
def test_events_of_both_places_are_kept_in_order(
    local: bytes | None, stored: bytes | None, after: bytes | None, tmp_path: Path
) -> None:
    store, path = MemoryStore("run"), tmp_path / "run" / "events.jsonl"
    if local is not None:
        path.parent.mkdir()
        path.write_bytes(local)
    if stored is not None:
        store.put(EVENTS, stored)
    fetch_events(store, path)
    assert (path.read_bytes() if path.exists() else None) == after


def test_the_copy_is_complete_once_the_mirror_is_closed(tmp_path: Path) -> None:
    store, path = MemoryStore("run"), tmp_path / "events.jsonl"
    path.write_bytes(b"1\n")
    mirror = EventMirror(store, path, interval_s=3600.0)
    path.write_bytes(b"1\n2\n")
    mirror.close()
    assert store.get(EVENTS) == b"1\n2\n"


def test_an_outage_loses_no_event_and_is_no_warning_when_it_is_over_in_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, path = AwayStore(), tmp_path / "events.jsonl"
    store.is_away = True
    path.write_bytes(b"1\n")
    mirror = EventMirror(store, path, interval_s=0.001)
    try:
        assert store.failed_often.wait(10.0)
        store.is_away = False
        path.write_bytes(b"1\n2\n")
    finally:
        mirror.close()
    assert store.get(EVENTS) == b"1\n2\n"
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


def test_an_end_in_an_outage_warns_once_that_the_last_events_are_only_here(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, path = AwayStore(), tmp_path / "events.jsonl"
    store.is_away = True
    path.write_bytes(b"1\n")
    mirror = EventMirror(store, path, interval_s=0.001)
    assert store.failed_often.wait(10.0)
    mirror.close()
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "the last events are not copied" in warning.getMessage()

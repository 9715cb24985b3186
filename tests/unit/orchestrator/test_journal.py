"""The Journal over several drivers and an outage: entries in order, numbers that rise, one writer at a time."""

from __future__ import annotations

import pytest

from orchestrator.failure_policy import Counters
from orchestrator.journal import Journal
from storage.errors import LeaseHeld, StoreUnavailable
from storage.memory_store import MemoryStore
from storage.object_store import ObjectStore
from storage.retrying import RetryingStore
from tests.fakes.away_store import AwayStore

FIRST, SECOND = "0000aaaa", "0000bbbb"


def journal(store: ObjectStore, nonce: str) -> Journal:
    made = Journal(store, nonce, lambda: "2026-01-01T00:00:00Z")
    made.load()
    return made


def test_a_new_driver_goes_on_from_what_the_one_before_wrote() -> None:
    store = MemoryStore("journal")
    first = journal(store, FIRST)
    first.append_counters("attempt", Counters(preemptions=1), number=3)
    first.append("decision", reason="x")
    second = journal(store, SECOND)
    assert second.last_attempt_number() == 3
    assert second.counters() == Counters(preemptions=1)
    assert second.append("attempt", number=4).sequence == 3
    assert [entry.kind for entry in journal(store, FIRST).entries] == ["attempt", "decision", "attempt"]


def test_an_entry_that_an_outage_held_up_is_written_once_under_its_number() -> None:
    store = AwayStore("journal")
    writer = journal(store, FIRST)
    writer.append("attempt", number=1)
    store.is_away = True
    with pytest.raises(StoreUnavailable):
        writer.append("attempt", number=2)
    store.is_away = False
    writer.append("attempt", number=2)
    assert [entry.fields["number"] for entry in journal(store, SECOND).entries] == [1, 2]


def test_an_entry_is_tried_once_by_itself_since_its_writer_tries_again() -> None:
    store = AwayStore("journal")
    writer = journal(RetryingStore(store, retries=5, sleep=lambda _: pytest.fail("it waited")), FIRST)
    store.is_away = True
    with pytest.raises(StoreUnavailable):
        writer.append("attempt", number=1)


def test_a_driver_that_was_replaced_while_it_was_cut_off_writes_no_entry() -> None:
    store = MemoryStore("journal")
    cut_off = journal(store, FIRST)
    cut_off.append("attempt", number=1)
    successor = journal(store, SECOND)
    successor.append("attempt", number=2)
    with pytest.raises(LeaseHeld, match=SECOND):
        cut_off.append("attempt", number=2)
    successor.append("attempt", number=3)
    assert [entry.fields["number"] for entry in journal(store, FIRST).entries] == [1, 2, 3]

"""Leaves read ahead by a thread, on datasets in memory. The store answers late by events, never by clocks."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from storage.errors import StoreRefused, StoreUnavailable
from storage.open_store import open_store
from tests.fakes.token_datasets import write_numbered_rows
from workers import read_ahead
from workers.config import DataConfig
from workers.contract import Phase
from workers.data_errors import DataError
from workers.data_patience import DataPatience
from workers.dataset import TokenDataset
from workers.dataset_card import load_card
from workers.heartbeat import Pulse
from workers.sample_order import sample_ids
from workers.stream import Leaf, LeafStream

WAIT_S = 30.0
THREAD = "data-read-ahead"


def wait(event: threading.Event) -> None:
    assert event.wait(WAIT_S), "it did not come in time"


class LateRows(TokenDataset):
    """Rows whose every read asks ``before`` first, with the number of the read, from 1."""

    before: Callable[[int], object] = staticmethod(lambda _number: None)
    num_reads = 0

    def rows(self, row_ids: Any) -> Any:
        self.num_reads += 1
        self.before(self.num_reads)
        return super().rows(row_ids)


def late_rows(num_rows: int, before: Callable[[int], object]) -> LateRows:
    url = f"memory://{uuid.uuid4()}"
    write_numbered_rows(url, num_rows)
    rows = LateRows(url, load_card(open_store(url)), "train")
    rows.before = before
    return rows


def stream_of(
    rows: TokenDataset, prefetch: int, *, patience: DataPatience | None = None, global_batch: int = 2
) -> LeafStream:
    data = DataConfig(url="memory://", sequence_length=4, global_batch=global_batch, micro_batch=2, prefetch=prefetch)
    return LeafStream(rows, data, 0, 0, 1, patience)


def ids_of(leaves: Iterator[Leaf]) -> list[int]:
    return [int(row) for leaf in leaves for row in leaf.sample_ids]


@pytest.fixture(autouse=True)
def _no_thread_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(read_ahead, "_CLOSING_S", WAIT_S)
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if thread.name == THREAD:
            thread.join(WAIT_S)
            assert not thread.is_alive(), "a thread reads on after its stream was closed"


def test_the_next_leaves_are_read_while_nobody_asks_for_them() -> None:
    read_third = threading.Event()
    rows = late_rows(40, lambda number: read_third.set() if number == 3 else None)
    with stream_of(rows, prefetch=2) as stream:
        stream.seek(1)
        assert ids_of(stream.leaves(1)) == sample_ids(0, 40, 0, 2).tolist()
        wait(read_third)


def test_without_prefetch_a_leaf_is_read_when_it_is_asked_for() -> None:
    rows = late_rows(40, lambda _number: None)
    with stream_of(rows, prefetch=0) as stream:
        stream.seek(1)
        assert rows.num_reads == 0
        list(stream.leaves(1))
        assert rows.num_reads == 1
        assert THREAD not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("prefetch", [1, 3])
def test_no_more_than_prefetch_leaves_are_ahead_of_those_consumed(
    prefetch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_blocked = threading.Event()

    class Watched(threading.Condition):
        """Says when the thread that reads ahead finds no room."""

        def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
            if threading.current_thread().name == THREAD and not predicate():
                is_blocked.set()
            return super().wait_for(predicate, timeout)

    monkeypatch.setattr(threading, "Condition", Watched)
    monkeypatch.setattr(read_ahead, "_TICK_S", WAIT_S)
    rows = late_rows(40, lambda _number: None)
    with stream_of(rows, prefetch) as stream:
        stream.seek(1)
        for consumed in range(4):
            wait(is_blocked)
            assert rows.num_reads == consumed + prefetch
            is_blocked.clear()
            list(stream.leaves(consumed + 1))


def test_a_read_that_hangs_and_the_next_stream_do_not_meet_in_one_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = late_rows(40, lambda _number: None)
    is_first_in, is_second_in, meetings = threading.Event(), threading.Event(), list[bool]()
    read = TokenDataset._read

    def watched(dataset: TokenDataset, opened: Any, file: Any, row_group: int) -> Any:
        if is_first_in.is_set():
            is_second_in.set()
        else:
            is_first_in.set()
            meetings.append(
                is_second_in.wait(0.2)
            )  # the longest that the second is given to come in, which it must not
        return read(dataset, opened, file, row_group)

    monkeypatch.setattr(TokenDataset, "_read", watched)
    first = threading.Thread(target=rows.rows, args=([0],))
    first.start()
    wait(is_first_in)
    assert rows.rows([39])[0, 0] == 39
    first.join(WAIT_S)
    assert meetings == [False]


def test_a_leaf_that_comes_late_is_waited_for() -> None:
    asked, gate, got = threading.Event(), threading.Event(), list[int]()

    def hold(number: int) -> None:
        if number == 1:
            asked.set()
            wait(gate)

    with stream_of(late_rows(40, hold), prefetch=2) as stream:
        stream.seek(1)
        consumer = threading.Thread(target=lambda: got.extend(ids_of(stream.leaves(1))))
        consumer.start()
        wait(asked)
        assert got == []
        gate.set()
        consumer.join(WAIT_S)
    assert got == sample_ids(0, 40, 0, 2).tolist()


def test_what_was_read_ahead_does_not_count_as_consumed() -> None:  # the kind of case B46
    ahead = threading.Event()
    rows = late_rows(40, lambda number: ahead.set() if number == 9 else None)
    with stream_of(rows, prefetch=4) as stream:
        stream.seek(1)
        seen = [row for step in range(1, 6) for row in ids_of(stream.leaves(step))]
        wait(ahead)
    with stream_of(rows, prefetch=4) as stream:
        stream.seek(6)
        seen += [row for step in range(6, 21) for row in ids_of(stream.leaves(step))]
    assert seen == sample_ids(0, 40, 0, 40).tolist()
    assert sorted(seen) == list(range(40))


def test_seeking_back_and_forth_gives_each_step_its_own_rows() -> None:
    with stream_of(late_rows(40, lambda _number: None), prefetch=3) as stream:
        for step in (7, 1, 12, 12, 3):
            stream.seek(step)
            assert ids_of(stream.leaves(step)) == sample_ids(0, 40, 2 * step - 2, 2).tolist()


def test_closing_does_not_wait_for_a_read_that_hangs_and_its_thread_ends_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(read_ahead, "_CLOSING_S", 0.0)
    hangs, gate = threading.Event(), threading.Event()

    def hang(number: int) -> None:
        if number == 2:
            hangs.set()
            wait(gate)

    rows = late_rows(40, hang)
    stream = stream_of(rows, prefetch=2)
    stream.seek(1)
    list(stream.leaves(1))
    wait(hangs)
    (thread,) = (thread for thread in threading.enumerate() if thread.name == THREAD)
    stream.close()
    assert thread.is_alive()
    with stream_of(rows, prefetch=2) as after:
        after.seek(2)
        assert ids_of(after.leaves(2)) == sample_ids(0, 40, 2, 2).tolist()
        gate.set()
        thread.join(WAIT_S)
        assert ids_of(after.leaves(3)) == sample_ids(0, 40, 4, 2).tolist()
    assert not thread.is_alive()


@pytest.mark.parametrize(
    "error",
    [
        DataError("bad id", "train-00000.parquet", 3, 1),
        StoreRefused("get", "train-00000.parquet", "no key"),
        ZeroDivisionError("a fault of our own"),
    ],
)
def test_an_error_keeps_its_type_and_comes_in_its_turn(error: Exception) -> None:
    failed = threading.Event()

    def fail(number: int) -> None:
        if number >= 2:
            failed.set()
            raise error

    with stream_of(late_rows(40, fail), prefetch=3) as stream:
        stream.seek(1)
        wait(failed)
        assert ids_of(stream.leaves(1)) == sample_ids(0, 40, 0, 2).tolist()
        with pytest.raises(type(error)) as caught:
            list(stream.leaves(2))
        assert str(caught.value) == str(error)


def unavailable() -> StoreUnavailable:
    return StoreUnavailable("get_range", "train-00000.parquet", "no answer")


class Waits:
    """A patience whose pauses take no time; ``on_pause`` sees how many there were."""

    def __init__(self, on_pause: Callable[[int], object] = lambda _count: None) -> None:
        self.phases, self.pulse = list[Phase](), Pulse(phase=Phase.TRAINING)
        self._on_pause = on_pause
        self.patience = DataPatience(
            limit_s=60.0, pulse=self.pulse, check=lambda: None, pause=self._pause, monotonic=lambda: 0.0
        )

    def _pause(self, _seconds: float) -> None:
        self.phases.append(self.pulse.read().phase)
        self._on_pause(len(self.phases))


def test_a_store_that_failed_ahead_of_need_and_is_back_when_needed_costs_no_wait() -> None:
    failed, is_down = threading.Event(), True

    def fail(number: int) -> None:
        if number >= 2 and is_down:
            failed.set()
            raise unavailable()

    waits = Waits()
    with stream_of(late_rows(40, fail), prefetch=3, patience=waits.patience) as stream:
        stream.seek(1)
        wait(failed)
        seen = ids_of(stream.leaves(1))
        is_down = False
        seen += ids_of(stream.leaves(2))
    assert seen == sample_ids(0, 40, 0, 4).tolist()
    assert waits.phases == []


def test_an_outage_is_waited_out_and_loses_and_repeats_nothing() -> None:
    is_down = False

    def fail(_number: int) -> None:
        if is_down:
            raise unavailable()

    def back(count: int) -> None:
        nonlocal is_down
        is_down = count < 3

    waits = Waits(back)
    with stream_of(late_rows(40, fail), prefetch=3, patience=waits.patience, global_batch=4) as stream:
        stream.seek(1)
        leaves = stream.leaves(1)
        seen = ids_of(iter([next(leaves)]))
        is_down = True
        stream.seek(1)
        seen = [row for step in (1, 2, 3) for row in ids_of(stream.leaves(step))]
    assert seen == sample_ids(0, 40, 0, 12).tolist()
    assert waits.phases == [Phase.WAITING_FOR_DATA] * 3


def test_a_stream_that_was_closed_gives_no_more_leaves() -> None:
    stream = stream_of(late_rows(40, lambda _number: None), prefetch=2, global_batch=4)
    stream.seek(1)
    leaves = stream.leaves(1)
    next(leaves)
    stream.close()
    stream.close()
    with pytest.raises(RuntimeError, match="closed in the middle of step 1"):
        next(leaves)


def test_reading_ahead_changes_no_leaf() -> None:
    def tokens(prefetch: int) -> list[list[int]]:
        with stream_of(late_rows(40, lambda _number: None), prefetch, global_batch=4) as stream:
            stream.seek(1)
            return [leaf.input_ids.flatten().tolist() for step in range(1, 30) for leaf in stream.leaves(step)]

    assert np.array_equal(tokens(0), tokens(4))

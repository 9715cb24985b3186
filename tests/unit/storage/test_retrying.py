"""Retries with a fake sleeper and a seeded random source; the store underneath is the in-memory twin."""

# ruff: noqa: ARG002 - the interface has deadlines that this double does not need

from __future__ import annotations

import logging
import random

import pytest

from storage.errors import ObjectExists, ObjectMissing, StoreRefused, StoreUnavailable
from storage.memory_store import MemoryStore
from storage.retrying import RetryingStore, backoff_s


class _Flaky(MemoryStore):
    """Fails the first ``failures`` calls of put, create and get; ``lost_answers``: only after doing the work."""

    def __init__(self, failures: int, error: Exception | None = None, lost_answers: bool = False) -> None:
        super().__init__("flaky")
        self.calls = 0
        self.deadlines: list[float] = []
        self._failures = failures
        self._error = error or StoreUnavailable("put", "k", "connection reset")
        self._lost_answers = lost_answers

    def _fail(self) -> None:
        self.calls += 1
        if self.calls <= self._failures:
            raise self._error

    def put(self, key: str, data: bytes | memoryview, *, deadline_s: float = 60.0) -> None:
        self.deadlines.append(deadline_s)
        self._fail()
        super().put(key, data)

    def create(self, key: str, data: bytes, *, deadline_s: float = 60.0) -> None:
        if not self._lost_answers:
            self._fail()
        super().create(key, data)
        if self._lost_answers:
            self._fail()


class _Resuming(_Flaky):
    """Keeps the parts of a failed put, as S3 does."""

    def __init__(self, failures: int, error: Exception | None = None) -> None:
        super().__init__(failures, error)
        self.num_retries = 0
        self.given_up: list[str] = []

    def give_up(self, key: str, *, deadline_s: float = 10.0) -> None:
        self.given_up.append(key)


def _retrying(inner: MemoryStore, retries: int, sleeps: list[float]) -> RetryingStore:
    return RetryingStore(inner, retries=retries, deadline_s=7.0, sleep=sleeps.append, rng=random.Random(0))


def test_a_passing_failure_is_retried_with_growing_waits_and_a_line(caplog: pytest.LogCaptureFixture) -> None:
    inner, sleeps = _Flaky(4), list[float]()
    with caplog.at_level(logging.INFO, logger="storage.retrying"):
        _retrying(inner, 5, sleeps).put("k", b"x")
    assert inner.get("k") == b"x"
    assert len(sleeps) == 4
    for number, slept in enumerate(sleeps):
        assert 0.0 <= slept <= 0.4 * 2**number
    assert "connection reset; retry 1 of 5" in caplog.records[0].getMessage()


def test_retries_end_and_the_last_error_is_raised() -> None:
    inner, sleeps = _Flaky(100), list[float]()
    with pytest.raises(StoreUnavailable, match="connection reset"):
        _retrying(inner, 3, sleeps).put("k", b"x")
    assert inner.calls == 4
    assert len(sleeps) == 3


def test_a_wait_is_never_longer_than_the_limit() -> None:
    sleeps: list[float] = []
    _retrying(_Flaky(40), 50, sleeps).put("k", b"x")
    assert max(sleeps) <= 10.0


@pytest.mark.parametrize(
    "error", [ObjectMissing("k"), ObjectExists("k"), StoreRefused("put", "k", "access denied"), ValueError("a bug")]
)
def test_what_another_try_cannot_cure_is_not_retried(error: Exception) -> None:
    inner, sleeps = _Flaky(1, error), list[float]()
    with pytest.raises(type(error)):
        _retrying(inner, 5, sleeps).put("k", b"x")
    assert inner.calls == 1
    assert sleeps == []


def test_a_create_whose_answer_was_lost_counts_as_ours() -> None:
    inner = _Flaky(1, lost_answers=True)
    _retrying(inner, 2, []).create("commits/1", b"mine")
    assert inner.get("commits/1") == b"mine"


def test_a_create_that_finds_somebody_elses_object_is_refused() -> None:
    inner = _Flaky(1)
    MemoryStore.put(inner, "commits/1", b"theirs")
    with pytest.raises(ObjectExists):
        _retrying(inner, 2, []).create("commits/1", b"mine")


def test_waits_have_full_jitter_so_that_ranks_that_failed_together_do_not_come_back_together() -> None:
    drawn = [backoff_s(3, first_s=1.0, longest_s=60.0, rng=random.Random(seed)) for seed in range(200)]
    assert min(drawn) < 1.0
    assert 7.0 < max(drawn) <= 8.0
    assert backoff_s(500, first_s=1.0, longest_s=60.0, rng=random.Random(1)) <= 60.0


def test_retries_are_counted_those_of_the_store_underneath_too() -> None:
    inner = _Resuming(2)
    store = _retrying(inner, 5, [])
    store.put("k", b"x")
    assert store.num_retries == 2
    inner.num_retries = 5
    assert store.num_retries == 7


@pytest.mark.parametrize("error", [StoreUnavailable("put", "k", "reset"), StoreRefused("put", "k", "denied")])
def test_a_put_that_is_given_up_for_good_is_told_to_the_store_once(error: Exception) -> None:
    inner = _Resuming(100, error)
    with pytest.raises(StoreUnavailable):
        _retrying(inner, 3, []).put("k", b"x")
    assert inner.given_up == ["k"]


def test_a_put_that_succeeds_at_last_is_not_given_up() -> None:
    inner = _Resuming(3)
    _retrying(inner, 3, []).put("k", b"x")
    assert inner.given_up == []


def test_the_configured_deadline_is_used_unless_the_caller_names_one() -> None:
    inner = _Flaky(0)
    store = _retrying(inner, 0, [])
    store.put("a", b"")
    store.put("b", b"", deadline_s=1.5)
    assert inner.deadlines == [7.0, 1.5]


def test_a_store_that_stays_silent_is_asked_twice_however_many_retries_there_are() -> None:
    silent = StoreUnavailable("put", "k", "no answer within 7 s")
    silent.__cause__ = TimeoutError()
    inner, sleeps = _Flaky(failures=9, error=silent), list[float]()
    with pytest.raises(StoreUnavailable, match="no answer"):
        _retrying(inner, 5, sleeps).put("k", b"v", deadline_s=0.0)  # so every try lasts as long as it may
    assert (inner.calls, len(sleeps)) == (2, 1)


@pytest.mark.parametrize(
    ("error", "given_up"), [(StoreUnavailable("put", "k", "reset"), []), (StoreRefused("put", "k", "denied"), ["k"])]
)
def test_parts_are_kept_for_one_who_puts_again_unless_the_store_refused(error: Exception, given_up: list[str]) -> None:
    inner = _Resuming(9, error)
    store = RetryingStore(inner, retries=1, sleep=lambda _: None, keeps_parts=True)
    with pytest.raises(StoreUnavailable):
        store.put("k", b"x")
    assert inner.given_up == given_up

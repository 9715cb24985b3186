"""A store that outlasts an outage where it is told to, and only there."""

from __future__ import annotations

import pytest

from orchestrator.patient_store import PatientStore
from storage.errors import StoreUnavailable
from storage.retrying import RetryingStore
from tests.fakes.away_store import AwayStore


class Scene:
    """A store that comes back at a time, by a clock that pauses move on."""

    def __init__(self, *, back_at: float, limit_s: float = 100.0) -> None:
        self.now = 0.0
        self.back_at = back_at
        self.inner = AwayStore()
        self.inner.is_away = True
        self.failures: list[float] = []
        self.store = PatientStore(self.inner, limit_s=limit_s, monotonic=lambda: self.now, pause=self._pause)

    def put(self) -> None:
        with self.store.patience(self._failed):
            self.store.put("k", b"v")

    def _failed(self, reason: str, failing_for_s: float) -> None:
        assert "put k failed: connection refused" in reason
        assert self.store.trouble == reason
        self.failures.append(failing_for_s)

    def _pause(self, seconds: float) -> None:
        self.now += seconds
        self.inner.is_away = self.now < self.back_at


def test_a_patient_call_is_made_until_the_store_is_back_and_says_each_time_for_how_long_it_fails() -> None:
    scene = Scene(back_at=20.0)
    scene.put()
    assert scene.inner.get("k") == b"v"
    assert scene.failures == [0.0, 0.5, 1.5, 3.5, 7.5, 12.5, 17.5]
    assert scene.store.trouble is None


def test_a_call_is_said_to_fail_while_the_inner_store_still_has_retries() -> None:
    scene = Scene(back_at=40.0)
    scene.store = PatientStore(
        RetryingStore(scene.inner, retries=50, sleep=lambda _: scene._pause(4.0)),
        limit_s=100.0,
        monotonic=lambda: scene.now,
        pause=scene._pause,
    )
    scene.put()
    assert scene.failures == [12.0, 16.0, 20.0, 24.0, 28.0, 32.0, 36.0]
    assert scene.inner.get("k") == b"v"


def test_without_patience_after_it_and_past_the_limit_an_outage_is_an_error() -> None:
    scene = Scene(back_at=1e9, limit_s=30.0)
    with pytest.raises(StoreUnavailable):
        scene.store.put("k", b"v")
    assert scene.failures == []
    with pytest.raises(StoreUnavailable):
        scene.put()
    assert 30.0 <= scene.now <= 35.0
    assert scene.store.trouble is None
    with pytest.raises(StoreUnavailable):
        scene.store.get("k")


def test_a_closed_store_is_patient_no_more() -> None:
    scene = Scene(back_at=20.0)
    scene.store.close()
    with pytest.raises(StoreUnavailable):
        scene.put()
    assert scene.now == 0.0

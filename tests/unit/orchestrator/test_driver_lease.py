"""The Lease in an outage: tried on and on, lost only when another driver is known to have it."""

from __future__ import annotations

import threading

import pytest

from orchestrator.driver_lease import DriverLease
from storage.errors import LeaseHeld, StorageError, StoreUnavailable

AWAY = StoreUnavailable("list", "lease/", "refused")


class ScriptedLease:
    """Renewals end as the script says; the last line of it is repeated."""

    def __init__(self, *script: StorageError | None) -> None:
        self._script = list(script)
        self.num_renewals = 0
        self.renewed_often = threading.Event()
        self.is_released = False

    def renew(self) -> None:
        self.num_renewals += 1
        if self.num_renewals > len(self._script):
            self.renewed_often.set()
        end = self._script[min(self.num_renewals, len(self._script)) - 1]
        if end is not None:
            raise end

    def release(self) -> None:
        self.is_released = True


def test_an_outage_however_long_is_no_loss_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    lease = ScriptedLease(*[AWAY] * 50, None)
    with DriverLease(lease, 0.001, warn_after_s=0.0) as held:
        assert lease.renewed_often.wait(10.0)
        assert not held.lost.is_set()
    assert lease.is_released
    assert [record.levelname for record in caplog.records if record.levelname == "WARNING"] == ["WARNING"]


def test_a_renewal_that_fails_now_and_then_is_nothing_to_tell(caplog: pytest.LogCaptureFixture) -> None:
    lease = ScriptedLease(AWAY, None, AWAY, AWAY, None)
    with DriverLease(lease, 0.001, warn_after_s=3600.0):
        assert lease.renewed_often.wait(10.0)
    assert lease.is_released
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == []


def test_a_driver_that_finds_another_one_after_an_outage_has_lost_the_lease_for_good() -> None:
    lease = ScriptedLease(AWAY, AWAY, LeaseHeld("run", "driver ffff"))
    with DriverLease(lease, 0.001) as held:
        assert held.lost.wait(10.0)
    assert lease.num_renewals == 3
    assert not lease.is_released, "it is the other driver's"


def test_the_end_of_a_driver_waits_for_no_store() -> None:
    lease = ScriptedLease(AWAY)
    with DriverLease(lease, 0.001) as held:
        assert lease.renewed_often.wait(10.0)
    assert not held.lost.is_set()
    assert not lease.is_released

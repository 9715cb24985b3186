"""Tells whether a driver holds a Run, for someone who only looks: nothing is written and no Lease is taken.

A driver on this machine is known by its process, any other by its record, which changes with every renewal. Clocks are
never compared, so a record that does not change must be watched for one ``ttl_s``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from storage.lease import LeaseRecord, Owner, local_owner, parse_lease, process_is_alive, read_leases
from storage.object_store import ObjectStore

__all__ = ["DriverSighting", "watch_drivers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverSighting:
    """One Lease record. ``is_alive`` None: not watched long enough to say. ``record`` None: it cannot be read."""

    key: str
    record: LeaseRecord | None
    is_alive: bool | None
    reason: str

    def __str__(self) -> str:
        if self.record is None:
            return f"{self.key} ({self.reason})"
        return (
            f"driver {self.record.nonce}, pid {self.record.pid} on {self.record.host}, attempt "
            f"{self.record.attempt_number}, last renewed {self.record.renewed_at_utc} ({self.reason})"
        )


def watch_drivers(
    store: ObjectStore,
    *,
    ttl_s: float = 15.0,
    poll_s: float = 1.0,
    owner: Owner | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    is_alive: Callable[[int], bool] = process_is_alive,
    on_wait: Callable[[DriverSighting, float], None] | None = None,
) -> list[DriverSighting]:
    """Every Lease record, by key. Watches for at most ``ttl_s``, and only while one is in doubt; 0 never waits.

    ``on_wait`` is told once what is being waited for, and how long at most.
    """
    owner = owner or local_owner()
    first = read_leases(store)
    here = {key: _seen_here(key, content, owner, is_alive) for key, content in first.items()}
    verdicts = {key: sighting for key, sighting in here.items() if sighting is not None}
    doubtful = {key: content for key, content in first.items() if key not in verdicts}
    until_s = clock() + ttl_s
    if doubtful and ttl_s > 0 and on_wait is not None:
        key, content = next(iter(doubtful.items()))
        on_wait(_sighting(key, content, None, "being watched"), ttl_s)
    while doubtful and clock() < until_s:
        sleep(poll_s)
        for key, sighting in _changes(doubtful, read_leases(store)).items():
            verdicts[key] = sighting
            del doubtful[key]
    for key, content in doubtful.items():
        if ttl_s > 0:
            verdicts[key] = _sighting(key, content, False, f"not renewed within {ttl_s:g} s: stale")
        else:
            verdicts[key] = _sighting(key, content, None, "not watched")
    return [verdicts[key] for key in sorted(verdicts)]


def _changes(doubtful: Mapping[str, bytes], now: Mapping[str, bytes]) -> dict[str, DriverSighting]:
    found: dict[str, DriverSighting] = {}
    for key, content in doubtful.items():
        if key not in now:
            found[key] = _sighting(key, content, False, "given back while being watched")
        elif now[key] != content:
            found[key] = _sighting(key, now[key], True, "renewed while being watched")
    return found


def _seen_here(key: str, content: bytes, owner: Owner, is_alive: Callable[[int], bool]) -> DriverSighting | None:
    """What the process table of this machine says; None for a driver of another machine."""
    record = parse_lease(content)
    if record is None or (record.host, record.boot_id) != (owner.host, owner.boot_id):
        return None
    if is_alive(record.pid):
        return DriverSighting(key=key, record=record, is_alive=True, reason="its process runs on this machine")
    return DriverSighting(key=key, record=record, is_alive=False, reason="its process here is gone: stale")


def _sighting(key: str, content: bytes, is_alive: bool | None, reason: str) -> DriverSighting:
    return DriverSighting(key=key, record=parse_lease(content), is_alive=is_alive, reason=reason)

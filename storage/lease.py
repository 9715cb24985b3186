"""The Lease: the right of one driver to act for a Run, kept as one small object per driver in the store.

Needs no create-only write. Each driver writes only its own object, first writes and then looks at the others, and gives
way to a smaller nonce; the smaller one waits until the other has given way. Whether another driver lives is read from
its process where that can be seen, else from its object, which changes with every renewal. Clocks are never compared.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from storage.errors import LeaseHeld, ObjectMissing, StoreUnavailable
from storage.events import utc_text
from storage.keys import LEASES, lease_key, new_nonce
from storage.object_store import ObjectStore

__all__ = ["Lease", "LeaseRecord", "Owner", "acquire", "local_owner", "parse_lease", "process_is_alive", "read_leases"]

logger = logging.getLogger(__name__)

_PATIENCE = 4.0  # a driver waits at most this many ttls for others to settle


class LeaseRecord(BaseModel):
    """A Lease as stored. ``replaces`` names the nonces of the drivers that its owner found dead."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = 1
    run_id: str
    nonce: Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]
    host: str
    pid: int
    boot_id: str
    counter: int
    renewed_at_utc: str
    attempt_number: int
    replaces: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Which process a driver is. ``boot_id`` also tells process-id namespaces apart, so that pids can be compared."""

    host: str
    pid: int
    boot_id: str


def local_owner() -> Owner:
    """This process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        boot_id = f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no procfs: then no other process is ever taken for one of this machine
        boot_id = new_nonce() + new_nonce()
    return Owner(host=socket.gethostname(), pid=os.getpid(), boot_id=boot_id)


def process_is_alive(pid: int) -> bool:
    """False when no process of this machine has ``pid``, or only the remains of one that nobody has waited for."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return not Path("/proc/self/stat").exists()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


@dataclass(frozen=True, kw_only=True)
class _Surroundings:
    """Everything outside that a Lease depends on."""

    store: ObjectStore
    run_id: str
    ttl_s: float
    poll_s: float
    owner: Owner
    clock: Callable[[], float]
    sleep: Callable[[float], None]
    wall_clock: Callable[[], float]
    is_alive: Callable[[int], bool]


def acquire(
    store: ObjectStore,
    run_id: str,
    *,
    nonce: str | None = None,
    attempt_number: int = 0,
    ttl_s: float = 15.0,
    poll_s: float = 1.0,
    owner: Owner | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    wall_clock: Callable[[], float] = time.time,
    is_alive: Callable[[int], bool] = process_is_alive,
) -> Lease:
    """Become the Run's driver, or raise LeaseHeld and leave nothing behind.

    The holder must renew at least every third of ``ttl_s``, which all drivers of a Run share. A driver that died
    elsewhere is waited for one ``ttl_s``; one that died on this machine is not.
    """
    around = _Surroundings(
        store=store,
        run_id=run_id,
        ttl_s=ttl_s,
        poll_s=poll_s,
        owner=owner or local_owner(),
        clock=clock,
        sleep=sleep,
        wall_clock=wall_clock,
        is_alive=is_alive,
    )
    return _enter(around, Lease(around, nonce or new_nonce(), attempt_number))


def _enter(around: _Surroundings, lease: Lease) -> Lease:
    """Look, write, look again, and only then hold; whoever has to give way removes what it wrote."""
    watch = _Watch(around, lease.nonce)
    watch.wait_for_others()
    try:
        lease._write(())
        watch.is_entered = True
        watch.wait_for_others()
        replaced = tuple(sorted(watch.dead))
        lease._write(replaced)
        if not lease.is_held():
            raise LeaseHeld(around.run_id, "it took over while this driver was starting")
    except BaseException:
        lease._withdraw()
        raise
    around.store.delete([lease_key(other) for other in replaced], deadline_s=around.ttl_s)
    for other in replaced:
        logger.warning("run %s: took over from driver %s, which is gone", around.run_id, other)
    return lease


class Lease:
    """A Lease that this process holds. Made by `acquire`."""

    def __init__(self, around: _Surroundings, nonce: str, attempt_number: int) -> None:
        self.nonce = nonce
        self._around = around
        self._attempt_number = attempt_number
        self._counter = 0
        self._replaces: tuple[str, ...] = ()
        self._is_lost = False

    def renew_through(self, store: ObjectStore) -> None:
        """Use ``store``, of the same place, from here on: renewals come often and need no retries of their own."""
        self._around = replace(self._around, store=store)

    def renew(self, attempt_number: int | None = None) -> None:
        """Show that this driver lives. Raises LeaseHeld once another one has taken over; that is final."""
        if attempt_number is not None:
            self._attempt_number = attempt_number
        # Looked at before writing: a driver that was suspended must not put its deleted Lease back.
        if not self.is_held():
            raise LeaseHeld(self._around.run_id, "it took over from this driver")
        self._write(self._replaces)

    def is_held(self) -> bool:
        """False once another driver has taken over, for ever after. Asks the store."""
        if self._is_lost:
            return False
        key = lease_key(self.nonce)
        found = read_leases(self._around.store, key, deadline_s=self._around.ttl_s)
        if key not in found:
            self._is_lost = True
        for other, content in found.items():
            record = parse_lease(content)
            if other != key and record is not None and self.nonce in record.replaces:
                self._is_lost = True
        return not self._is_lost

    def release(self) -> None:
        """Let the next driver start without waiting."""
        self._is_lost = True
        self._around.store.delete([lease_key(self.nonce)], deadline_s=self._around.ttl_s)

    def _withdraw(self) -> None:
        try:
            self.release()
        except StoreUnavailable as error:  # the cause that is being raised matters more
            logger.warning("run %s: lease %s stays until it is stale: %s", self._around.run_id, self.nonce, error)

    def _write(self, replaces: tuple[str, ...]) -> None:
        around = self._around
        self._counter += 1
        self._replaces = replaces
        record = LeaseRecord(
            run_id=around.run_id,
            nonce=self.nonce,
            host=around.owner.host,
            pid=around.owner.pid,
            boot_id=around.owner.boot_id,
            counter=self._counter,
            renewed_at_utc=utc_text(around.wall_clock()),
            attempt_number=self._attempt_number,
            replaces=replaces,
        )
        around.store.put(lease_key(self.nonce), record.model_dump_json().encode(), deadline_s=around.ttl_s)


@dataclass(kw_only=True)
class _Sighting:
    content: bytes
    since_s: float


@dataclass
class _Watch:
    """Watches the other drivers' objects until each is gone or found dead; a living one ends the attempt to acquire.

    ``is_entered``: our own object is written, so of two newcomers the one with the larger nonce gives way.
    """

    around: _Surroundings
    nonce: str
    is_entered: bool = False
    dead: set[str] = field(default_factory=set)
    _sightings: dict[str, _Sighting] = field(default_factory=dict)

    def wait_for_others(self) -> None:
        """Return when no living driver is left to wait for. Raises LeaseHeld."""
        give_up_at_s = self.around.clock() + _PATIENCE * self.around.ttl_s
        while self._is_anyone_pending():
            if self.around.clock() >= give_up_at_s:
                raise LeaseHeld(self.around.run_id, "others that come and go")
            self.around.sleep(self.around.poll_s)

    def _is_anyone_pending(self) -> bool:
        own_key = lease_key(self.nonce) if self.is_entered else None
        found = read_leases(self.around.store, own_key, deadline_s=self.around.ttl_s)
        own = found.pop(lease_key(self.nonce), None)
        if self.is_entered and own is None:
            raise LeaseHeld(self.around.run_id, "it took over while this driver was starting")
        for key in [key for key in self._sightings if key not in found]:
            del self._sightings[key]
        pending = [key for key, content in found.items() if not self._is_dead(key, content)]
        self.dead = {_nonce_of(key) for key in found if key not in pending}
        for key in pending:
            if self.is_entered and _nonce_of(key) < self.nonce:
                raise LeaseHeld(self.around.run_id, _describe(key, found[key]))
        return bool(pending)

    def _is_dead(self, key: str, content: bytes) -> bool:
        now_s = self.around.clock()
        sighting = self._sightings.setdefault(key, _Sighting(content=content, since_s=now_s))
        record = parse_lease(content)
        if sighting.content != content:
            raise LeaseHeld(self.around.run_id, _describe(key, content))
        if record is not None and self._died_here(record):
            return True
        return now_s - sighting.since_s >= self.around.ttl_s

    def _died_here(self, record: LeaseRecord) -> bool:
        owner = self.around.owner
        if (record.host, record.boot_id) != (owner.host, owner.boot_id):
            return False
        return not self.around.is_alive(record.pid)


def read_leases(store: ObjectStore, own_key: str | None = None, *, deadline_s: float = 60.0) -> dict[str, bytes]:
    """The records of all drivers by key, as stored.

    ``own_key``: of a record that was written; a store that lists late may not list it yet, which means nothing.
    """
    found: dict[str, bytes] = {}
    listed = {entry.key for entry in store.list(LEASES, deadline_s=deadline_s)}
    for key in sorted(listed | ({own_key} if own_key else set())):
        if key != lease_key(_nonce_of(key)):
            continue  # not ours; never read, never deleted
        with contextlib.suppress(ObjectMissing):  # released since the listing
            found[key] = store.get(key, deadline_s=deadline_s)
    return found


def parse_lease(content: bytes) -> LeaseRecord | None:
    """The record, or None for one of another version: then only its changes tell whether its driver lives."""
    try:
        return LeaseRecord.model_validate_json(content)
    except ValidationError:
        return None


def _nonce_of(key: str) -> str:
    return key.removeprefix(LEASES).removesuffix(".json")


def _describe(key: str, content: bytes) -> str:
    record = parse_lease(content)
    if record is None:
        return f"driver {_nonce_of(key)}"
    return f"driver {record.nonce}, pid {record.pid} on {record.host}, last renewed {record.renewed_at_utc}"

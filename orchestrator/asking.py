"""Asks the living driver of a Run for something, through the Run's store, and waits for its answer. No Ray, no torch.

The other side is requests.RequestDesk. Whether a driver lives is told by its Lease, never by comparing clocks.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from getpass import getuser

from orchestrator.requests import Reply, Request, WishKind, read_reply
from storage.errors import ObjectMissing, StoreUnavailable
from storage.events import utc_text
from storage.keys import EVENTS, RUN, lease_key, new_nonce, reply_key, request_key
from storage.lease_watch import DriverSighting, watch_drivers
from storage.object_store import ObjectStore

__all__ = ["Answer", "Asking", "DriverGone", "NoDriver", "NotARun"]

_SILENT_S = 20.0  # a Lease that does not change for so long is a dead driver's: it is renewed every two seconds


class NotARun(Exception):
    """Nothing of a Run is there."""


class NoDriver(Exception):
    """No driver lives that could be asked."""


class DriverGone(Exception):
    """The driver that was asked has ended, or died, without a final answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """``reply`` None: not even taken within the time."""

    request: Request
    reply: Reply | None


@dataclass(slots=True, kw_only=True)
class _Pulse:
    """The driver's Lease as last seen."""

    content: bytes = b""
    seen_at_s: float = field(default=0.0)


class Asking:
    """One request. ``on_news`` is told each reply that differs from the last; ``on_watch`` what is being waited for."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        on_news: Callable[[Reply], None] = lambda _: None,
        on_watch: Callable[[DriverSighting, float], None] | None = None,
        poll_s: float = 0.25,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._on_news = on_news
        self._on_watch = on_watch
        self._poll_s = poll_s
        self._clock, self._sleep, self._wall_clock = clock, sleep, wall_clock

    def ask(self, wish: WishKind, workers: int | None, *, until_done: bool, timeout_s: float) -> Answer:
        """Returns with the final reply, with an accepted one where ``until_done`` is not asked, or when time is up.

        A request that nobody took by then is withdrawn. Raises NotARun, NoDriver, DriverGone, StorageError.
        """
        request = Request(
            nonce=new_nonce(),
            driver=self._living_driver(),
            wish=wish,
            workers=workers,
            made_at_utc=utc_text(self._wall_clock()),
            made_by=f"{_user()}@{socket.gethostname()}",
        )
        self._store.put(request_key(request.nonce), request.model_dump_json().encode())
        reply: Reply | None = None
        try:
            reply = self._await(request, until_done, timeout_s) or self._withdraw(request)
        finally:
            if reply is None or reply.is_final:  # nobody has it, or nobody needs it any more
                self._store.delete([request_key(request.nonce), reply_key(request.nonce)])
        return Answer(request=request, reply=reply)

    def _living_driver(self) -> str:
        drivers = watch_drivers(self._store, on_wait=self._on_watch, clock=self._clock, sleep=self._sleep)
        for seen in drivers:
            if seen.is_alive and seen.record is not None:
                return seen.record.nonce
        if not drivers and not any(self._has(key) for key in (RUN, EVENTS)):
            raise NotARun
        raise NoDriver("; ".join(map(str, drivers)) or "no lease is there")

    def _has(self, key: str) -> bool:
        try:
            self._store.get_range(key, 0, 1)
        except ObjectMissing:
            return False
        return True

    def _await(self, request: Request, until_done: bool, timeout_s: float) -> Reply | None:
        deadline = self._clock() + timeout_s
        pulse = _Pulse(seen_at_s=self._clock())
        newest: Reply | None = None
        while True:
            reply = self._try(lambda: read_reply(self._store, request.nonce))
            if reply is not None and reply != newest:
                newest = reply
                self._on_news(reply)
                if reply.is_final or (reply.state == "accepted" and not until_done):
                    return reply
            if self._clock() >= deadline:
                return newest
            if not self._lives(request.driver, pulse):
                # Its last word may have been written just before it gave its Lease back.
                last = read_reply(self._store, request.nonce)
                if last is not None and last.is_final:
                    self._on_news(last)
                    return last
                raise DriverGone(request.driver)
            self._sleep(self._poll_s)

    def _withdraw(self, request: Request) -> Reply | None:
        """A reply here comes from a driver that took it at the last moment, and goes on with it."""
        self._store.delete([request_key(request.nonce)])
        return read_reply(self._store, request.nonce)

    def _lives(self, driver: str, pulse: _Pulse) -> bool:
        try:
            content = self._store.get(lease_key(driver))
        except ObjectMissing:
            return False
        except StoreUnavailable:
            pulse.seen_at_s = self._clock()  # who cannot be seen is not dead
            return True
        if content != pulse.content:
            pulse.content, pulse.seen_at_s = content, self._clock()
        return self._clock() - pulse.seen_at_s < _SILENT_S

    def _try(self, ask: Callable[[], Reply | None]) -> Reply | None:
        """A store that is away for a moment ends no wait."""
        try:
            return ask()
        except StoreUnavailable:
            return None


def _user() -> str:
    try:
        return getuser()
    except (KeyError, OSError):  # no such user in this container
        return "someone"

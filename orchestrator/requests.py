"""Requests: what a person asks the driver of a running Run for, as small objects in the Run's store, and its replies.

Whoever reaches the store can ask; no Ray is needed. A request names the driver that it is for, so that one made for a
driver that died is never carried out by the next. The desk only takes and answers; what a wish means for the Run is
request_work's business. The store being away is no error here: the desk looks again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from storage.errors import ObjectMissing, StorageError
from storage.keys import CONTROL, parse_reply_key, parse_request_key, reply_key, request_key
from storage.object_store import ObjectStore

__all__ = ["FINAL_STATES", "Reply", "ReplyState", "Request", "RequestDesk", "WishKind", "read_reply"]

_log = logging.getLogger(__name__)
_DEADLINE_S = 5.0
_CLOSE_S = 10.0
_MAX_BYTES = 1 << 16  # a larger file is none of ours
_MAX_WAITING = 16  # requests taken but not yet handed over; the others stay in the store until the next look
_REMEMBERED = 4096
_KEEP_S = 600.0  # an answered request nobody removed goes after so long
_Nonce = Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]

WishKind = Literal["scale", "save", "stop"]
ReplyState = Literal["taken", "accepted", "refused", "done"]
FINAL_STATES: frozenset[ReplyState] = frozenset({"refused", "done"})


class Request(BaseModel):
    """``driver``: the nonce of the driver's Lease, which alone carries it out. ``workers``: of a scale."""

    model_config = ConfigDict(frozen=True)

    version: Literal[1] = 1
    nonce: _Nonce
    driver: _Nonce
    wish: WishKind
    workers: int | None = Field(None, ge=1)
    made_at_utc: str = ""
    made_by: str = ""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if (self.wish == "scale") != (self.workers is not None):
            raise ValueError("workers belong to a scale, and to nothing else")
        return self


class Reply(BaseModel):
    """``taken``: read, nothing done yet; ``accepted``: being carried out; ``refused`` and ``done`` are final."""

    model_config = ConfigDict(frozen=True)

    version: Literal[1] = 1
    nonce: _Nonce
    driver: _Nonce
    state: ReplyState
    reason: str = ""
    step: int | None = None

    @property
    def is_final(self) -> bool:
        return self.state in FINAL_STATES


def read_reply(store: ObjectStore, nonce: str, *, deadline_s: float = _DEADLINE_S) -> Reply | None:
    """The newest reply to a request; None while there is none that can be read."""
    try:
        return Reply.model_validate_json(store.get(reply_key(nonce), deadline_s=deadline_s))
    except (ObjectMissing, ValidationError):
        return None


class RequestDesk:
    """The driver's side, on a thread of its own: `take` and `answer` never wait for the store."""

    def __init__(
        self,
        store: ObjectStore,
        driver: str,
        *,
        interval_s: float = 1.0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._driver = driver
        self._interval_s = interval_s
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._taken: deque[Request] = deque()
        self._unsent: dict[str, Reply] = {}
        self._known: dict[str, None] = {}  # dealt with, one way or the other; the oldest are forgotten
        self._answered_at_s: dict[str, float] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="request-desk", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Send the last answers, but wait for no store that is away."""
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=_CLOSE_S)

    def take(self) -> tuple[Request, ...]:
        """Requests that came since the last call, each once."""
        with self._lock:
            taken = tuple(self._taken)
            self._taken.clear()
            return taken

    def answer(self, nonce: str, state: ReplyState, reason: str = "", step: int | None = None) -> None:
        """Say how a request stands; the newest word of each is what its maker reads."""
        reply = Reply(nonce=nonce, driver=self._driver, state=state, reason=reason, step=step)
        with self._lock:
            self._unsent[nonce] = reply

    def look(self) -> None:
        """One round: answers out, new requests in, old ones away. Raises StorageError."""
        self._send()
        listed = self._store.list(CONTROL, deadline_s=_DEADLINE_S)
        sizes = {nonce: entry.size for entry in listed if (nonce := parse_request_key(entry.key)) is not None}
        for nonce, num_bytes in sizes.items():
            with self._lock:
                is_full = len(self._taken) >= _MAX_WAITING
            if nonce not in self._known and not is_full and num_bytes <= _MAX_BYTES:
                self._deal_with(nonce)
        for entry in listed:
            answered = parse_reply_key(entry.key)
            if answered is not None and answered not in sizes:  # its request is gone, perhaps its driver too
                self._answered_at_s.setdefault(answered, self._monotonic())
        self._remove_old()

    def _run(self) -> None:
        while True:
            is_last = self._closed.wait(self._interval_s)
            try:
                if is_last:
                    self._send()
                    return
                self.look()
            except StorageError as error:
                _log.debug("requests cannot be looked for: %s", error)
                if is_last:
                    return
            except Exception:  # noqa: BLE001 - outer edge of the thread: a Run is not ended by what someone put beside it
                _log.exception("requests could not be looked at")
                if is_last:
                    return

    def _send(self) -> None:
        with self._lock:
            unsent = dict(self._unsent)
        for nonce, reply in unsent.items():
            self._put(reply)
            with self._lock:
                if self._unsent.get(nonce) is reply:
                    del self._unsent[nonce]

    def _put(self, reply: Reply) -> None:
        self._store.put(reply_key(reply.nonce), reply.model_dump_json().encode(), deadline_s=_DEADLINE_S)
        if reply.is_final:
            self._answered_at_s.setdefault(reply.nonce, self._monotonic())

    def _deal_with(self, nonce: str) -> None:
        """Take a request that nobody has answered, answer one that is not for this driver."""
        # Asked for by name: a store that lists late may not list the reply yet, and nothing is to be done twice.
        earlier = read_reply(self._store, nonce)
        if earlier is not None:
            self._settle_earlier(earlier)
            return
        request = self._read(nonce)
        if request is None:
            return
        if request.driver != self._driver:
            self._refuse(nonce, f"it was made for driver {request.driver}, which is gone: ask again")
            return
        self._put(Reply(nonce=nonce, driver=self._driver, state="taken"))
        # Its maker withdraws it and then looks for a reply: one of the two sees the other.
        if self._read(nonce) is None:
            self._refuse(nonce, "it was withdrawn before it was taken")
            return
        self._know(nonce)
        with self._lock:
            self._taken.append(request)

    def _settle_earlier(self, earlier: Reply) -> None:
        if earlier.is_final:
            self._know(earlier.nonce)
            self._answered_at_s.setdefault(earlier.nonce, self._monotonic())
        elif earlier.driver != self._driver:
            self._refuse(earlier.nonce, f"driver {earlier.driver} took it and is gone: look how far it came, ask again")
        else:  # ours, of a put that seemed to fail: nothing was begun
            request = self._read(earlier.nonce)
            self._know(earlier.nonce)
            if request is not None and earlier.state == "taken":
                with self._lock:
                    self._taken.append(request)

    def _refuse(self, nonce: str, reason: str) -> None:
        self._put(Reply(nonce=nonce, driver=self._driver, state="refused", reason=reason))
        self._know(nonce)

    def _read(self, nonce: str) -> Request | None:
        """The request, or None for a file that is withdrawn or is none of ours, which is left alone."""
        key = request_key(nonce)
        try:
            request = Request.model_validate_json(self._store.get(key, deadline_s=_DEADLINE_S))
            if request.nonce != nonce:
                raise ValueError(f"it says that it is {request.nonce}")
            return request
        except ObjectMissing:
            return None
        except ValueError as error:  # pydantic's are too
            _log.warning("%s is left alone, it is no request that this version knows: %s", key, error)
            self._know(nonce)
            return None

    def _know(self, nonce: str) -> None:
        self._known[nonce] = None
        while len(self._known) > _REMEMBERED:
            del self._known[next(iter(self._known))]

    def _remove_old(self) -> None:
        now = self._monotonic()
        old = [nonce for nonce, at_s in self._answered_at_s.items() if now - at_s > _KEEP_S]
        if old:
            keys = [key for nonce in old for key in (request_key(nonce), reply_key(nonce))]
            self._store.delete(keys, deadline_s=_DEADLINE_S)
        for nonce in old:
            del self._answered_at_s[nonce]

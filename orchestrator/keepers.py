"""The Keepers as the driver sees them: found or started per node, renewed while it lives, let go at the end."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from typing import Any

import ray

from orchestrator.config import RunConfig
from orchestrator.coordinator_actor import coordinator_name
from orchestrator.node_watcher import look
from orchestrator.run_identity import build_digest
from storage.errors import StorageError
from storage.keeper_actor import ensure_keeper
from storage.keeper_protocol import KeeperGreeting, KeeperStatus, TransportAddress

__all__ = ["KEEPER_TTL_S", "KeeperCrew"]

_log = logging.getLogger(__name__)
KEEPER_TTL_S = 120.0
_CLOSE_S = 10.0
_RENEW_EVERY_S = 2.0
_LOOK_S = 0.25  # how long the end of the crew, or a Keeper that was just made, may go unnoticed
_GREET_S = 10.0
_KEY_BYTES = 32
_START_PAUSES_S = (0.0, 2.0, 5.0, 15.0, 60.0)  # before each try to give a node another Keeper


class KeeperCrew:
    """Renews on a thread of its own, so that a busy controller never lets a Keeper expire. A call that each of them
    leaves open tells of its death.

    ``transport_key``: made anew by each driver; Keepers and workers prove themselves to each other with it.
    """

    def __init__(self, run_id: str, config: RunConfig) -> None:
        self._run_id = run_id
        self._config = config
        self._build_digest = build_digest()
        self._lock = threading.Condition()
        self.transport_key = secrets.token_bytes(_KEY_BYTES)
        self._keepers: dict[str, Any] = {}
        self._greetings: dict[str, KeeperGreeting] = {}
        self._statuses: dict[str, KeeperStatus] = {}
        self._ends: dict[Any, tuple[str, Any]] = {}  # open call -> node, Keeper
        self._num_starting = 0
        self._newest_attempt = 0
        self._is_dismissed = self._is_left_behind = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="keeper-renewal", daemon=True)
        self._thread.start()

    def start(self, node_id: str) -> Any:
        """Handle of the node's Keeper; blocks until it answers. Called from the worker group's threads."""
        with self._lock:
            self._num_starting += 1
        try:
            keeper = ensure_keeper(
                node_id=node_id,
                run_id=self._run_id,
                root_url=self._config.run.url,
                config=self._config.checkpoint,
                build_digest=self._build_digest,
                coordinator_name=coordinator_name(self._run_id),
                ttl_s=KEEPER_TTL_S,
                transport_key=self.transport_key,
            )
            greeting = _greet(node_id, keeper)
            with self._lock:
                self._keepers[node_id], self._greetings[node_id] = keeper, greeting
                self._ends[keeper.outlast.remote()] = (node_id, keeper)
                is_too_late = self._is_dismissed
        finally:
            with self._lock:
                self._num_starting -= 1
                self._lock.notify_all()
        if is_too_late:
            _dismiss([keeper])
        return keeper

    def handles(self) -> dict[str, Any]:
        """The Keepers that are known to live, by node."""
        with self._lock:
            return dict(self._keepers)

    def greetings(self) -> dict[str, KeeperGreeting]:
        """What each of them said of itself: its address for peers, and its budget."""
        with self._lock:
            return dict(self._greetings)

    def redirect(self, node_id: str, lost: TransportAddress, address: TransportAddress) -> None:
        """Have the Keeper of ``node_id`` send to ``address`` what it would send to ``lost``."""
        keeper = self.handles().get(node_id)
        if keeper is not None:
            keeper.redirect.remote(lost, address)

    def fence(self, newest_attempt: int) -> None:
        """Attempt ``newest_attempt`` trains: a Keeper without a rank of it, which no worker tells, is not to go on with
        what older ones left to it. Each hears of it with its next renewal."""
        with self._lock:
            self._newest_attempt = max(self._newest_attempt, newest_attempt)

    def memory_errors(self) -> dict[str, str]:
        """Nodes whose newest Snapshot in memory has no replica, and why, as of the last renewal."""
        with self._lock:
            return {node: status.memory_error for node, status in self._statuses.items() if status.memory_error}

    def leave_behind(self) -> None:
        """The same Run will go on with another driver, from what the Keepers hold: `close` ends none of them, and they
        expire if nobody comes."""
        with self._lock:
            self._is_left_behind = True

    def close(self) -> None:
        """The Run is over for this driver: Keepers remove their memory and end, those that are just starting too.
        The unreachable ones expire."""
        self._closed.set()
        self._thread.join(timeout=_CLOSE_S)
        with self._lock:
            self._lock.wait_for(lambda: self._num_starting == 0, timeout=_CLOSE_S)
            self._is_dismissed = not self._is_left_behind
            keepers = list(self._keepers.values()) if self._is_dismissed else []
        _dismiss(keepers)

    def _renew(self) -> None:
        while not self._closed.is_set():
            try:
                self._renew_all()
            except Exception as error:  # noqa: BLE001 - outer edge of the thread: without it every Keeper would expire
                _log.warning("Keepers are not renewed for now: %s: %s", type(error).__name__, error)
                self._closed.wait(_RENEW_EVERY_S)

    def _renew_all(self) -> None:
        """Renew each once, then listen until the next renewal is due. Nobody's silence delays word of another."""
        until = time.monotonic() + _RENEW_EVERY_S
        with self._lock:
            newest = self._newest_attempt
        keepers = self.handles().items()
        asked = {keeper.renew.remote(KEEPER_TTL_S, newest): (node_id, keeper) for node_id, keeper in keepers}
        while not self._closed.is_set() and (left_s := until - time.monotonic()) > 0:
            with self._lock:
                refs = [*asked, *self._ends]
            pause_s = min(_LOOK_S, left_s)
            if not refs:
                self._closed.wait(pause_s)
                continue
            ready, _ = ray.wait(refs, num_returns=1, timeout=pause_s)
            for ref in ready:
                with self._lock:
                    node_id, keeper = (asked if ref in asked else self._ends).pop(ref)
                self._take(node_id, keeper, ref)

    def _take(self, node_id: str, keeper: Any, ref: Any) -> None:
        """A Keeper was renewed, or has died, or cannot be reached; or its open call is over: somebody attends to it."""
        try:
            status: KeeperStatus | None = ray.get(ref)
        except ray.exceptions.ActorDiedError:
            self._replace(node_id, keeper)
        except ray.exceptions.RayError as error:
            _log.debug("no word from the Keeper of node %s: %s", node_id[:12], type(error).__name__)
        else:
            if status is not None:
                self._note(node_id, status)

    def _note(self, node_id: str, status: KeeperStatus) -> None:
        with self._lock:
            keeper = self._keepers.get(node_id)
            if keeper is None:
                return
            self._statuses[node_id] = status
            if not any(keeper is known for _, known in self._ends.values()):
                self._ends[keeper.outlast.remote()] = (node_id, keeper)

    def _replace(self, node_id: str, dead: Any) -> None:
        """A Keeper died. On a node that lives another takes its place; workers find it by its name."""
        with self._lock:
            if self._keepers.get(node_id) is not dead:
                return
            for known in (self._keepers, self._greetings, self._statuses):
                known.pop(node_id, None)
        threading.Thread(target=self._start_again, args=(node_id,), name="keeper-replacement", daemon=True).start()

    def _start_again(self, node_id: str) -> None:
        """A few tries: the first may meet a head that is away, or what made the last one die."""
        for pause_s in _START_PAUSES_S:
            if self._closed.wait(pause_s) or node_id in self.handles():
                return
            try:
                if node_id not in look().living():
                    return
                _log.warning("the Keeper of node %s died: another one is started", node_id[:12])
                self.start(node_id)
            except Exception as error:  # noqa: BLE001 - outer edge of the thread; there is another try
                _log.warning("node %s has no Keeper: %s: %s", node_id[:12], type(error).__name__, error)
            else:
                return


def _greet(node_id: str, keeper: Any) -> KeeperGreeting:
    try:
        greeting: KeeperGreeting = ray.get(keeper.greet.remote(), timeout=_GREET_S)
    except ray.exceptions.RayError as error:
        raise StorageError(f"node {node_id}: its Keeper does not greet: {type(error).__name__}") from error
    return greeting


def _dismiss(keepers: list[Any]) -> None:
    refs = [keeper.close.remote() for keeper in keepers]
    if refs:
        ray.wait(refs, num_returns=len(refs), timeout=_CLOSE_S)
    for keeper in keepers:
        ray.kill(keeper, no_restart=True)

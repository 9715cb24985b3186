"""The Keepers as the driver sees them: found or started per node, renewed while it lives, let go at the end."""

from __future__ import annotations

import logging
import threading
from typing import Any

import ray

from orchestrator.config import RunConfig
from orchestrator.coordinator_actor import coordinator_name
from orchestrator.node_watcher import look
from orchestrator.run_identity import build_digest
from storage.errors import StorageError
from storage.keeper_actor import ensure_keeper

__all__ = ["KEEPER_TTL_S", "KeeperCrew"]

_log = logging.getLogger(__name__)
KEEPER_TTL_S = 120.0
_CLOSE_S = 10.0
_RENEW_EVERY_S = 2.0


class KeeperCrew:
    """Renews on a thread of its own, so that a busy controller never lets a Keeper expire."""

    def __init__(self, run_id: str, config: RunConfig) -> None:
        self._run_id = run_id
        self._config = config
        self._build_digest = build_digest()
        self._lock = threading.Condition()
        self._keepers: dict[str, Any] = {}
        self._num_starting = 0
        self._is_dismissed = False
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
            )
            with self._lock:
                self._keepers[node_id] = keeper
                is_too_late = self._is_dismissed
        finally:
            with self._lock:
                self._num_starting -= 1
                self._lock.notify_all()
        if is_too_late:
            _dismiss([keeper])
        return keeper

    def close(self) -> None:
        """The Run is over for this driver: Keepers remove their memory and end, those that are just starting too.
        The unreachable ones expire."""
        self._closed.set()
        self._thread.join(timeout=_CLOSE_S)
        with self._lock:
            self._lock.wait_for(lambda: self._num_starting == 0, timeout=_CLOSE_S)
            self._is_dismissed = True
            keepers = list(self._keepers.values())
        _dismiss(keepers)

    def _renew(self) -> None:
        while not self._closed.wait(_RENEW_EVERY_S):
            with self._lock:
                keepers = dict(self._keepers)
            refs = {keeper.renew.remote(KEEPER_TTL_S): node_id for node_id, keeper in keepers.items()}
            ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=_RENEW_EVERY_S) if refs else ([], [])
            for ref in ready:
                try:
                    ray.get(ref)
                except ray.exceptions.ActorDiedError:
                    self._replace(refs[ref], keepers[refs[ref]])
                except ray.exceptions.RayError as error:
                    _log.debug("Keeper of node %s was not renewed: %s", refs[ref][:12], type(error).__name__)

    def _replace(self, node_id: str, dead: Any) -> None:
        """A Keeper died. On a node that lives another takes its place; workers find it by its name."""
        with self._lock:
            if self._keepers.get(node_id) is not dead:
                return
            del self._keepers[node_id]
        if node_id not in look().living():
            return
        _log.warning("the Keeper of node %s died: another one is started", node_id[:12])
        threading.Thread(target=self._start_again, args=(node_id,), name="keeper-replacement", daemon=True).start()

    def _start_again(self, node_id: str) -> None:
        try:
            self.start(node_id)
        except (StorageError, ray.exceptions.RayError) as error:
            _log.warning("node %s has no Keeper any more: %s", node_id[:12], error)


def _dismiss(keepers: list[Any]) -> None:
    refs = [keeper.close.remote() for keeper in keepers]
    if refs:
        ray.wait(refs, num_returns=len(refs), timeout=_CLOSE_S)
    for keeper in keepers:
        ray.kill(keeper, no_restart=True)

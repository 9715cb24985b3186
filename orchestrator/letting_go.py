"""Lets go of actors and placement groups on threads of its own: Ray may take long over what is dead already, and who
regroups must not wait for that."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import ray

from orchestrator.placement import NodePlacement

__all__ = ["LettingGo"]

_log = logging.getLogger(__name__)
_THREADS = 4
_SLOW_S = 1.0


class LettingGo:
    """Every call returns at once; what it began is done soon, and is waited for by `close`."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="let-go")
        self._pending: set[Future[None]] = set()

    def kill(self, actor: Any) -> None:
        self._begin(f"actor {actor}", lambda: ray.kill(actor, no_restart=True))

    def remove(self, placement: NodePlacement) -> None:
        self._begin(f"placement group of node {placement.node_id[:12]}", placement.remove)

    def close(self, timeout_s: float) -> None:
        """Wait until all is let go, at most ``timeout_s``: what is left then goes with the driver."""
        _, late = wait(self._pending, timeout=timeout_s)
        if late:
            _log.warning("%d actors and placement groups were not let go within %g s", len(late), timeout_s)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _begin(self, what: str, call: Callable[[], None]) -> None:
        self._pending = {future for future in self._pending if not future.done()}
        self._pending.add(self._threads.submit(_logged, what, call))


def _logged(what: str, call: Callable[[], None]) -> None:
    if not ray.is_initialized():
        return
    began = time.monotonic()
    try:
        call()
    except Exception as error:  # noqa: BLE001 - outer edge of the thread; it goes with the driver at the latest
        _log.warning("%s was not let go: %s: %s", what, type(error).__name__, error)
    took_s = time.monotonic() - began
    if took_s > _SLOW_S:
        _log.debug("letting %s go took %.1f s", what, took_s)

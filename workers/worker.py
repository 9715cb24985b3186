"""The worker as a Ray actor, one per accelerator: a thin shell round WorkerProcess that turns handles into ports.

It also installs this process's log output. Everything else it does is `workers.worker_process`'s. The driver imports
this file to make the actor, and a driver does not load torch: whatever needs torch is imported inside the actor.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError, RayTaskError

from storage.keeper_actor import KeeperClient, keeper_name
from storage.keys import Attempt
from workers.chaos_seam import CHAOS_DIRECTORY_VARIABLE, open_seam
from workers.contract import (
    AbandonReport,
    AttemptSpec,
    ExchangeReply,
    ExchangeRequest,
    Heartbeat,
    Outcome,
    WorkerFacts,
)
from workers.errors import CoordinatorUnavailable
from workers.lifeline import Lifeline, LifelineSpec, Role
from workers.settings import WorkerSettings

if TYPE_CHECKING:
    from workers.session import Session

__all__ = ["ExchangeClient", "WorkerActor", "create_worker"]

_MAX_CALLS = 8
"""Calls that may run side by side: outcome waits, an abandon, and heartbeats that must never queue behind them."""
_EXCHANGE_S = 10.0


class ExchangeClient:
    """The coordinator's actor handle as a CoordinatorPort: one exchange after another."""

    def __init__(self, handle: Any, timeout_s: float = _EXCHANGE_S) -> None:
        self._handle, self._timeout_s = handle, timeout_s

    def exchange(self, request: ExchangeRequest) -> ExchangeReply:
        try:
            reply: ExchangeReply = ray.get(self._handle.exchange.remote(request), timeout=self._timeout_s)
        except RayTaskError:
            raise  # a fault inside the coordinator: asking again would meet it again
        except RayError as error:
            raise CoordinatorUnavailable(
                f"no answer from the coordinator within {self._timeout_s:g} s: {type(error).__name__}: {error}"
            ) from error
        return reply


@ray.remote(max_restarts=0)
class WorkerActor:
    """See WorkerProcess: each method is its namesake. ``keeper`` and ``coordinator`` are actor handles."""

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        worker_id: str,
        node_id: str,
        keeper: Any,
        train_loop: Callable[[Session], None] | None = None,
        log_level: str = "INFO",
        lifeline: LifelineSpec | None = None,
    ) -> None:
        self._lifeline = (
            None if lifeline is None else Lifeline(lifeline, role=Role.WORKER, name=worker_id, node_id=node_id)
        )
        # What the imports make stays; looking through it again and again is a fifth of a worker's start.
        gc.disable()
        from workers.worker_process import WorkerProcess  # loads torch: here, never in the driver that names this class

        logging.basicConfig(level=log_level, format=f"%(asctime)s %(levelname)s {worker_id} %(name)s: %(message)s")
        if CHAOS_DIRECTORY_VARIABLE in os.environ:
            open_seam(os.environ[CHAOS_DIRECTORY_VARIABLE])
        self._process = WorkerProcess(
            settings,
            worker_id=worker_id,
            node_id=node_id,
            keeper=KeeperClient(keeper, name=keeper_name(settings.run_id, node_id)),
            train_loop=train_loop,
        )

    def prepare(self) -> WorkerFacts:
        try:
            return self._process.prepare()
        finally:
            gc.enable()

    def start(self, spec: AttemptSpec, coordinator: Any) -> None:
        self._process.start(spec, ExchangeClient(coordinator))

    def wait_outcome(self, attempt: Attempt, timeout_s: float) -> Outcome | None:
        return self._process.wait_outcome(attempt, timeout_s)

    def heartbeat(self) -> Heartbeat:
        return self._process.heartbeat()

    def abandon(self, attempt: Attempt, timeout_s: float) -> AbandonReport:
        return self._process.abandon(attempt, timeout_s)

    def close(self) -> None:
        self._process.close()


def create_worker(
    settings: WorkerSettings,
    *,
    worker_id: str,
    node_id: str,
    keeper: Any,
    train_loop: Callable[[Session], None] | None = None,
    log_level: str = "INFO",
    options: Mapping[str, Any] | None = None,
    lifeline: LifelineSpec | None = None,
) -> Any:
    """Handle of a new worker actor. ``options`` (resources, placement) are Ray's; concurrency is set here."""
    return WorkerActor.options(**(options or {}), max_concurrency=_MAX_CALLS).remote(  # type: ignore[attr-defined]
        settings,
        worker_id=worker_id,
        node_id=node_id,
        keeper=keeper,
        train_loop=train_loop,
        log_level=log_level,
        lifeline=lifeline,
    )

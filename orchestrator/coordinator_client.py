"""The coordinator as the controller sees it: each remote call with its own deadline."""

from __future__ import annotations

from typing import Any

import ray

from orchestrator.save_facts import ClusterFacts
from orchestrator.signals import Signal
from storage.keys import Attempt, StepKey
from storage.sources import RestorePlan
from workers.contract import OrderKind

__all__ = ["CoordinatorClient"]

_CALL_S = 30.0  # control calls answer in milliseconds; past this the coordinator is gone
_STORE_S = 600.0  # calls that read the store: listings, manifests, retries included


class CoordinatorClient:
    """Wraps the actor handle. Raises ray's errors when the coordinator is gone: the driver then ends."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def begin_attempt(self, attempt: Attempt, world_size: int, base_step: int, durable_step: int | None = None) -> None:
        ray.get(self.actor.begin_attempt.remote(attempt, world_size, base_step, durable_step), timeout=_CALL_S)

    def tell_cluster(self, facts: ClusterFacts) -> None:
        ray.get(self.actor.tell_cluster.remote(facts), timeout=_CALL_S)

    def submit_leave(self, reason: str, kind: OrderKind = OrderKind.LEAVE) -> int:
        return int(ray.get(self.actor.submit_leave.remote(reason, kind), timeout=_CALL_S))

    def submit_snapshot(self, reason: str) -> int:
        return int(ray.get(self.actor.submit_snapshot.remote(reason), timeout=_CALL_S))

    def drain_signals(self) -> tuple[Signal, ...]:
        signals: tuple[Signal, ...] = ray.get(self.actor.drain_signals.remote(), timeout=_CALL_S)
        return signals

    def wait_settled(self, step: int | None, timeout_s: float) -> bool:
        return bool(ray.get(self.actor.wait_settled.remote(step, timeout_s), timeout=timeout_s + _CALL_S))

    def has_committed(self, step: int) -> bool:
        return bool(ray.get(self.actor.has_committed.remote(step), timeout=_CALL_S))

    def pending(self) -> dict[int, tuple[int, ...]]:
        pending: dict[int, tuple[int, ...]] = ray.get(self.actor.pending.remote(), timeout=_CALL_S)
        return pending

    def choose_plan(
        self, attempt: Attempt, step: int | None, allow_partial: bool, url: str | None
    ) -> RestorePlan | None:
        ref = self.actor.choose_plan.remote(attempt, step, allow_partial, url)
        plan: RestorePlan | None = _answer(ref)
        return plan

    def check_store(self) -> None:
        """Raises StoreUnavailable."""
        _answer(self.actor.check_store.remote())

    def quarantine(self, key: StepKey, object_key: str, reason: str, url: str | None) -> None:
        _answer(self.actor.quarantine.remote(key, object_key, reason, url))

    def close(self) -> None:
        ray.get(self.actor.close.remote(), timeout=_STORE_S)


def _answer(ref: Any) -> Any:
    """The result of a call that asks the store; its error as it was raised there."""
    try:
        return ray.get(ref, timeout=_STORE_S)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None if isinstance(error.cause, Exception) else error

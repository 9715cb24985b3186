"""The coordinator as a Ray actor on the driver's node: a thin, threaded shell.

Its name is the Run's, so a second driver on the same cluster finds the name taken and is refused. It dies with its
driver.
"""

from __future__ import annotations

import gc
import logging
import time
from datetime import UTC, datetime
from typing import Any

import ray
from pydantic import JsonValue

from orchestrator.committer import Committer
from orchestrator.coordinator import Coordinator
from orchestrator.patient_store import PatientStore
from orchestrator.save_config import SavePolicyConfig
from orchestrator.save_facts import ClusterFacts
from orchestrator.signals import Signal
from storage.config import CheckpointConfig
from storage.keys import Attempt, StepKey
from storage.manifest import Receipt
from storage.open_store import open_store
from storage.sources import RestorePlan
from workers.contract import ExchangeReply, ExchangeRequest, OrderKind

__all__ = ["MAX_CALLS", "CoordinatorActor", "CoordinatorShell", "coordinator_name", "utc_now"]

_ANSWER_S = 10.0  # records are small: a store that takes longer is as good as away
_GRACE_S = 60.0  # a Commit outlasts checkpoint.max_outage_s by this: it is the controller that ends the Run
_GC_OBJECTS = 50_000
MAX_CALLS = 64  # concurrent calls: Keepers, rank 0, the controller's waits


def coordinator_name(run_id: str) -> str:
    """The named actor that stands for "this Run is being driven"."""
    return f"raysume-coordinator-{run_id}"


def utc_now() -> str:
    """Wall-clock time in UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class CoordinatorShell:
    """See orchestrator.coordinator.Coordinator: each method is its namesake."""

    def __init__(
        self,
        *,
        run_id: str,
        root_url: str,
        config: CheckpointConfig,
        policy: SavePolicyConfig,
        total_steps: int,
        metadata: dict[str, JsonValue],
        owner: str,
    ) -> None:
        self._owner = owner
        # Ray shows this process's warnings on the driver's terminal, where an outage is said once, as an event.
        logging.getLogger("storage.retrying").setLevel(logging.ERROR)
        # A message of Receipts is thousands of small objects that are gone a moment later: looking for cycles among
        # them, and again among all of Ray's and ours, took four fifths of the time to receive it.
        gc.freeze()
        gc.set_threshold(_GC_OBJECTS, 20, 20)
        # Few tries in one call: an outage is noticed soon, and who outlasts it is decided above.
        few_tries = config.store.model_copy(update={"retries": min(1, config.store.retries)})
        store = PatientStore(
            open_store(root_url, few_tries),
            limit_s=config.max_outage_s + _GRACE_S,
            deadline_s=min(_ANSWER_S, config.store.deadline_s),
        )
        committer = Committer(
            run_id=run_id,
            store=store,
            config=config,
            metadata=metadata,
            now_utc=utc_now,
            monotonic=time.monotonic,
        )
        self._coordinator = Coordinator(
            committer=committer,
            store=store,
            config=config,
            policy=policy,
            total_steps=total_steps,
            monotonic=time.monotonic,
        )

    def owner(self) -> str:
        """The driver this coordinator belongs to, in words."""
        return self._owner

    def begin_attempt(self, attempt: Attempt, world_size: int, base_step: int, durable_step: int | None = None) -> None:
        self._coordinator.begin_attempt(attempt, world_size=world_size, base_step=base_step, durable_step=durable_step)

    def tell_cluster(self, facts: ClusterFacts) -> None:
        self._coordinator.tell_cluster(facts)

    def submit_leave(self, reason: str, kind: OrderKind = OrderKind.LEAVE) -> int:
        return self._coordinator.submit_leave(reason, kind)

    def submit_snapshot(self, reason: str) -> int:
        return self._coordinator.submit_snapshot(reason)

    def drain_signals(self) -> tuple[Signal, ...]:
        return self._coordinator.drain_signals()

    def wait_settled(self, step: int | None, timeout_s: float) -> bool:
        return self._coordinator.wait_settled(step, timeout_s)

    def has_committed(self, step: int) -> bool:
        return self._coordinator.has_committed(step)

    def pending(self) -> dict[int, tuple[int, ...]]:
        return self._coordinator.pending()

    def choose_plan(
        self, attempt: Attempt, step: int | None, allow_partial: bool, url: str | None
    ) -> RestorePlan | None:
        return self._coordinator.choose_plan(attempt, step, allow_partial, url)

    def check_store(self) -> None:
        self._coordinator.check_store()

    def quarantine(self, key: StepKey, object_key: str, reason: str, url: str | None) -> None:
        self._coordinator.quarantine(key, object_key, reason, url)

    def exchange(self, request: ExchangeRequest) -> ExchangeReply:
        return self._coordinator.exchange(request)

    def deliver(self, receipt: Receipt) -> bool:
        return self._coordinator.deliver(receipt)

    def deliver_many(self, receipts: tuple[Receipt, ...]) -> tuple[bool, ...]:
        return self._coordinator.deliver_many(receipts)

    def report_delayed(self, attempt: Attempt, step: int, rank: int, reason: str, failing_for_s: float) -> bool:
        return self._coordinator.report_delayed(attempt, step, rank, reason, failing_for_s)

    def report_failed(self, attempt: Attempt, step: int, rank: int, reason: str) -> bool:
        return self._coordinator.report_failed(attempt, step, rank, reason)

    def close(self) -> None:
        self._coordinator.close()


CoordinatorActor: Any = ray.remote(CoordinatorShell)

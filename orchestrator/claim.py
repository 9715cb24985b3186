"""Claims a Run within one cluster: the coordinator's actor name can be taken once, and goes with its driver.

Across clusters the Lease in the store detects and fences (storage.lease).
"""

from __future__ import annotations

import time
from typing import Any

import ray

from orchestrator.config import RunConfig
from orchestrator.coordinator_actor import MAX_CALLS, CoordinatorActor, coordinator_name
from orchestrator.placement import on_node
from orchestrator.run_identity import metadata_of
from storage.errors import LeaseHeld
from storage.keeper_actor import NAMESPACE

__all__ = ["claim_run"]

CLAIM_S = 8.0  # a driver killed a moment ago leaves its actors for a second or two
_OWNER_S = 2.0


def claim_run(run_id: str, config: RunConfig, owner: str) -> Any:
    """Create the coordinator under the Run's name. Raises LeaseHeld while another living driver has it."""
    name = coordinator_name(run_id)
    deadline = time.monotonic() + CLAIM_S
    while True:
        try:
            actor = CoordinatorActor.options(
                name=name,
                namespace=NAMESPACE,
                num_cpus=0,
                max_concurrency=MAX_CALLS,
                max_restarts=0,
                scheduling_strategy=on_node(ray.get_runtime_context().get_node_id()),
            ).remote(
                run_id=run_id,
                root_url=config.run.url,
                config=config.checkpoint,
                policy=config.policy,
                total_steps=config.run.steps,
                metadata=metadata_of(config),
                owner=owner,
            )
        except ValueError:
            if time.monotonic() >= deadline:
                raise LeaseHeld(run_id, _owner_of(name)) from None
            time.sleep(0.25)
            continue
        ray.get(actor.owner.remote(), timeout=60.0)
        return actor


def _owner_of(name: str) -> str:
    try:
        return str(ray.get(ray.get_actor(name, namespace=NAMESPACE).owner.remote(), timeout=_OWNER_S))
    except (ValueError, ray.exceptions.RayError):
        return "unknown"

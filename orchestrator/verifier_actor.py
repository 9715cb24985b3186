"""The verifier as a Ray actor in a process of its own on the driver's node: a thin shell that begins by being nice.

It dies with its driver. torch is loaded when the first Checkpoint is to be loaded, never in the driver.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import ray

from orchestrator.coordinator_actor import utc_now
from orchestrator.placement import on_node
from orchestrator.verifier import Verdict, Verifier
from orchestrator.verifier_policy import shards_at_once
from orchestrator.verifier_watch import VerifierLost, load_per_core
from storage.errors import StorageError
from storage.keys import StepKey
from storage.open_store import open_store
from workers.load_finding import LoadPort
from workers.settings import WorkerSettings

__all__ = ["VerifierClient", "spawn_verifier", "why_digests_alone"]

_log = logging.getLogger(__name__)
_NICE = 19
_LOOK_S = 120.0


def why_digests_alone(settings: WorkerSettings, *, has_own_loop: bool) -> str | None:
    """Why nothing is loaded, or None where it is."""
    if settings.checkpoint.verify == "digests":
        return "checkpoint.verify is digests"
    if has_own_loop or not settings.model.config:
        return "the model or the loop is the user's own, which only that loop can build"
    return None


class _VerifierShell:
    """See `Verifier`: each method is its namesake."""

    def __init__(self, settings: WorkerSettings, root_url: str, *, no_load: str | None, log_level: str) -> None:
        os.nice(_NICE)
        logging.basicConfig(level=log_level, format="%(asctime)s %(levelname)s verifier %(name)s: %(message)s")
        store = open_store(root_url, settings.checkpoint.store)
        open_load: Callable[[], LoadPort] | str = no_load or (lambda: _load_checker(settings))
        self._verifier = Verifier(
            store,
            settings.run_id,
            open_load=open_load,
            now_utc=utc_now,
            at_once=lambda: shards_at_once(settings.checkpoint, load_per_core=load_per_core()),
        )

    def unverified(self) -> dict[StepKey, int]:
        return self._verifier.unverified()

    def verify(self, key: StepKey) -> Verdict | None:
        return self._verifier.verify(key)


VerifierActor = ray.remote(_VerifierShell)


def _load_checker(settings: WorkerSettings) -> LoadPort:
    from workers.verification import LoadChecker  # loads torch: here, never in the driver that names this class

    return LoadChecker(settings)


class VerifierClient:
    """The actor's handle as a VerifierPort."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def unverified(self) -> dict[StepKey, int]:
        found: dict[StepKey, int] = self._answer(self._actor.unverified.remote(), _LOOK_S)
        return found

    def verify(self, key: StepKey, timeout_s: float) -> Verdict | None:
        verdict: Verdict | None = self._answer(self._actor.verify.remote(key), timeout_s)
        return verdict

    def kill(self) -> None:
        if not ray.is_initialized():
            return
        try:
            ray.kill(self._actor, no_restart=True)
        except ray.exceptions.RayError as error:  # the cluster is going: it takes its actors along
            _log.debug("the verifier could not be ended: %s", error)

    def _answer(self, ref: Any, timeout_s: float) -> Any:
        try:
            return ray.get(ref, timeout=timeout_s)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, StorageError):
                raise error.cause from None
            raise VerifierLost(f"{type(error.cause).__name__}: {error.cause}") from error
        except ray.exceptions.RayError as error:
            raise VerifierLost(f"no answer within {timeout_s:g} s: {type(error).__name__}: {error}") from error


def spawn_verifier(settings: WorkerSettings, root_url: str, *, no_load: str | None, log_level: str) -> VerifierClient:
    """A new actor on this node, beside the driver. It takes no CPU from what Ray hands out."""
    options = {
        "num_cpus": 0,
        "max_restarts": 0,
        "max_concurrency": 1,
        "scheduling_strategy": on_node(ray.get_runtime_context().get_node_id()),
    }
    actor = VerifierActor.options(**options).remote(settings, root_url, no_load=no_load, log_level=log_level)
    return VerifierClient(actor)

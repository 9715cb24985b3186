"""Makes the background verification of one driver out of its parts."""

from __future__ import annotations

from functools import partial

from orchestrator.coordinator_client import CoordinatorClient
from orchestrator.recorder import Recorder
from orchestrator.verifier_actor import spawn_verifier, why_digests_alone
from orchestrator.verifier_watch import VerifierWatch
from storage.keys import StepKey
from workers.settings import WorkerSettings

__all__ = ["make_verifier"]


def make_verifier(
    settings: WorkerSettings,
    root_url: str,
    *,
    recorder: Recorder,
    coordinator: CoordinatorClient,
    has_own_loop: bool,
    log_level: str,
) -> VerifierWatch:
    """Told every Signal from now on; to be started, and closed with the driver."""
    no_load = why_digests_alone(settings, has_own_loop=has_own_loop)

    def quarantine(key: StepKey, object_key: str, reason: str) -> None:
        coordinator.quarantine(key, object_key, reason, None)

    watch = VerifierWatch(
        settings.checkpoint,
        spawn=partial(spawn_verifier, settings, root_url, no_load=no_load, log_level=log_level),
        emit=recorder.emit,
        quarantine=quarantine,
        no_load=no_load,
    )
    recorder.listen(watch.on_signal)
    return watch

"""What a chaos schedule needs of the machine and of the configuration, found out before anything is started.

A fault that could not strike is refused here with the reason, so that no schedule passes for having done nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from orchestrator.chaos import ChaosAction, ChaosVerb, check_targets
from orchestrator.chaos_disk import why_no_disks
from orchestrator.config import RunConfig
from orchestrator.errors import ChaosSpecError
from orchestrator.local_cluster import Fittings
from orchestrator.netns import why_no_networks
from orchestrator.scaling_policy import refuse_size

__all__ = ["check_schedule", "fittings_for", "store_endpoint"]

_DISK_MARGIN_BYTES = 256 << 20
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")


def check_schedule(actions: Sequence[ChaosAction], config: RunConfig, num_nodes: int) -> None:
    """Raise ChaosSpecError for the first action that cannot happen."""
    check_targets(actions, num_nodes)
    for action in actions:
        why = _why_not(action, config)
        if why is not None:
            raise ChaosSpecError(str(action), why)


def fittings_for(actions: Sequence[ChaosAction], config: RunConfig) -> Fittings:
    """What the local cluster must be given so that every action can happen."""
    verbs = {action.verb for action in actions}
    disk_bytes = config.checkpoint.local_disk.keep_free_bytes + _DISK_MARGIN_BYTES
    return Fittings(
        disk_bytes=disk_bytes if ChaosVerb.DISK_FULL in verbs else None,
        has_seams=ChaosVerb.RAISE_IN_WORKER in verbs,
        has_durable_head=ChaosVerb.RESTART_HEAD in verbs,
        has_own_networks=ChaosVerb.CUT_NODE in verbs,
    )


def store_endpoint(config: RunConfig, environment: Mapping[str, str] = os.environ) -> str | None:
    """The endpoint URL of the run's S3 store; None for other stores and for AWS itself."""
    if not config.run.url.startswith("s3://"):
        return None
    named = (environment.get(name) for name in _ENDPOINT_VARIABLES)
    return config.checkpoint.store.endpoint_url or next((url for url in named if url), None)


def _why_not(action: ChaosAction, config: RunConfig) -> str | None:
    match action.verb:
        case ChaosVerb.STORE_OUTAGE:
            endpoint = store_endpoint(config)
            if endpoint is None or not endpoint.startswith("http://"):
                return (
                    f"an outage is made by a proxy before the store, so run.url must be s3:// with an http:// endpoint "
                    f"(checkpoint.store.endpoint_url); {config.run.url} has {endpoint or 'none'}"
                )
        case ChaosVerb.DISK_FULL:
            if config.checkpoint.local_disk.directory is not None:
                return (
                    "checkpoint.local_disk.directory is set: only the disk that a local node has by default is filled"
                )
            return why_no_disks()
        case ChaosVerb.CUT_NODE:
            return why_no_networks()
        case ChaosVerb.SCALE:
            return refuse_size(action.workers or 0, config.world, config.data.num_leaves)
        case _:
            return None
    return None

"""What the store alone shows to be in a Run's way, said before a cluster is started. Writes nothing.

The driver looks at all of it again once it holds the Run: only its word counts, and what is in doubt is left to it.
"""

from __future__ import annotations

from typing import Final

from orchestrator.config import RunConfig
from orchestrator.data_check import check_datasets
from orchestrator.driver_lease import LEASE_TTL_S
from orchestrator.errors import cannot_start
from orchestrator.resume import parse_resume
from orchestrator.run_identity import find_run_id
from storage.commit_log import CommitLog
from storage.errors import LeaseHeld, StorageError
from storage.lease import Owner
from storage.lease_watch import watch_drivers
from storage.object_store import ObjectStore
from storage.open_store import open_store

__all__ = ["refuse_early"]

_NOBODY: Final = Owner(host="", pid=0, boot_id="")
_POLL_S = 0.5


def refuse_early(config: RunConfig) -> None:
    """Raises LeaseHeld where another driver of this machine holds the Run, and ConfigError where ``run.resume`` cannot
    be meant or a dataset cannot be used; StartOutage where the store does not answer."""
    try:
        store = open_store(config.run.url, config.checkpoint.store)
        run_id = find_run_id(store, config)
        _refuse_second_driver(store, run_id)
        log = CommitLog(store, run_id)
        is_passed_over = _names_a_run(config.run.resume) and bool(log.commits())  # which the driver says
    except LeaseHeld:
        raise
    except StorageError as error:
        raise cannot_start(config.run.url, f"run.url cannot be reached: {error}", error) from error
    if not is_passed_over:
        parse_resume(config, log)
    check_datasets(config)


def _names_a_run(wish: str) -> bool:
    return wish not in ("auto", "none") and not wish.isdigit()


def _refuse_second_driver(store: ObjectStore, run_id: str) -> None:
    """Drivers of other machines are left to the one that is to begin: it has to watch them anyway."""
    if not any(sighting.is_alive for sighting in watch_drivers(store, ttl_s=0)):
        return
    # A pid may have been given to another process since: only a renewal shows that it is the driver.
    for sighting in watch_drivers(store, ttl_s=LEASE_TTL_S, poll_s=_POLL_S, owner=_NOBODY):
        if sighting.is_alive:
            raise LeaseHeld(run_id, str(sighting))

"""Asks the data audit of one run of a drill: that each sample came once an epoch, in order, whatever struck.

The audit itself is `orchestrator.data_audit`'s; here is read what it needs of the run's store.
"""

from __future__ import annotations

from pathlib import Path

from orchestrator.data_record import audit_record, record_of
from orchestrator.event_fields import Event
from orchestrator.work_done import work_done
from storage.commit_log import CommitLog
from storage.errors import StorageError
from storage.open_store import open_store
from workers.ledger import LedgerUnreadable

__all__ = ["audit_run"]


def audit_run(directory: Path, events: list[Event]) -> tuple[str, ...]:
    """What is not proven, each in a line; empty where all is."""
    log = CommitLog(open_store(str(directory)), None)
    try:
        newest = log.latest()
        if newest is None:
            return ("the run has no checkpoint, so nothing is recorded of its samples",)
        record = record_of(log.read_manifest(newest))
        work = work_done([dict(event) for event in events], attempt=record.attempt, step=record.claims.step)
        report = audit_record(record, told=work.chains)
    except (StorageError, LedgerUnreadable, ValueError) as error:
        return (f"{type(error).__name__}: {error}",)
    if report is None:
        return (f"step {newest.step} was saved without a ledger, and its chain is not that of equal batches in order",)
    return tuple(f"steps {one.first_step} to {one.last_step}: {one.text}" for one in report.findings)

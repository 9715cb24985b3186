"""The audit of the data over Receipts as they come from real ranks, before anything is committed."""

from __future__ import annotations

from collections.abc import Iterable

from orchestrator.data_audit import AuditReport
from orchestrator.data_record import audit_record, record_of
from storage.manifest import LedgerRange, Receipt
from storage.merge import merge_receipts
from workers.contract import StepReport

__all__ = ["audit_of"]


def audit_of(receipts: Iterable[Receipt], reports: Iterable[StepReport], step: int) -> AuditReport:
    """Of the save of ``step``; ``reports`` are rank 0's, of the Attempt that made it."""
    told = {report.step: report for report in reports}
    ledger = LedgerRange(position=told[step].position, sample_chain=told[step].sample_chain)
    of_step = [receipt for receipt in receipts if receipt.step == step]
    newest = max(receipt.attempt.number for receipt in of_step)  # a process keeps those of earlier Attempts too
    saved = [receipt for receipt in of_step if receipt.attempt.number == newest]
    manifest = merge_receipts(saved, time_utc="2026-01-01T00:00:00Z", metadata={}, ledger=ledger)
    record = record_of(manifest)
    assert record.ledger is not None, "the state of a real rank has no ledger"
    report = audit_record(record, told={number: one.sample_chain for number, one in told.items()})
    assert report is not None
    return report

"""The RestorePlan that the next Attempt of worker processes would get, made of what they have shipped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from storage.commit_log import CommitLog
from storage.keys import StepKey
from storage.merge import merge_receipts
from storage.open_store import open_store
from storage.sources import RestorePlan, ShardLocation
from tests.fakes.rank_processes import Ended

__all__ = ["plan_for"]


def plan_for(root: Path, ended: Sequence[Ended], step: int) -> RestorePlan:
    """Make the Manifest of ``step``, as the ranks' newest Attempt saved it, and the plan that reads it."""
    attempt = ended[0].outcome.attempt
    receipts = [
        receipt
        for one in ended
        for receipt in one.receipts
        if receipt.step == step and receipt.attempt.value() == attempt
    ]
    manifest = merge_receipts(receipts, time_utc="2026-01-01T00:00:00Z", metadata={}, ledger=None)
    key, num_bytes, digest = CommitLog(open_store(str(root)), "run").write_manifest(manifest)
    return RestorePlan(
        attempt=attempt,
        source=StepKey(step=step, attempt=attempt),
        root_url=str(root),
        manifest_key=key,
        manifest_bytes=num_bytes,
        manifest_digest=digest,
        shards=tuple(
            ShardLocation(rank=shard.rank, tier="object-storage", location=shard.key) for shard in manifest.shards
        ),
    )

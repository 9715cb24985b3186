"""Makes the parts of all ranks of a standalone save one Checkpoint: Manifest, Commit, then retention. Coordinator only.

Knows no torch. A failure after the Commit is logged, for the Checkpoint is real by then.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import JsonValue

from storage.dcp_lineage import Lineage
from storage.errors import CommitRefused, StorageError
from storage.events import utc_text
from storage.manifest import Commit, Manifest, Receipt
from storage.merge import merge_receipts
from storage.presence import check_presence
from storage.retention import choose_deletions
from storage.sweeper import sweep, sweep_orphans, sweep_void

__all__ = ["DCP_STATE", "RankReport", "commit_save"]

logger = logging.getLogger(__name__)

DCP_STATE = "dcp"
"""Where a Manifest keeps plain values, paths and aliases: ``shared_state["dcp"]``, ``rank_states[rank]["dcp"]``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What one rank tells the coordinator of its part. ``aliases``: other names of stored tensors. ``shared_state``
    (of rank 0) and ``rank_state``: further plain sections of the Manifest."""

    receipt: Receipt
    base_step: int
    values: dict[str, JsonValue]
    paths: dict[str, list[str | int]]
    aliases: dict[str, str]
    shared_state: dict[str, JsonValue] = field(default_factory=dict)
    rank_state: dict[str, JsonValue] = field(default_factory=dict)


def commit_save(
    lineage: Lineage,
    reports: Sequence[RankReport],
    *,
    keep: int | None,
    loss: float | None,
    metric: float | None,
    metadata: Mapping[str, JsonValue],
    orphan_grace_s: float,
) -> Commit:
    """Write the Manifest of all ``reports`` and its Commit. Raises CommitRefused or StoreUnavailable."""
    manifest = _merged(reports, metadata)
    log = lineage.log
    try:
        check_presence(lineage.store, manifest.step_key, manifest.shards)
    except CommitRefused as error:
        raise CommitRefused(
            f"{error} in {lineage.store.url}; every rank must be given the same url, of a place that all machines share"
        ) from error
    stored = log.write_manifest(manifest)
    commit = Commit(
        run_id=manifest.run_id,
        step=manifest.step,
        attempt=manifest.attempt,
        base_step=reports[0].base_step,
        time_utc=manifest.time_utc,
        manifest_key=stored.key,
        manifest_bytes=stored.num_bytes,
        manifest_digest=stored.digest,
        stored_bytes=manifest.stored_bytes,
        loss=loss,
        metric=metric,
    )
    log.append(commit)
    logger.info("committed step %d (%s): %d bytes", commit.step, commit.step_key.stem, commit.stored_bytes)
    if keep is not None:
        try:
            _retain(lineage, commit, keep, orphan_grace_s)
        except StorageError as error:
            logger.warning("step %d is committed, deleting older Checkpoints failed: %s", commit.step, error)
    return commit


def _merged(reports: Sequence[RankReport], metadata: Mapping[str, JsonValue]) -> Manifest:
    ordered = sorted(reports, key=lambda report: report.receipt.shard.rank)
    shared, own = _split_values([report.values for report in ordered])
    aliases: dict[str, str] = {}
    paths: dict[str, list[str | int]] = {}
    for report in ordered:
        aliases |= report.aliases
        paths |= report.paths
    state: dict[str, JsonValue] = {
        "values": shared,
        "aliases": dict(aliases),
        "paths": {name: list(path) for name, path in paths.items()},
    }
    receipts = [
        report.receipt.model_copy(
            update={
                "shared_state": {**report.shared_state, DCP_STATE: state} if rank == 0 else None,
                "rank_state": {**report.rank_state, **({DCP_STATE: {"values": values}} if values else {})},
            }
        )
        for rank, (report, values) in enumerate(zip(ordered, own, strict=True))
    ]
    manifest = merge_receipts(
        receipts, time_utc=utc_text(time.time()), metadata={**metadata, "saved_by": "dcp"}, ledger=None
    )
    for alias, name in aliases.items():
        if name not in manifest.tensors or alias in manifest.tensors:
            raise CommitRefused(
                f"step {manifest.step}: {alias} is tied to {name} on some ranks only; tie them on all ranks or on none"
            )
    return manifest


def _split_values(
    by_rank: Sequence[Mapping[str, JsonValue]],
) -> tuple[dict[str, JsonValue], list[dict[str, JsonValue]]]:
    """Values that are the same wherever they exist, and for each rank those that differ between ranks."""
    shared: dict[str, JsonValue] = {}
    differing: set[str] = set()
    for values in by_rank:
        for name, value in values.items():
            if shared.setdefault(name, value) != value:
                differing.add(name)
    own = [{name: value for name, value in values.items() if name in differing} for values in by_rank]
    return {name: value for name, value in shared.items() if name not in differing}, own


def _retain(lineage: Lineage, commit: Commit, keep: int, orphan_grace_s: float) -> None:
    log, live = lineage.log, commit.step_key.attempt
    sweep(lineage.store, log, choose_deletions(log.commits(), keep, None))
    sweep_void(lineage.store, log, live)
    sweep_orphans(
        lineage.store,
        log,
        live,
        seen_at_s=lineage.orphans_seen_at_s,
        grace_s=orphan_grace_s,
        now_s=time.monotonic(),
    )

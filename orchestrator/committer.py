"""The committer: everything the coordinator writes to or asks of the store, in one place without threads or ray.

Order of a Commit: Shards are durable before their Receipts exist; then the Manifest; then, last, the Commit record.
Order of a deletion: see storage.sweeper. All runs on the coordinator's one committer thread, so that nothing is deleted
while a RestorePlan is chosen; what ranks may be reading after that stays until their Attempt commits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from pydantic import JsonValue

from storage.commit_log import CommitLog
from storage.config import CheckpointConfig
from storage.errors import ObjectMissing
from storage.keys import Attempt, StepKey
from storage.manifest import Commit, LedgerRange, Receipt
from storage.merge import StepMerge
from storage.object_store import ObjectStore
from storage.open_store import open_store
from storage.presence import check_presence
from storage.restore import plan_restore
from storage.retention import choose_deletions
from storage.shard_format import itemsize_of
from storage.sources import RestorePlan
from storage.sweeper import sweep, sweep_orphans, sweep_uploads, sweep_void

__all__ = ["CommittedStep", "Committer"]

_log = logging.getLogger(__name__)
_USUAL_KEEP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedStep:
    """``raw_bytes``: of the tensors as they are loaded."""

    key: StepKey
    stored_bytes: int
    raw_bytes: int


class Committer:
    """Owns the Run's CommitLog for one driver."""

    def __init__(
        self,
        *,
        run_id: str,
        store: ObjectStore,
        config: CheckpointConfig,
        metadata: dict[str, JsonValue],
        now_utc: Callable[[], str],
        monotonic: Callable[[], float],
    ) -> None:
        self._run_id = run_id
        self._store = store
        self._config = config
        self._metadata = metadata
        self._now_utc = now_utc
        self._monotonic = monotonic
        self._orphans_seen_at_s: dict[StepKey, float] = {}
        self._log = CommitLog(store, run_id)
        self._reading: tuple[Attempt, StepKey] | None = None
        if config.keep < _USUAL_KEEP:
            _log.warning(
                "checkpoint.keep is %d: with fewer than %d, two damaged Checkpoints may leave none to go on from",
                config.keep,
                _USUAL_KEEP,
            )

    def commit(
        self,
        receipts: StepMerge | Sequence[Receipt],
        *,
        base_step: int,
        loss: float | None,
        metric: float | None,
        ledger: tuple[int, str] | None,
    ) -> CommittedStep:
        """Merge the Receipts of one step, write its Manifest, look that its Shards are there, then write its Commit.

        Raises CommitRefused or StoreUnavailable.
        """
        merge = receipts if isinstance(receipts, StepMerge) else _merged(receipts)
        manifest = merge.manifest(
            time_utc=self._now_utc(),
            metadata=self._metadata,
            ledger=None if ledger is None else LedgerRange(position=ledger[0], sample_chain=ledger[1]),
        )
        key, num_bytes, digest = self._log.write_manifest(manifest)
        check_presence(self._store, manifest.step_key, manifest.shards)
        self._log.append(
            Commit(
                run_id=self._run_id,
                step=manifest.step,
                attempt=manifest.attempt,
                base_step=base_step,
                time_utc=self._now_utc(),
                manifest_key=key,
                manifest_bytes=num_bytes,
                manifest_digest=digest,
                stored_bytes=manifest.stored_bytes,
                loss=loss,
                metric=metric,
            )
        )
        if self._reading is not None and self._reading[0].number <= manifest.attempt.number:
            self._reading = None
        raw_bytes = sum(prod(layout.shape) * itemsize_of(layout.dtype) for layout in manifest.tensors.values())
        label = manifest.step_key.attempt.label
        _log.info("committed step %d of attempt %s: %d bytes", manifest.step, label, manifest.stored_bytes)
        return CommittedStep(key=manifest.step_key, stored_bytes=manifest.stored_bytes, raw_bytes=raw_bytes)

    def retain(self) -> None:
        """Un-commit and delete what retention does not keep. Raises StoreUnavailable."""
        commits = self._log.commits()
        in_use = () if self._reading is None else (self._reading[1],)
        given_up = choose_deletions(commits, self._config.keep, archive_every_h=self._config.archive_every_h)
        sweep(self._store, self._log, [commit for commit in given_up if commit.step_key not in in_use])
        if commits:
            live = commits[-1].step_key.attempt
            sweep_void(self._store, self._log, live, in_use)
            self._sweep_orphans(live)

    def sweep_dead(self, live: Attempt) -> None:
        """At the start of ``live``: what the Attempts before it left unfinished. Raises StoreUnavailable."""
        self._sweep_orphans(live)
        # A Keeper goes on with a failed upload for as long as an outage may last.
        sweep_uploads(self._store, older_than_s=max(self._config.orphan_grace_s, self._config.max_outage_s))

    def _sweep_orphans(self, live: Attempt) -> None:
        sweep_orphans(
            self._store,
            self._log,
            live,
            seen_at_s=self._orphans_seen_at_s,
            grace_s=self._config.orphan_grace_s,
            now_s=self._monotonic(),
        )

    def choose_plan(
        self, attempt: Attempt, step: int | None, allow_partial: bool, url: str | None
    ) -> tuple[RestorePlan | None, list[tuple[StepKey, str, str]]]:
        """The RestorePlan for ``attempt``, and the Checkpoints quarantined while choosing. ``url``: another Run's."""
        log = self._log
        if url is not None:
            log = CommitLog(open_store(url, self._config.store), None)
        before = set(log.quarantined_keys())
        plan = plan_restore(log, attempt=attempt, step=step, allow_partial=allow_partial)
        if plan is not None and url is None:
            self._reading = (attempt, plan.source)
        if plan is None and url is not None:
            raise ObjectMissing("any Checkpoint", url)
        after = log.quarantined()
        found = [(key, record.key, record.reason) for key, record in after.items() if key not in before]
        return plan, found

    def quarantine(self, key: StepKey, object_key: str, reason: str, url: str | None = None) -> None:
        """Never read ``key`` again. ``url``: of another Run, whose record it is then, as it is in `choose_plan`."""
        log = self._log if url is None else CommitLog(open_store(url, self._config.store), None)
        log.quarantine(key, object_key, reason, self._now_utc())


def _merged(receipts: Sequence[Receipt]) -> StepMerge:
    merge = StepMerge()
    for receipt in receipts:
        merge.add(receipt)
    return merge

"""Verifies committed Checkpoints one at a time: every digest, and where it can be done, a load with its probe.

A plain class that a background actor runs. What is found wrong is returned, not quarantined: that is the driver's. A
Checkpoint that went away meanwhile, as retention has it, is no failure.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from storage.commit_log import CommitLog
from storage.errors import CorruptCheckpoint, ManifestMismatch, StorageError
from storage.host_memory import available_bytes
from storage.keys import Attempt, StepKey, new_nonce
from storage.manifest import AttemptRecord, Commit
from storage.object_store import ObjectStore
from storage.restore import plan_of
from storage.verified import Means, VerifiedRecord, verified_keys, write_verified
from storage.verify import SHARDS_AT_ONCE, verify_commit
from workers.load_finding import LoadPort

__all__ = ["Verdict", "Verifier"]

_log = logging.getLogger(__name__)
_MEMORY_SHARE: Final = 0.25  # of the host's free memory: training and page cache have the rest
_PROCESS_BYTES: Final = 512 << 20  # what torch and transformers take before any state


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What verifying one Checkpoint came to. ``problem``: the failing object and what is wrong; None: nothing is.
    ``is_only``: the Run has no other that is usable."""

    key: StepKey
    committed_utc: str
    by: Means
    loss: float | None = None
    expected: float | None = None
    note: str | None = None
    bytes_read: int = 0
    seconds: float = 0.0
    problem: tuple[str, str] | None = None
    is_only: bool = False


class Verifier:
    """``open_load``: makes what loads a Checkpoint, at the first that is to be; raises where that cannot be done.
    ``at_once``: how many Shards may be read side by side, asked before each."""

    def __init__(
        self,
        store: ObjectStore,
        run_id: str,
        *,
        open_load: Callable[[], LoadPort] | str,
        now_utc: Callable[[], str],
        free_bytes: Callable[[], int] = available_bytes,
        monotonic: Callable[[], float] = time.monotonic,
        at_once: Callable[[], int] = lambda: SHARDS_AT_ONCE,
    ) -> None:
        """``open_load`` a text: nothing is loaded, for that reason."""
        self._store = store
        self._log = CommitLog(store, run_id)  # one for all: it remembers what it read of Commits, not the listings
        self._open_load = open_load
        self._load: LoadPort | None = None
        self._now_utc, self._free_bytes, self._monotonic = now_utc, free_bytes, monotonic
        self._at_once = at_once

    def unverified(self) -> dict[StepKey, int]:
        """Usable Checkpoints without a record, newest first, and their stored bytes. Raises StoreUnavailable."""
        known = verified_keys(self._store)
        waiting = (commit for commit in reversed(self._log.commits()) if commit.step_key not in known)
        return {commit.step_key: commit.stored_bytes for commit in waiting}

    def verify(self, key: StepKey) -> Verdict | None:
        """Check one, and write the record where it is good. None: it is gone. Raises StoreUnavailable."""
        began = self._monotonic()
        commit = self._find(key)
        if commit is None:
            return None
        verdict = self._verdict(commit)
        usable = [one.step_key for one in self._log.commits()]
        if key not in usable:
            return None  # what was deleted while it was read looks damaged
        if verdict.problem is None:
            write_verified(self._store, self._record(verdict))
        return replace(verdict, seconds=self._monotonic() - began, is_only=len(usable) == 1)

    def _find(self, key: StepKey) -> Commit | None:
        """The usable Commit of ``key``."""
        return next((commit for commit in self._log.commits() if commit.step_key == key), None)

    def _verdict(self, commit: Commit) -> Verdict:
        report = verify_commit(self._store, self._log, commit, at_once=self._at_once)
        found = Verdict(key=commit.step_key, committed_utc=commit.time_utc, by="digests", bytes_read=report.bytes_read)
        if report.problems:
            first = report.problems[0]
            more = f" (and {len(report.problems) - 1} more)" if len(report.problems) > 1 else ""
            return replace(found, problem=(first.key, f"{first.reason}{more}"))
        load = self._ready_load()
        if isinstance(load, str):
            return replace(found, note=load)
        return self._loaded(load, commit, found)

    def _ready_load(self) -> LoadPort | str:
        """What loads, or why nothing is loaded."""
        if isinstance(self._open_load, str):
            return self._open_load
        free = self._free_bytes()
        if self._load is None and _MEMORY_SHARE * free < _PROCESS_BYTES:
            return f"this host has only {free} bytes of memory free"
        if self._load is None:
            try:
                self._load = self._open_load()
            except Exception as error:  # noqa: BLE001 - a program that cannot load here says nothing of a Checkpoint
                _log.warning("Checkpoints are verified by their digests alone", exc_info=error)
                self._open_load = f"this process cannot load it: {type(error).__name__}: {error}"
                return self._open_load
        need = self._load.state_bytes
        if need > _MEMORY_SHARE * free:
            return f"a state of {need} bytes is more than {_MEMORY_SHARE:.0%} of the {free} that this host has free"
        return self._load

    def _loaded(self, load: LoadPort, commit: Commit, found: Verdict) -> Verdict:
        try:
            nobody = Attempt(number=0, nonce=new_nonce())  # of no Attempt: nobody resumes
            plan = plan_of(self._log, commit, attempt=nobody)
            finding = load.check(plan, self._store)
        except CorruptCheckpoint as error:
            return replace(found, by="load", problem=(error.key, error.reason))
        except ManifestMismatch as error:
            return replace(found, by="load", problem=(commit.manifest_key, str(error)))
        except StorageError:
            raise
        except Exception as error:  # noqa: BLE001 - as above
            _log.warning("step %d could not be loaded here", commit.step, exc_info=error)
            return replace(found, note=f"not loaded: {type(error).__name__}: {error}")
        by: Means = "load" if finding.is_loaded else "digests"
        return replace(found, by=by, loss=finding.loss, expected=finding.expected, note=finding.note)

    def _record(self, verdict: Verdict) -> VerifiedRecord:
        return VerifiedRecord(
            step=verdict.key.step,
            attempt=AttemptRecord.of(verdict.key.attempt),
            time_utc=self._now_utc(),
            by=verdict.by,
            loss=verdict.loss,
            expected=verdict.expected,
            note=verdict.note,
        )

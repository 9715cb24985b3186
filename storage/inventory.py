"""What a Run's place holds: every Checkpoint with its standing, and the saves that were cut off. Reads only.

Which Checkpoints count is asked of the commit log, which of them retention would keep of storage.retention. No Shard is
opened and no Manifest is read here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from storage.commit_log import CommitLog
from storage.history import effective_history
from storage.keys import MANIFESTS, SHARDS, StepKey, parse_record_key, parse_shard_key, parse_step_key
from storage.manifest import Commit, Manifest, QuarantineRecord
from storage.object_store import ObjectEntry, ObjectStore
from storage.retention import choose_deletions

__all__ = ["CutOffSave", "Inventory", "Standing", "StoredStep", "best_of", "fidelity_of", "take_inventory"]

Standing = Literal["usable", "void", "quarantined", "unreadable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredStep:
    """One Commit record and what it is worth. ``commit`` is None where the record cannot be read.

    ``void``: a newer Attempt went on from an earlier step, so this is no longer the Run's history.
    """

    key: StepKey
    record: str
    commit: Commit | None
    standing: Standing
    quarantine: QuarantineRecord | None = None
    is_newest: bool = False
    is_best: bool = False
    is_archived: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CutOffSave:
    """Shards or a Manifest that no Commit names: a save under way, or one that never became a Checkpoint."""

    key: StepKey
    keys: tuple[str, ...]
    stored_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """Everything under one Run's URL that belongs to a step, in order of step and Attempt."""

    url: str
    steps: tuple[StoredStep, ...]
    cut_off: tuple[CutOffSave, ...]

    @property
    def history(self) -> list[Commit]:
        """The usable Commits, oldest first."""
        return [step.commit for step in self.steps if step.standing == "usable" and step.commit is not None]

    def of(self, standing: Standing) -> list[StoredStep]:
        return [step for step in self.steps if step.standing == standing]


def take_inventory(log: CommitLog, *, with_cut_off: bool = True, archive_every_h: float | None = None) -> Inventory:
    """Read the records; with ``with_cut_off`` also list Shards and Manifests.

    ``archive_every_h`` marks what a Run with that setting keeps for good.
    """
    # Listed before the Commits: what is committed in between then has a Commit and is not taken for cut off.
    pieces = _pieces(log.store) if with_cut_off else {}
    scan, quarantined = log.scan(), log.quarantined()
    history = effective_history(scan.commits, quarantined)
    usable = {commit.object_key for commit in history}
    newest, best = (history[-1].object_key if history else None), best_of(history)
    archived = _archived(history, archive_every_h)
    steps = [
        StoredStep(
            key=commit.step_key,
            record=commit.object_key,
            commit=commit,
            standing="usable" if commit.object_key in usable else _lost(commit.step_key in quarantined),
            quarantine=quarantined.get(commit.step_key),
            is_newest=commit.object_key == newest,
            is_best=best is not None and commit.object_key == best.object_key,
            is_archived=commit.object_key in archived,
        )
        for commit in scan.commits
    ]
    for name in scan.unreadable:
        if (key := parse_step_key(name)) is not None:
            standing: Standing = "quarantined" if key in quarantined else "unreadable"
            steps.append(
                StoredStep(key=key, record=name, commit=None, standing=standing, quarantine=quarantined.get(key))
            )
    committed = {step.key for step in steps}
    return Inventory(
        url=log.store.url,
        steps=tuple(sorted(steps, key=lambda step: step.key)),
        cut_off=tuple(piece for key, piece in sorted(pieces.items()) if key not in committed),
    )


def best_of(history: Sequence[Commit]) -> Commit | None:
    """The Commit that retention keeps for its metric; None where no metric was recorded."""
    if not any(commit.metric is not None and commit.metric == commit.metric for commit in history):
        return None
    doomed = {commit.step_key for commit in choose_deletions(history, keep=1)}
    kept = [commit for commit in history if commit.step_key not in doomed]
    return min(kept, key=lambda commit: commit.step_key)


def _archived(history: Sequence[Commit], archive_every_h: float | None) -> set[str]:
    """What retention keeps for its age alone: neither needed as the newest nor as the best."""
    if archive_every_h is None or not history:
        return set()
    without = {commit.object_key for commit in choose_deletions(history, keep=1)}
    doomed = {commit.object_key for commit in choose_deletions(history, keep=1, archive_every_h=archive_every_h)}
    return without - doomed


def fidelity_of(manifest: Manifest) -> str:
    """``lossless``, or ``bounded`` when any tensor was rounded within a verified bound."""
    is_bounded = any(getattr(layout, "bound", None) is not None for layout in manifest.tensors.values())
    return "bounded" if is_bounded else "lossless"


def _lost(is_quarantined: bool) -> Standing:
    return "quarantined" if is_quarantined else "void"


def _pieces(store: ObjectStore) -> dict[StepKey, CutOffSave]:
    found: dict[StepKey, list[ObjectEntry]] = {}
    for entry in store.list(SHARDS):
        if (parsed := parse_shard_key(entry.key)) is not None:
            found.setdefault(parsed[0], []).append(entry)
    for entry in store.list(MANIFESTS):
        if (record := parse_record_key(entry.key, MANIFESTS)) is not None:
            found.setdefault(record.step_key, []).append(entry)
    return {
        key: CutOffSave(
            key=key,
            keys=tuple(entry.key for entry in entries),
            stored_bytes=sum(entry.size for entry in entries),
        )
        for key, entries in found.items()
    }

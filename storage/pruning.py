"""Pruning by hand. Asked of an OverlayStore it says what it would do, asked of the place itself it does it.

Which Checkpoints go is storage.retention's choice, how they go storage.sweeper's. The newest one is never among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from storage.commit_log import CommitLog
from storage.inventory import CutOffSave, Inventory, take_inventory
from storage.keys import StepKey
from storage.manifest import Commit
from storage.object_store import ObjectStore
from storage.retention import choose_deletions
from storage.sweeper import sweep, sweep_orphans, sweep_uploads, sweep_void

__all__ = ["PruneResult", "PruneWish", "age_s_of", "prune"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneWish:
    """What the caller asked for. With ``keep``, ``archive_every_h`` and ``older_than_s`` None no usable one goes."""

    keep: int | None = None
    archive_every_h: float | None = None
    older_than_s: float | None = None
    void: bool = False
    orphans: bool = False
    grace_s: float = 3600.0

    @property
    def gives_up_usable_ones(self) -> bool:
        return (self.keep, self.archive_every_h, self.older_than_s) != (None, None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneResult:
    """What went. ``kept``: the usable Checkpoints that stayed, oldest first."""

    doomed: tuple[Commit, ...] = ()
    void: tuple[Commit, ...] = ()
    orphans: tuple[CutOffSave, ...] = ()
    kept: tuple[Commit, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.doomed or self.void or self.orphans)

    @property
    def stored_bytes(self) -> int:
        committed = sum(commit.stored_bytes for commit in (*self.doomed, *self.void))
        return committed + sum(orphan.stored_bytes for orphan in self.orphans)


def age_s_of(commit: Commit, now_s: float) -> float:
    """Seconds since the Commit by its writer's clock, never negative; 0 where its time cannot be read: never old."""
    try:
        time = datetime.fromisoformat(commit.time_utc)
        return max(0.0, now_s - (time if time.tzinfo is not None else time.replace(tzinfo=UTC)).timestamp())
    except (ValueError, OverflowError):
        return 0.0


def prune(store: ObjectStore, wish: PruneWish, *, now_s: float) -> PruneResult:
    """Delete what ``wish`` gives up, each Checkpoint un-committed first. ``now_s`` is Unix time."""
    log = CommitLog(store, None)
    inventory = take_inventory(log)
    history = inventory.history
    if not history:
        return PruneResult()
    live = history[-1].step_key.attempt
    doomed = _given_up(history, wish, now_s) if wish.gives_up_usable_ones else []
    # Void ones go first, asked for or not: once the Commits that made them void are gone they would count again.
    void = sweep_void(store, log, live) if wish.void or doomed else []
    sweep(store, log, doomed)
    orphans: list[CutOffSave] = []
    if wish.orphans:
        seen_at_s = _hopeless_since_s(inventory, now_s)
        gone = set(sweep_orphans(store, log, live, seen_at_s=seen_at_s, grace_s=wish.grace_s, now_s=now_s))
        orphans = [piece for piece in inventory.cut_off if gone & set(piece.keys)]
        sweep_uploads(store, older_than_s=max(wish.grace_s, 3600.0))
    given_up = {commit.object_key for commit in doomed}
    return PruneResult(
        doomed=tuple(doomed),
        void=tuple(void),
        orphans=tuple(orphans),
        kept=tuple(commit for commit in history if commit.object_key not in given_up),
    )


def _given_up(history: list[Commit], wish: PruneWish, now_s: float) -> list[Commit]:
    given_up = choose_deletions(history, keep=wish.keep or 1, archive_every_h=wish.archive_every_h)
    if wish.older_than_s is None:
        return given_up
    return [commit for commit in given_up if age_s_of(commit, now_s) >= wish.older_than_s]


def _hopeless_since_s(inventory: Inventory, now_s: float) -> dict[StepKey, float]:
    """Since when each cut-off save cannot become a Checkpoint any more: something later was committed."""
    commits = [step.commit for step in inventory.steps if step.commit is not None]
    since: dict[StepKey, float] = {}
    for piece in inventory.cut_off:
        order = (piece.key.attempt.number, piece.key.step)
        later = [age_s_of(commit, now_s) for commit in commits if (commit.attempt.number, commit.step) > order]
        since[piece.key] = now_s - max(later, default=0.0)
    return since

"""Which of all Commits are the Run's history, and which saves were cut off before theirs. Nothing is written here."""

from __future__ import annotations

from collections.abc import Iterable

from storage.keys import COMMITS, SHARDS, StepKey, parse_shard_key, parse_step_key
from storage.manifest import Commit
from storage.object_store import ObjectEntry, ObjectStore

__all__ = ["effective_history", "uncommitted_steps", "writer_of"]


def effective_history(commits: Iterable[Commit], quarantined: Iterable[StepKey] = ()) -> list[Commit]:
    """The Commits that are the Run's history, by step.

    A newer Attempt that went on from step b made every older Attempt's Commit beyond b void, also when its own Commits
    are quarantined by now. Of one step the highest Attempt counts. Two writers of one Attempt (a coordinator and
    the one that took its place) may both have committed one StepKey: both Commits are whole and name the same Shards,
    and the one whose writer sorts first counts, so that every reader takes the same.
    """
    unusable = set(quarantined)
    by_attempt: dict[int, list[Commit]] = {}
    for commit in commits:
        by_attempt.setdefault(commit.attempt.number, []).append(commit)
    history: dict[int, Commit] = {}
    limit: int | None = None
    for number in sorted(by_attempt, reverse=True):
        for commit in sorted(by_attempt[number], key=lambda commit: (-commit.step, commit.step_key, writer_of(commit))):
            if commit.step_key in unusable or (limit is not None and commit.step > limit):
                continue
            history.setdefault(commit.step, commit)
        bases = [commit.base_step for commit in by_attempt[number]]
        limit = min(bases) if limit is None else min(limit, *bases)
    return [history[step] for step in sorted(history)]


def writer_of(commit: Commit) -> str:
    """The nonce in the names of its records; empty for one of the first format."""
    return commit.writer or ""


def uncommitted_steps(store: ObjectStore, shards: Iterable[ObjectEntry] | None = None) -> list[StepKey]:
    """Steps that have Shards but no Commit: saves that were cut off. ``shards`` spares a second listing of Shards."""
    entries = store.list(SHARDS) if shards is None else shards
    present = {parsed[0] for entry in entries if (parsed := parse_shard_key(entry.key)) is not None}
    committed = {parse_step_key(entry.key) for entry in store.list(COMMITS)}
    return sorted(present - committed)

"""Which Checkpoints may be deleted. Pure: nothing is deleted here, and no answer ever names all of them."""

from __future__ import annotations

from collections.abc import Sequence

from storage.manifest import Commit

__all__ = ["choose_deletions"]


def choose_deletions(commits: Sequence[Commit], keep: int, best: Commit | None) -> list[Commit]:
    """Commits of the effective history that are neither among the newest ``keep`` nor ``best``, oldest first.

    ``best`` is the Commit with the lowest metric, or None to find it here; Commits without a metric are never it.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}, at least one Checkpoint is always kept")
    ordered = sorted(commits, key=lambda commit: commit.step_key)
    kept = {commit.step_key for commit in ordered[-keep:]}
    best = best or _lowest_metric(ordered)
    if best is not None:
        kept.add(best.step_key)
    return [commit for commit in ordered if commit.step_key not in kept]


def _lowest_metric(commits: Sequence[Commit]) -> Commit | None:
    # A metric that is not a number compares as nothing at all and must not win. Of equals the newest is taken.
    scored = [
        (commit.metric, commit) for commit in commits if commit.metric is not None and commit.metric == commit.metric
    ]
    return min(reversed(scored), key=lambda pair: pair[0], default=(None, None))[1]

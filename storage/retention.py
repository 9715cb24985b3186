"""Which Checkpoints may be deleted. Pure: nothing is deleted here, and no answer ever names all of them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from storage.manifest import Commit

__all__ = ["choose_deletions"]


def choose_deletions(
    commits: Sequence[Commit], keep: int, best: Commit | None = None, *, archive_every_h: float | None = None
) -> list[Commit]:
    """Commits of the effective history that nothing keeps, oldest first.

    Kept are the newest ``keep``, ``best`` (None: the one with the lowest metric), and for good the first of each window
    of ``archive_every_h`` hours. Windows are counted from 1970 in UTC by the Commits' own times, their Commits by step:
    so what is archived once stays so whatever is committed later, also when the clock jumps.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}, at least one Checkpoint is always kept")
    ordered = sorted(commits, key=lambda commit: commit.step_key)
    kept = {commit.step_key for commit in ordered[-keep:]}
    best = best or _lowest_metric(ordered)
    if best is not None:
        kept.add(best.step_key)
    if archive_every_h is not None:
        kept |= {commit.step_key for commit in _firsts(ordered, archive_every_h * 3600)}
    return [commit for commit in ordered if commit.step_key not in kept]


def _lowest_metric(commits: Sequence[Commit]) -> Commit | None:
    # A metric that is not a number compares as nothing at all and must not win. Of equals the newest is taken.
    scored = [
        (commit.metric, commit) for commit in commits if commit.metric is not None and commit.metric == commit.metric
    ]
    return min(reversed(scored), key=lambda pair: pair[0], default=(None, None))[1]


def _firsts(ordered: Sequence[Commit], window_s: float) -> list[Commit]:
    """The first Commit of each window; one whose time cannot be read belongs to none."""
    firsts: dict[int, Commit] = {}
    for commit in ordered:
        at_s = _epoch_s(commit.time_utc)
        if at_s is not None:
            firsts.setdefault(int(at_s // window_s), commit)
    return list(firsts.values())


def _epoch_s(time_utc: str) -> float | None:
    try:
        time = datetime.fromisoformat(time_utc)
        return (time if time.tzinfo is not None else time.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None

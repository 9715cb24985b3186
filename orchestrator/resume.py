"""What `run.resume` means for one driver, checked before anything is started. Only an empty place is a fresh start.

Which Checkpoint an Attempt loads is chosen later, by the coordinator (storage.restore).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from orchestrator.config import RunConfig
from orchestrator.errors import ConfigError
from storage.commit_log import CommitLog
from storage.errors import StorageError
from storage.manifest import Commit, Level
from storage.open_store import open_store
from storage.sources import RestorePlan

__all__ = ["Resume", "parse_resume"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Where a driver starts until it has committed: the newest Commit (both None), a step, or another Run's URL.

    ``levels``: load these alone; see RestorePlan.
    """

    step: int | None = None
    url: str | None = None
    allow_partial: bool = False
    levels: tuple[Level, ...] | None = None

    def narrowed(self, plan: RestorePlan) -> RestorePlan:
        """``plan`` for the Levels that were asked for."""
        if self.levels is None:
            return plan
        _log.warning("step %d is resumed with %s alone: run.resume_levels", plan.step, ", ".join(self.levels))
        return replace(plan, levels=self.levels)


def parse_resume(config: RunConfig, log: CommitLog) -> Resume:
    """The wish in ``run.resume``. Raises ConfigError where it cannot be meant, or cannot be looked up."""
    wish, partial = config.run.resume, config.run.allow_partial
    levels: tuple[Level, ...] | None = ("L1",) if config.run.resume_levels == "L1" else None
    if levels is not None and not wish.isdigit():
        # With `auto` each restart would drop the moments again.
        text = f"run.resume_levels L1 needs run.resume to be the step to go on from, not {wish}"
        raise ConfigError(config.run.url, (text,))
    if wish == "auto":
        return Resume(allow_partial=partial)
    own = _commits(config, log, config.run.url)
    if wish == "none":
        if own:
            text = (
                f"run.resume none, but {config.run.url} holds Checkpoints up to step {own[-1].step}: "
                "choose another run.url, or run.resume auto to go on"
            )
            raise ConfigError(config.run.url, (text,))
        return Resume(allow_partial=partial)
    if wish.isdigit():
        _require_step(config, int(wish), own)
        return Resume(step=int(wish), allow_partial=partial, levels=levels)
    if own:
        _log.warning("run.resume %s is passed over: %s has Checkpoints of its own", wish, config.run.url)
        return Resume(allow_partial=partial)
    if not _commits(config, CommitLog(open_store(wish, config.checkpoint.store), None), wish):
        text = f"run.resume {wish}: no usable Checkpoint there; check the path, or run.resume auto to start anew"
        raise ConfigError(config.run.url, (text,))
    return Resume(url=wish, allow_partial=partial)


def _commits(config: RunConfig, log: CommitLog, url: str) -> Sequence[Commit]:
    """The usable Commits at ``url``; a store that cannot be asked is never taken for an empty one."""
    try:
        return log.commits()
    except StorageError as error:
        raise ConfigError(config.run.url, (f"run.resume {config.run.resume}: {url}: {error}",)) from error


def _require_step(config: RunConfig, step: int, commits: Sequence[Commit]) -> None:
    steps = [commit.step for commit in commits]
    if step not in steps:
        available = ", ".join(map(str, steps)) or "none"
        text = f"run.resume {step}: no usable Checkpoint of step {step} (usable steps: {available})"
        raise ConfigError(config.run.url, (text,))
